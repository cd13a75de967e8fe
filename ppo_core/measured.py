"""One iteration of a run, timed, with the peak of its memory: to compare with `ppo_core.estimate`."""

from dataclasses import dataclass

from ppo_core.estimate import seconds_left
from ppo_core.hyperparameters import PPOConfig
from ppo_core.memory import peak_mib, resident
from ppo_core.report import iteration_seconds
from ppo_core.trainer import own_trainer


@dataclass(frozen=True)
class Measured:
    """What one iteration took."""

    peak: int
    """How far memory rose over what this process held before, in bytes; on a GPU, the most that was allocated."""
    evaluation_seconds: float
    iteration_seconds: float

    def run_seconds(self, config: PPOConfig) -> float:
        """Return how long the whole run of `config` takes at this speed, evaluations included."""
        left = seconds_left(config, 0, config.num_iterations(), self.iteration_seconds, self.evaluation_seconds)
        return self.evaluation_seconds + left


def measure(config: PPOConfig, task_name: str, device: str) -> Measured:
    """Return what the SFT policy's evaluation and the first iteration of a run take; nothing is saved.

    Raises:
        PPOTunerError: the run cannot be started, or does not fit into memory.
    """
    before = resident()
    trainer = own_trainer(config, task_name, device)
    reports = iter(trainer)
    baseline, first = next(reports), next(reports)
    where = trainer.network.policy.device
    peak = round(peak_mib(where) * 2**20) - (0 if where.type == "cuda" else before)
    return Measured(peak, baseline.metrics["time/evaluate"], iteration_seconds(first))

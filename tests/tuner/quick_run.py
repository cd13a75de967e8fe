"""A task that needs no preparation and a trainer that needs no torch, named in the tests' studies.

Reward and KL grow with the steps and the learning rate: at 1e-3 a run of four steps ends at 4 nats per response.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import OnProgress, Prompts, TaskAssets
from ppo_core.report import Sample, StepReport
from tests.tuner import quick_trainer as quick_trainers

NAME = f"{__name__}:TASK"
TRAINER = f"{__name__}:quick_trainer"
QUICK_STUDY = f"""
name = "quick"
task = "{NAME}"
trainer = "{TRAINER}"
trials = 3
[search]
learning_rate = {{ low = 1e-4, high = 1e-2, scale = "log" }}
kl_coef = "advised"
[kl]
budget = 4.0
limit = 60.0
"""
INTERRUPT_ONCE = "QUICK_RUN_INTERRUPT_ONCE"
"""Names a file: a run that finds none makes it at its second step, and sends SIGINT to the process it works for."""


def prepare(progress: OnProgress | None) -> TaskAssets:
    """Prepare nothing, in one part."""
    if progress is not None:
        progress("making nothing", 0.0)
        progress("making nothing", 1.0)
    return TaskAssets("", "", Prompts.of_texts(["a"], ["b"], ["c"]))


TASK = replace(
    quick_trainers.TASK,
    name=NAME,
    reference={"total_episodes": 256, "learning_rate": 2e-4, "batch_size": 64, "temperature": 0.9},
    advised={},
    eval_response_length=24,
    prepare=prepare,
)


class QuickTrainer(quick_trainers.QuickTrainer):
    """Steps that are a function of the configuration alone."""

    @property
    def kl(self) -> float:
        return 1000 * self.config.learning_rate * self.step

    def advance(self) -> StepReport:
        self.step += 1
        self._interrupt_once()
        metrics = {"objective/scores": self.kl / 2, "objective/kl_exact": self.kl, "val/var_explained": float("nan")}
        report = StepReport(self.step, self.step * self.config.batch_sizes(1).batch_size, metrics)
        return self.evaluated(report) if self.step % 2 == 0 else report

    def evaluated(self, report: StepReport) -> StepReport:
        metrics = {"eval/reward": 0.25 + self.kl / 2, "eval/reward_se": 0.05, "eval/kl": self.kl, "eval/kl_se": 0.1}
        samples = (Sample(0, "b", " fine", 0.5, self.kl, 2),)
        return replace(report, metrics=report.metrics | metrics, samples=samples)

    def save_model(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.txt").write_text(f"{self.config.learning_rate} {self.step}")

    def _interrupt_once(self) -> None:
        marker = os.environ.get(INTERRUPT_ONCE)
        if marker and self.step == 2 and not Path(marker).exists():
            Path(marker).touch()
            is_worker = any("ppo-tuner worker" in word for word in sys.orig_argv)  # else the run is this process's own
            os.kill(os.getppid() if is_worker else os.getpid(), signal.SIGINT)


def quick_trainer(
    config: PPOConfig, task_name: str, *, device: str = "auto", resume_from: Path | None = None
) -> QuickTrainer:
    """The factory."""
    assert task_name == NAME
    return QuickTrainer(config, resume_from)

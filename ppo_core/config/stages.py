"""A run in stages: at an episode its values change, and it continues from its checkpoint there. Never imports torch.

A fork trained from the start is such a run: with the same seed, threads and device it equals parent and fork.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ppo_core import checkpoint
from ppo_core.checkpoint import EPISODE
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.output import short
from ppo_core.report import StepReport, Trainer

MakeTrainer = Callable[[PPOConfig, Path | None], Trainer]
"""Returns a trainer of a config, new or continuing from a checkpoint."""


@dataclass(frozen=True)
class Stage:
    """An earlier stage of a run, ending with the iteration that reaches an episode."""

    values: Mapping[str, HyperValue]
    until_episode: int
    trial: int = field(compare=False)
    """The study's trial that has these values."""

    @property
    def config(self) -> PPOConfig:
        """Its hyperparameters, checked."""
        return PPOConfig.from_dict(self.values)


class StagedTrainer:
    """A run's trainer, recreated at the end of each stage. Iterate over it as over any trainer.

    The driver must save a checkpoint of each step that `ends_stage` before requesting the next step.
    """

    def __init__(
        self, stages: Sequence[Stage], config: PPOConfig, make: MakeTrainer, folder: Path, resume_from: Path | None
    ) -> None:
        """Create the trainer of the next stage; `stages` come before `config`'s, `folder` holds the checkpoints."""
        reached = checkpoint.read_manifest(resume_from)["extra"][EPISODE] if stages and resume_from is not None else -1
        self._earlier = [stage for stage in stages if stage.until_episode > reached]
        self._last = config
        self._make = make
        self._folder = folder
        self.trainer = make(self.config, resume_from)

    @property
    def config(self) -> PPOConfig:
        """Configuration of the current stage."""
        return self._earlier[0].config if self._earlier else self._last

    def ends_stage(self, report: StepReport) -> bool:
        """Return True if the next step belongs to another stage."""
        return bool(self._earlier) and report.episode >= self._earlier[0].until_episode

    def __iter__(self) -> Iterator[StepReport]:
        while True:
            for report in self.trainer:
                yield report
                if self.ends_stage(report):
                    break
            else:
                return
            del self._earlier[0]
            del self.trainer  # before another one is loaded
            self.trainer = self._make(self.config, checkpoint.step_folder(self._folder, report.step))


def require_reached(stages: Sequence[Stage], config: PPOConfig, trial: int) -> None:
    """Raise ConfigError if a run ends before its last stage, that of `config`, begins. `trial` is the fork."""
    if stages and config.whole_episodes() <= stages[-1].until_episode:
        raise ConfigError(
            f"total_episodes = {config.total_episodes} is not allowed: trial {trial} is a fork at episode "
            f"{stages[-1].until_episode}; expected more than that"
        )


def described(stages: Sequence[Stage], config: PPOConfig, trial: int) -> str:
    """Describe the values of a run in stages, and when they apply; `config` and `trial` are of its last stage.

    `episodes 0 to 960 with the values of trial 3, then with those of trial 7 (kl_coef 0.05 -> 0.1)`.
    """
    first, *others = stages
    text = f"episodes 0 to {first.until_episode} with the values of trial {first.trial}"
    for before, after in zip(stages, others, strict=False):
        changes = _changes(before.config, after.config)
        text += f", up to {after.until_episode} with those of trial {after.trial}{changes}"
    return f"{text}, then with those of trial {trial}{_changes(stages[-1].config, config)}"


def _changes(before: PPOConfig, after: PPOConfig) -> str:
    old, new = before.to_dict(), after.to_dict()
    changed = [f"{name} {short(old[name], 4)} -> {short(new[name], 4)}" for name in new if new[name] != old[name]]
    return f" ({', '.join(changed)})" if changed else ""

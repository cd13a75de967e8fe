"""A task and a trainer that do nothing, so that what a trial costs is what runs it. No torch."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ppo_core import checkpoint
from ppo_core.declare import Range
from ppo_core.hyperparameters import PPOConfig
from ppo_core.report import StepReport
from ppo_core.task import Advice, Progress, Prompts, Task, TaskAssets

STEPS = 20
BATCH = 32


def _prepare(progress: Progress | None) -> TaskAssets:
    return TaskAssets("", "", Prompts((), (), ()))


TASK = Task(
    name="null",
    doc="Nothing.",
    reference={"total_episodes": STEPS * BATCH, "batch_size": BATCH, "eval_every_episodes": STEPS * BATCH},
    advised={"learning_rate": Advice(Range(1e-5, 1e-3, "log"), "made up")},
    kl_budget=10.0,
    kl_limit=15.0,
    eval_temperature=1.0,
    eval_response_length=4,
    eval_seed=0,
    prepare=_prepare,
)


def value_of(params: Mapping[str, Any]) -> tuple[float, float]:
    """Return the value and the KL that a trial with these parameters ends at."""
    off = math.log10(float(params["learning_rate"])) + 4
    return 2 - off * off - (float(params["lam"]) - 0.95) ** 2, 5 + 2 * off


class Scripted(ABC):
    """Reports whose metrics follow from how far the run has come; evaluates before the first and after the last."""

    evaluate_every = STEPS
    """Steps between two evaluations."""
    errors: ClassVar[Mapping[str, float]]
    """The standard errors that come with an evaluation."""

    def __init__(self, resume_from: Path | None) -> None:
        self._step = -1 if resume_from is None else checkpoint.verify(resume_from)["state"]["step"]

    @abstractmethod
    def metrics(self, share: float) -> dict[str, float]:
        """Return the metrics of a step, at this share of the run."""

    def __iter__(self) -> Iterator[StepReport]:
        """Yield the reports of steps 0 to 20."""
        while self._step < STEPS:
            self._step += 1
            report = StepReport(self._step, BATCH * self._step, self.metrics(self._step / STEPS))
            yield self.evaluated(report) if self._step % self.evaluate_every == 0 else report

    def evaluated(self, report: StepReport) -> StepReport:
        """Return the report with an evaluation."""
        reward, kl = report.metrics["objective/scores"], report.metrics["objective/kl_exact"]
        return replace(report, metrics={**report.metrics, "eval/reward": reward, "eval/kl": kl, **self.errors})


class NullTrainer(Scripted):
    """Reports a few metrics at each step, and its value and KL grow evenly."""

    errors: ClassVar[Mapping[str, float]] = {"eval/reward_se": 0.1}

    def __init__(self, config: PPOConfig, resume_from: Path | None) -> None:
        super().__init__(resume_from)
        self._value, self._kl = value_of(config.to_dict())

    def metrics(self, share: float) -> dict[str, float]:
        """Return a step's metrics."""
        return {
            "objective/kl_exact": self._kl * share,
            "objective/scores": self._value * share,
            "objective/entropy": 20.0,
            "loss/policy_avg": -0.01,
            "val/var_explained": share,
        }

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write the step alone."""
        text = json.dumps(self._step)
        files = {"state.json": lambda path: path.write_text(text)}
        checkpoint.write(folder, files, state={"step": self._step}, extra=extra)

    def save_model(self, folder: Path) -> None:
        """Write nothing: there is no model."""


def factory(config: PPOConfig, task_name: str, *, device: str = "auto", resume_from: Path | None = None) -> NullTrainer:
    """Return the trainer."""
    return NullTrainer(config, resume_from)

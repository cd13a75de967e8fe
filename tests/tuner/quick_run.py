"""A task that needs no preparation and a trainer that needs no torch, named in the tests' studies.

Reward and KL grow with the steps and the learning rate: at 1e-3 a run of four steps ends at 4 nats per response.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import OnProgress, Prompts, Task, TaskAssets
from ppo_core.report import Sample, StepReport

NAME = f"{__name__}:TASK"
TRAINER = f"{__name__}:quick_trainer"
QUICK_STUDY = f"""
name = "quick"
task = "{NAME}"
trainer = "{TRAINER}"
trials = 3
strategy = "full"
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
    return TaskAssets("", "", Prompts(("a",), ("b",), ("c",)))


TASK = Task(
    name=NAME,
    doc="Nothing.",
    reference={"total_episodes": 256, "learning_rate": 2e-4, "batch_size": 64, "temperature": 0.9},
    advised={},
    kl_budget=10.0,
    kl_limit=15.0,
    eval_temperature=1.0,
    eval_response_length=24,
    eval_seed=0,
    prepare=prepare,
)


class QuickTrainer:
    """Steps that are a function of the configuration alone."""

    def __init__(self, config: PPOConfig, step: int) -> None:
        self.config = config
        self.step = step

    def __iter__(self) -> Iterator[StepReport]:
        while self.step < self.config.num_iterations():
            self.step += 1
            self._interrupt_once()
            report = StepReport(self.step, self.step * self.config.batch_sizes(1).batch_size, self._metrics())
            yield self.evaluated(report) if self.step % 2 == 0 else report

    def _metrics(self) -> dict[str, float]:
        kl = 1000 * self.config.learning_rate * self.step
        return {"objective/scores": kl / 2, "objective/kl_exact": kl, "val/var_explained": float("nan")}

    def evaluated(self, report: StepReport) -> StepReport:
        kl = 1000 * self.config.learning_rate * self.step
        metrics = {"eval/reward": 0.25 + kl / 2, "eval/reward_se": 0.05, "eval/kl": kl, "eval/kl_se": 0.1}
        samples = (Sample(0, "b", " fine", 0.5, kl, 2),)
        return replace(report, metrics=report.metrics | metrics, samples=samples)

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        checkpoint.write(folder, {}, state={"step": self.step}, extra=extra)

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
    return QuickTrainer(config, -1 if resume_from is None else checkpoint.verify(resume_from)["state"]["step"])

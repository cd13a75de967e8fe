"""The trainer of the battery's studies: PPO, with a clock, and with a second reading of what may be a study's answer.

Each step becomes a line of the file that the environment variable BATTERY_LOG names. The clock is the processor time of
steps and evaluations, those after the search included, without start-up. A checkpoint within the KL budget that is
better than all before it in its trial is read on the test prompts, too; that is not on the clock.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import is_within
from ppo_core.loading.task_file import get_task
from ppo_core.report import SplitReading, StepReport
from ppo_core.trainer import PPOTrainer, ppo_trainer

LOG = "BATTERY_LOG"


class BatteryTrainer:
    """A `PPOTrainer` that logs."""

    def __init__(self, inner: PPOTrainer, kl_budget: float) -> None:
        self._inner, self._kl_budget = inner, kl_budget
        self._best = -math.inf
        self._trial = sha256(json.dumps(inner.config.to_dict()).encode()).hexdigest()[:12]
        self._log = Path(os.environ[LOG])

    def __iter__(self) -> Iterator[StepReport]:
        steps = iter(self._inner)
        while True:
            before = time.process_time()
            report = next(steps, None)
            if report is None:
                return
            self._note(report, time.process_time() - before)
            yield report

    def evaluated(self, report: StepReport) -> StepReport:
        before = time.process_time()
        found = self._inner.evaluated(report)
        self._note(found, time.process_time() - before)
        return found

    def evaluated_again(self) -> SplitReading:
        before = time.process_time()
        found = self._inner.evaluated_again()
        line: dict[str, Any] = {"trial": self._trial, "step": self._inner.step, "cpu": time.process_time() - before}
        self._write(line | {f"again_{name}": getattr(found, name) for name in ("reward", "kl", "kl_se")})
        return found

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        self._inner.save(folder, extra)

    def save_model(self, folder: Path) -> None:
        self._inner.save_model(folder)

    def _note(self, report: StepReport, cpu: float) -> None:
        line: dict[str, Any] = {"trial": self._trial, "step": report.step, "episode": report.episode, "cpu": cpu}
        if report.is_evaluation:
            reward, kl, kl_se = (report.metrics[name] for name in ("eval/reward", "eval/kl", "eval/kl_se"))
            line |= {"reward": reward, "reward_se": report.metrics["eval/reward_se"], "kl": kl, "kl_se": kl_se}
            is_first = report.step == 0 and not self._log.exists()
            if is_first or (report.step > 0 and reward > self._best and is_within(kl, kl_se, self._kl_budget)):
                self._best = reward
                line |= _fresh(self._inner.tested())
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")


def _fresh(reading: SplitReading | None) -> dict[str, float]:
    return {} if reading is None else {f"fresh_{name}": value for name, value in asdict(reading).items()}


def battery_trainer(
    config: PPOConfig, task_name: str, *, device: str = "auto", resume_from: str | os.PathLike[str] | None = None
) -> BatteryTrainer:
    """Return the trainer; see `ppo_trainer`."""
    inner = ppo_trainer(config, task_name, device=device, resume_from=resume_from)
    return BatteryTrainer(inner, get_task(task_name).kl_budget)

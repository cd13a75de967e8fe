"""Trainers whose process does one thing each that an engine must cope with. See `tests.tuner.quick_trainer`."""

import ctypes
import functools
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.report import StepReport
from tests.tuner.quick_trainer import QuickTrainer, made_by, wait_at_gate

MODULE = __name__
VOICES = ("print", "stderr", "logging", "warnings", "descriptor", "child", "library")


class ChattyTrainer(QuickTrainer):
    """Speaks in every way at step 1, naming its trial by its seed."""

    def advance(self) -> StepReport:
        if self.step == 0:
            print("print says β")
            print("stderr says so", file=sys.stderr)
            logging.getLogger("of.a.library").warning("logging says so")
            warnings.warn("warnings says so", stacklevel=1)
            os.write(1, b"descriptor says so\n")
            subprocess.run(["/bin/echo", "child says so"], check=True)
            ctypes.CDLL(None).printf(b"library says so\n")
        return super().advance()


chatty = made_by(ChattyTrainer)


class FailingTrainer(QuickTrainer):
    """Says a word and fails."""

    def advance(self) -> StepReport:
        print("a word")
        raise RuntimeError("no more")


failing = made_by(FailingTrainer)


class LoadingTrainer(QuickTrainer):
    """Reports how often its process has loaded models, which it does as `ppo_core.loading.load.load_task` does."""

    loads = 0

    @staticmethod
    @functools.lru_cache(maxsize=1)
    def load(task_name: str) -> None:
        LoadingTrainer.loads += 1

    def advance(self) -> StepReport:
        report = super().advance()
        visible = float(os.environ.get("CUDA_VISIBLE_DEVICES") or -1)
        return replace(report, metrics=report.metrics | {"quick/loads": float(self.loads), "quick/gpu": visible})


def loading(
    config: PPOConfig, task_name: str, *, device: str = "auto", resume_from: Path | None = None
) -> LoadingTrainer:
    LoadingTrainer.load(task_name)
    return LoadingTrainer(config, resume_from)


class SavingTrainer(QuickTrainer):
    """Stays in the middle of saving step 3 until the file `gate` is there."""

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        if self.step == 3:
            wait_at_gate()
        super().save(folder, extra)


saving = made_by(SavingTrainer)


class NursingTrainer(QuickTrainer):
    """Has two children, a forked one and another program, and never gets beyond step 0."""

    def advance(self) -> StepReport:
        if self.step == 0:
            time.sleep(600)
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        forked.start()
        program = subprocess.Popen(["/bin/sleep", "600"])
        report = super().advance()
        children = {"quick/forked": float(forked.pid or 0), "quick/program": float(program.pid)}
        return replace(report, metrics=report.metrics | children)


nursing = made_by(NursingTrainer)

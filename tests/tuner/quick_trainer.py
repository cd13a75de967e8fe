"""A trainer without torch whose reports follow from the config by a formula, for tests of what runs trials.

Each step's score depends on the steps before it, so a run that lost or repeated one shows it. The other factories
misbehave in one way each, told by files in the folder `QUICK_FOLDER`.
"""

import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Advised, OnProgress, Prompts, Task, TaskAssets
from ppo_core.errors import TaskError
from ppo_core.report import Sample, SplitReading, StepReport

FOLDER_VARIABLE = "QUICK_FOLDER"
GATED_STEP = 7
DOWN = "down"
"""The file that keeps the host of the trainer `cramped` from answering for as long as it is there."""
FULL = "full"
"""The file that fills the disk of the trainer `cramped` for as long as it is there."""
STATE = "state.json"


def _prepare(progress: OnProgress | None) -> TaskAssets:
    if progress:
        progress("counting to two", 0.5)
        progress("counting to two", 1.0)
    return TaskAssets("", "", Prompts((), (), ()))


def _prepare_at_gate(progress: OnProgress | None) -> TaskAssets:
    if progress:
        progress("counting to two", 0.5)
        wait_at_gate()
    return _prepare(progress)


def _fail(progress: OnProgress | None) -> TaskAssets:
    raise TaskError("the words are missing")


TASK = Task(
    name="quick",
    doc="A formula.",
    reference={"learning_rate": 1e-4, "total_episodes": 160, "batch_size": 16, "eval_every_episodes": 48},
    advised={"learning_rate": Advised(Range(1e-5, 1e-3, "log"), "the upper third breaks the KL limit")},
    kl_budget=10.0,
    kl_limit=15.0,
    eval_temperature=1.0,
    eval_response_length=4,
    eval_seed=0,
    prepare=_prepare,
)
GATED_TASK = replace(TASK, prepare=_prepare_at_gate)
BROKEN_TASK = replace(TASK, prepare=_fail)


class QuickTrainer:
    """KL grows by learning_rate x 4e4 nats over the run; the evaluation reward is 1 + sqrt(KL)."""

    def __init__(self, config: PPOConfig, resume_from: Path | None) -> None:
        self.config = config
        self.step, self.drift = -1, 0.0
        if resume_from is not None:
            checkpoint.verify(resume_from)
            self.step, self.drift = json.loads((resume_from / STATE).read_text())

    @property
    def kl(self) -> float:
        return 4e4 * self.config.learning_rate * self.step / self.config.num_iterations()

    def __iter__(self) -> Iterator[StepReport]:
        while self.step < self.config.num_iterations():
            yield self.advance()

    def advance(self) -> StepReport:
        self.step += 1
        self.drift = 0.9 * self.drift + self.config.cliprange * math.sin(self.step)
        metrics = {
            "objective/kl_exact": self.kl,
            "objective/scores": self.drift,
            "quick/torch": float("torch" in sys.modules),
            "quick/pid": float(os.getpid()),
            "quick/threads": float(os.environ.get("OMP_NUM_THREADS", "0")),
        }
        report = StepReport(self.step, 16 * self.step, metrics)
        is_due = self.step % 3 == 0 or self.step == self.config.num_iterations()
        return self.evaluated(report) if is_due else report

    def evaluated(self, report: StepReport) -> StepReport:
        reward = 1 + math.sqrt(self.kl)
        evaluation = {"eval/reward": reward, "eval/reward_se": 0.5, "eval/kl": self.kl, "eval/kl_se": 0.25}
        sample = Sample(0, "one two", f"step {self.step}", reward, self.kl, 2)
        return replace(report, metrics=report.metrics | evaluation, samples=(sample,))

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        state = json.dumps([self.step, self.drift])
        checkpoint.write(folder, {STATE: lambda path: _write(path, state)}, state={"step": self.step}, extra=extra)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def made_by(trainer: type[QuickTrainer]) -> Callable[..., QuickTrainer]:
    """Return the factory of a kind of trainer, as a study names one."""

    def make(
        config: PPOConfig, task_name: str, *, device: str = "auto", resume_from: Path | None = None
    ) -> QuickTrainer:
        return trainer(config, resume_from)

    return make


class RoundingTrainer(QuickTrainer):
    """Measures at its start that rounding shows 2 nats per response."""

    def evaluated(self, report: StepReport) -> StepReport:
        report = super().evaluated(report)
        return replace(report, metrics=report.metrics | ({"eval/kl_rounding": 2.0} if report.step == 0 else {}))


rounding = made_by(RoundingTrainer)


class GatedTrainer(QuickTrainer):
    """Stays in the middle of step GATED_STEP until the file `gate` is there."""

    def advance(self) -> StepReport:
        if self.step + 1 == GATED_STEP:
            wait_at_gate()
        return super().advance()


def wait_at_gate() -> None:
    """Say by a file `waiting-<pid>` that this process waits, and wait for the file `gate`."""
    (_folder() / f"waiting-{os.getpid()}").touch()
    while not (_folder() / "gate").exists():
        time.sleep(0.01)


class GatedSaveTrainer(QuickTrainer):
    """Stays in the middle of saving GATED_STEP's checkpoint until the file `gate` is there."""

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        if self.step == GATED_STEP and not (_folder() / "gate").exists():
            (_folder() / "saving").touch()
            while not (_folder() / "gate").exists():
                time.sleep(0.01)
        super().save(folder, extra)


class CrampedTrainer(QuickTrainer):
    """Finds the disk full from step 6 on while the file FULL is there, and no host while the file DOWN is."""

    def advance(self) -> StepReport:
        if (_folder() / DOWN).exists():
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return super().advance()

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        if self.step >= 6 and (_folder() / FULL).exists():
            checkpoint.write(folder, {STATE: _write_nothing}, state={}, extra=extra)
        super().save(folder, extra)


def _write_nothing(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class ThreadedTrainer(QuickTrainer):
    """Reports how many threads torch would use now, and when it was made."""

    def __init__(self, config: PPOConfig, resume_from: Path | None) -> None:
        super().__init__(config, resume_from)
        self.threads_made = _torch_threads()

    def advance(self) -> StepReport:
        report = super().advance()
        threads = {"quick/threads": _torch_threads(), "quick/threads_made": self.threads_made}
        return replace(report, metrics=report.metrics | threads)


def _torch_threads() -> float:
    import torch

    return float(torch.get_num_threads())


class ReadTrainer(QuickTrainer):
    """Reads 4 test prompts, whose reward is the step: not while the file `hold` is there, nor beside `no_memory`."""

    def tested(self) -> SplitReading | None:
        if FOLDER_VARIABLE in os.environ and (_folder() / "hold").exists():
            wait_at_gate()
        if FOLDER_VARIABLE in os.environ and (_folder() / "no_memory").exists():
            raise RuntimeError("no memory left")
        return SplitReading(4, float(self.step), 0.5, self.kl, 0.25)


class RereadTrainer(ReadTrainer):
    """Reads the eval prompts again: 2 less reward over 8 nats. Beside the file `hold_second` all but the first wait."""

    def evaluated_again(self) -> SplitReading:
        if FOLDER_VARIABLE in os.environ and (_folder() / "hold_second").exists():
            if (_folder() / "first").exists():
                wait_at_gate()
            (_folder() / "first").touch()
        return SplitReading(4, 1 + math.sqrt(self.kl) - 2 * (self.kl > 8), 0.5, self.kl, 0.25)


class UntestedTrainer(QuickTrainer):
    """Of a task without test prompts."""

    def tested(self) -> SplitReading | None:
        return None


class RaisingTrainer(QuickTrainer):
    """Fails at step 4 where the config's cliprange is under 0.2 (trial 0's is 0.2)."""

    def advance(self) -> StepReport:
        if self.step == 3 and self.config.cliprange < 0.2:
            raise RuntimeError(f"cliprange {self.config.cliprange} is too small\nand more lines")
        return super().advance()


class NaNTrainer(QuickTrainer):
    """Has a policy of NaN."""

    kl = math.nan


class FarTrainer(QuickTrainer):
    """Begins with a KL of 100, far over the limit."""

    kl = 100.0


class StumblingTrainer(QuickTrainer):
    """Raises an error in several steps, in each of them once."""

    def advance(self) -> StepReport:
        stumbled = _folder() / f"stumbled-{self.step + 1}"
        if self.step + 1 in (2, 5, 8, 10) and not stumbled.exists():
            stumbled.touch()
            raise RuntimeError("once")
        return super().advance()


class CornerTrainer(RaisingTrainer, GatedTrainer):
    """As `raising`, once another trial has come to the gate, where all others wait."""

    def advance(self) -> StepReport:
        while self.config.cliprange < 0.2 and not any(_folder().glob("waiting-*")):
            time.sleep(0.01)
        return super().advance()


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


def out_of_memory(
    config: PPOConfig, task_name: str, *, device: str = "auto", resume_from: Path | None = None
) -> QuickTrainer:
    """Has no memory, ever."""
    raise OutOfMemoryError("tried to allocate 20.5 MiB")


class KilledTrainer(QuickTrainer):
    """Its process is killed in step 5 as often as the file `kills` says."""

    def advance(self) -> StepReport:
        if _is_due(self.step == 4):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().advance()


class CutOffTrainer(QuickTrainer):
    """Cannot reach its host in step 5 as often as the file `kills` says."""

    def advance(self) -> StepReport:
        if _is_due(self.step == 4):
            raise RuntimeError("no answer") from ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        return super().advance()


class UnsavedTrainer(QuickTrainer):
    """Its disk fails at its last checkpoint as often as the file `kills` says."""

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        if _is_due(self.step == self.config.num_iterations()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().save(folder, extra)


class PoisonedTrainer(QuickTrainer):
    """In step 5, as often as the file `kills` says, raises an error that every later trial of the process meets, too.

    So does a device-side assertion of CUDA, after which nothing works in the process.
    """

    is_poisoned = False

    def advance(self) -> StepReport:
        if _is_due(self.step == 4):
            PoisonedTrainer.is_poisoned = True
        if PoisonedTrainer.is_poisoned:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return super().advance()


class UnevaluableTrainer(QuickTrainer):
    """Blows up at step 4, and can no longer be evaluated then."""

    def advance(self) -> StepReport:
        report = super().advance()
        if self.step != 4:
            return report
        return replace(report, metrics=report.metrics | {"objective/kl_exact": math.nan})

    def evaluated(self, report: StepReport) -> StepReport:
        if self.step == 4:
            raise ValueError("probabilities are NaN")
        return super().evaluated(report)


def _is_due(is_there: bool) -> bool:
    """Return True there, as often as the file `kills` says."""
    kills = _folder() / "kills"
    left = int(kills.read_text())
    if is_there and left:
        kills.write_text(str(left - 1))
    return is_there and left > 0


def _folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


# A factory of each, as studies name them.
factory = made_by(QuickTrainer)
gated = made_by(GatedTrainer)
gated_save = made_by(GatedSaveTrainer)
cramped = made_by(CrampedTrainer)
threaded = made_by(ThreadedTrainer)
tested = made_by(ReadTrainer)
reread = made_by(RereadTrainer)
untested = made_by(UntestedTrainer)
raising = made_by(RaisingTrainer)
all_nan = made_by(NaNTrainer)
far = made_by(FarTrainer)
stumbling = made_by(StumblingTrainer)
corner = made_by(CornerTrainer)
killed = made_by(KilledTrainer)
cut_off = made_by(CutOffTrainer)
unsaved = made_by(UnsavedTrainer)
poisoned = made_by(PoisonedTrainer)
unevaluable = made_by(UnevaluableTrainer)

"""Records the runs of a task's search space to their ends, in several processes that may be killed at any moment.

Each finished run is a file in the working folder. A process claims a run by a lock on a file, which ends with the
process, so a run that was interrupted is run again. The recording's file is rewritten from the finished runs as
they come in; where the working folder is gone, the recording continues from it.
"""

import datetime
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from multiprocessing import connection
from pathlib import Path
from typing import Any, get_args

from filelock import FileLock, Timeout

from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError
from ppo_core.hyperparameters import PPOConfig
from ppo_core.report import StepReport, Trainer
from ppo_core.task_file import get_task
from tuner.budget_watch import WatchState, watch
from tuner.guard import CORE, READ
from tuner.spec import StudySpec

from . import pool, recorded
from .recorded import Cause, Kind, RecordedEvaluation, RecordedRun, RecordedStep, Recording

ROOT = Path(__file__).parents[2]
EARLY = 0.05
"""Share of the episodes after which there is an evaluation for a strategy's rung."""
EVALUATIONS = 10
"""Regular evaluations after step 0's."""
WRITE_EVERY = 10
"""Finished runs after which the recording's file is rewritten."""
POLL_SECONDS = 5.0
"""How often a process with nothing to claim looks whether others have finished."""


@dataclass(frozen=True)
class Amount:
    """How many runs are wanted."""

    random: int
    near_top: int = 0
    top: int = 0
    """How many of the best are repeated on other seeds."""
    seeds: int = 3
    """Seeds of each of these, its first one included."""


DEFAULT_AMOUNTS = {"reviews": Amount(random=300, near_top=60, top=15)}
OTHER_AMOUNT = Amount(random=120)


@dataclass(frozen=True)
class Planned:
    """A run that is wanted."""

    name: str
    kind: Kind
    number: int
    params: Mapping[str, HyperValue]
    seed: int
    repeats: str = ""


MakeTrainer = Callable[[PPOConfig, str], Trainer]
"""Makes the trainer of a configuration on a task."""


def make_ppo(config: PPOConfig, task: str) -> Trainer:
    """Return the PPO trainer of a configuration, on the CPU."""
    from ppo_core.trainer import ppo_trainer  # imports torch

    return ppo_trainer(config, task, device="cpu")


def built_in_study(task: str) -> StudySpec:
    """Return the study whose space is recorded: the task's study file, or else all ranges that the task advises.

    Raises:
        ConfigError: there is no such task.
    """
    file = ROOT / "studies" / f"{task}.toml"
    if file.exists():
        spec = StudySpec.load(file)
    else:
        search = dict.fromkeys(get_task(task).advised, "advised")
        content = {"name": task, "task": task, "trials": 1, "seed": 0, "threads": 1, "search": search}
        spec = StudySpec.from_dict(content, f"task {task}")
    return replace(spec, device="cpu")


# One run.


def record_run(spec: StudySpec, planned: Planned, make_trainer: MakeTrainer) -> RecordedRun:
    """Train one configuration to its end, whatever the guard would say, and return what it reported.

    It is evaluated at step 0 and every tenth of its episodes, also at the first step after EARLY of them, and where
    the watch on the KL budget says so. It stops where it raises, or where a core metric is not finite.
    """
    config = run_config(spec, planned)
    early = math.ceil(EARLY * config.total_episodes)
    trainer = make_trainer(config, spec.task)
    steps: list[RecordedStep] = []
    state, stopped = WatchState(), ""
    clock, reports = _Clock(trainer), iter(trainer)
    while not stopped:
        try:
            report = next(reports, None)
        except Exception as error:
            if not steps:
                raise  # nothing was trained yet, so it says nothing of the configuration
            stopped = f"step {steps[-1].step + 1}: {_named(error)}"
            break
        if report is None:
            break
        seconds, evaluation_seconds = clock.lap()
        if report.step == 0:
            seconds, evaluation_seconds = 0.0, seconds + evaluation_seconds
        state, is_due = watch(state, report, spec.kl_budget)
        is_early = report.episode >= early > (steps[-1].episode if steps else 0)
        flags: dict[Cause, bool] = {"regular": report.is_evaluation, "early": is_early, "watch": is_due}
        causes = tuple(cause for cause, holds in flags.items() if holds)
        if causes and not report.is_evaluation:
            try:
                report = trainer.evaluated(report)
            except Exception as error:
                stopped = f"evaluation of step {report.step}: {_named(error)}"
            evaluation_seconds = clock.lap()[1]
        steps.append(_step(report, causes, seconds, evaluation_seconds))
        stopped = stopped or _not_finite(report)
    return RecordedRun(
        planned.name,
        planned.kind,
        planned.number,
        planned.seed,
        planned.params,
        config.to_dict(),
        tuple(steps),
        stopped,
        repeats=planned.repeats,
    )


def run_config(spec: StudySpec, planned: Planned) -> PPOConfig:
    """Return a run's configuration."""
    config = replace(spec.config(planned.params), seed=planned.seed)
    return replace(config, eval_every_episodes=max(1, config.total_episodes // EVALUATIONS))


class _Clock:
    """CPU-seconds of this process since the last lap: of all but the evaluations, and of these.

    A trainer evaluates within its steps, too, so its method is replaced by one that is timed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._evaluated = trainer.evaluated
        self._evaluations = 0.0
        trainer.evaluated = self._timed  # type: ignore[method-assign]
        self._mark = self._read()

    def _timed(self, report: StepReport) -> StepReport:
        start = time.process_time()
        try:
            return self._evaluated(report)
        finally:
            self._evaluations += time.process_time() - start

    def _read(self) -> tuple[float, float]:
        return time.process_time(), self._evaluations

    def lap(self) -> tuple[float, float]:
        before, self._mark = self._mark, self._read()
        evaluation = self._mark[1] - before[1]
        return self._mark[0] - before[0] - evaluation, evaluation


def _step(report: StepReport, causes: tuple[Cause, ...], seconds: float, evaluation_seconds: float) -> RecordedStep:
    evaluation = None
    if report.is_evaluation:
        metrics = {name: value for name, value in report.metrics.items() if name.startswith("eval/")}
        rewards, kls = (report.readings.rewards, report.readings.kls) if report.readings else ((), ())
        evaluation = RecordedEvaluation(causes, metrics, rewards, kls, evaluation_seconds)
    metrics = {name: report.metrics[name] for name in READ if name in report.metrics and not name.startswith("eval/")}
    return RecordedStep(report.step, report.episode, metrics, seconds, evaluation)


def _not_finite(report: StepReport) -> str:
    """Return which core metric is not finite, or an empty text: the guard ends such a run."""
    bad = [name for name in CORE if not math.isfinite(report.metrics.get(name, 0.0))]
    return f"step {report.step}: {bad[0]} is {report.metrics[bad[0]]}" if bad else ""


def _named(error: Exception) -> str:
    lines = str(error).replace(f"{ROOT}/", "").splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


# The working folder.


@dataclass(frozen=True)
class Workshop:
    """A task's finished runs and claims, and the recording's file that is written from them."""

    spec: StudySpec
    file: Path
    """The recording."""
    folder: Path
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """What its runs are made with now."""

    def open(self) -> None:
        """Make the folder; where it lacks runs that the recording has, take them from there.

        Raises:
            ConfigError: the recording, or what the folder holds, is of another space.
        """
        (self.folder / "finished").mkdir(parents=True, exist_ok=True)
        (self.folder / "claims").mkdir(exist_ok=True)
        with self._lock("writing"):
            finished = self.finished()
            for path in (self._path(name) for name in sorted(finished)[:1]):
                self._require_same_space(path, recorded.read(path))
            if not self.file.exists():
                return
            old = recorded.read(self.file)
            self._require_same_space(self.file, old)
            for run in old.runs:
                if run.name not in finished:
                    self._write_one(run, old.provenance)
            if old.region is not None and not self._region_file.exists():
                _write_text(self._region_file, json.dumps(old.region))

    def finished(self) -> set[str]:
        """Return the names of the finished runs."""
        return {path.stem for path in (self.folder / "finished").glob("*.parquet")}

    def runs(self) -> list[RecordedRun]:
        """Return the finished runs."""
        return [run for part in self._parts() for run in part.runs]

    def region(self) -> pool.Region:
        """Return the region near the top, which is found once, from the random runs that are finished then."""
        with self._lock("region"):
            found = self._known_region()
            if found is None:
                found = pool.find_region(self.spec, [run for run in self.runs() if run.kind == "random"])
                _write_text(self._region_file, json.dumps(found.to_dict()))
            return found

    @contextmanager
    def claimed(self, names: Iterable[str]) -> Iterator[str | None]:
        """Hold the first of `names` that is neither finished nor held by another process; None if there is none."""
        for name in names:
            lock = self._lock(name)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                if name not in self.finished():
                    yield name
                    return
            finally:
                lock.release()
        yield None

    def finish(self, run: RecordedRun) -> None:
        """Note a run as finished; at every WRITE_EVERY-th one rewrite the recording."""
        self._write_one(run, (self.provenance,))
        if len(self.finished()) % WRITE_EVERY == 0:
            self.assemble()

    def assemble(self) -> None:
        """Write the recording from the finished runs, with their weights."""
        with self._lock("writing"):
            parts, region = self._parts(), self._known_region()
            runs = sorted((run for part in parts for run in part.runs), key=_order)
            weights = pool.weights(self.spec, region, runs)
            made = {json.dumps(entry, sort_keys=True): entry for part in parts for entry in part.provenance}
            recording = Recording(
                self.spec.to_dict(),
                tuple(replace(run, weight=weights[run.name]) for run in runs),
                None if region is None else region.to_dict(),
                tuple(made[key] for key in sorted(made)),
            )
            if runs:
                recorded.write(self.file, recording)

    def _require_same_space(self, path: Path, found: Recording) -> None:
        if _identity(found.study) != _identity(self.spec.to_dict()):
            raise ConfigError(
                f"{path.name} is of another search space, seed, KL budget or number of threads than the study has "
                f"now; to record again, move away {self.file.name} and the folder of finished runs, {self.folder}"
            )

    def _parts(self) -> list[Recording]:
        return [recorded.read(self._path(name)) for name in sorted(self.finished())]

    def _write_one(self, run: RecordedRun, provenance: Sequence[Mapping[str, Any]]) -> None:
        recorded.write(self._path(run.name), Recording(self.spec.to_dict(), (run,), None, tuple(provenance)))

    def _known_region(self) -> pool.Region | None:
        file = self._region_file
        return pool.Region.from_dict(json.loads(file.read_text())) if file.exists() else None

    def _path(self, name: str) -> Path:
        return self.folder / "finished" / f"{name}.parquet"

    @property
    def _region_file(self) -> Path:
        return self.folder / "region.json"

    def _lock(self, name: str) -> FileLock:
        return FileLock(self.folder / "claims" / f"{name}.lock")


def _order(run: RecordedRun) -> tuple[int, int, int, str]:
    return (get_args(Kind).index(run.kind), run.number, run.seed, run.name)


def _identity(study: Mapping[str, Any]) -> dict[str, Any]:
    """Return what runs of two recordings must share, to be of one."""
    return {key: study[key] for key in ("task", "seed", "threads", "fixed", "search", "kl")}


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


# What is still to be recorded, and by whom.


class Plan:
    """The wanted runs in three rounds, each planned by what the one before it found."""

    def __init__(self, workshop: Workshop, amount: Amount) -> None:
        self._workshop = workshop
        self._amount = amount

    def left(self) -> list[Planned]:
        """Return the unfinished runs of the first round that is not finished, in order."""
        for name in ("_random", "_near_top", "_repeats"):
            finished = self._workshop.finished()
            left = [planned for planned in getattr(self, name) if planned.name not in finished]
            if left:
                return left
        return []

    @cached_property
    def _random(self) -> list[Planned]:
        drawn = pool.random_params(self._workshop.spec, self._amount.random)
        return [self._planned("random", number, params) for number, params in enumerate(drawn)]

    @cached_property
    def _near_top(self) -> list[Planned]:
        if not self._amount.near_top:
            return []
        spec, region = self._workshop.spec, self._workshop.region()
        randoms = [run for run in self._workshop.runs() if run.kind == "random"]
        drawn = pool.near_params(spec, region, randoms, self._amount.near_top)
        return [self._planned("near-top", number, params) for number, params in enumerate(drawn)]

    @cached_property
    def _repeats(self) -> list[Planned]:
        if self._amount.seeds < 2 or not self._amount.top:
            return []
        spec = self._workshop.spec
        best = pool.repeated(self._workshop.runs(), spec.kl_budget, self._amount.top)
        return [
            Planned(f"{run.name}-seed-{seed}", "seed", run.number, run.params, spec.seed + seed, run.name)
            for seed in range(1, self._amount.seeds)
            for run in best
        ]

    def _planned(self, kind: Kind, number: int, params: pool.Params) -> Planned:
        return Planned(f"{kind}-{number:04d}", kind, number, params, self._workshop.spec.seed)


def work(workshop: Workshop, amount: Amount, make_trainer: MakeTrainer, until: float = math.inf) -> None:
    """Record what is left and not held by others; begin no run after the time `until`."""
    plan = Plan(workshop, amount)
    while time.time() < until and (left := plan.left()):
        by_name = {planned.name: planned for planned in left}
        with workshop.claimed(by_name) as name:
            if name is not None:
                run = record_run(workshop.spec, by_name[name], make_trainer)
                workshop.finish(run)
                print(_line(run, workshop.spec.kl_budget), flush=True)
        if name is None:
            time.sleep(POLL_SECONDS)


def record(task: str, amount: Amount, workers: int, seconds: float | None) -> int:
    """Record a task's runs in `workers` processes, and return the exit status.

    Begins no run after so many `seconds`, if they are given.
    """
    spec = built_in_study(task)
    workshop = Workshop(spec, recorded.file_of(task), ROOT / "runs" / "benchmarks" / "search" / task, _provenance(spec))
    workshop.open()
    until = math.inf if seconds is None else time.time() + seconds
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(workshop, amount, until)) for _ in range(workers)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.terminate()
    workshop.assemble()
    left = Plan(workshop, amount).left()
    print(f"{len(workshop.finished())} runs are recorded" + (f"; {len(left)} or more are left" if left else ""))
    return max(abs(process.exitcode or 0) for process in processes)


def _work(workshop: Workshop, amount: Amount, until: float) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    import torch

    torch.set_num_threads(workshop.spec.threads or 1)
    work(workshop, amount, make_ppo, until)


def _end_with(sentinel: int) -> None:
    """End this process when its parent ends, however that does."""
    connection.wait([sentinel])
    os._exit(1)


def _line(run: RecordedRun, kl_budget: float) -> str:
    best = run.best_within(kl_budget)
    outcome = "no evaluation within the budget" if best is None else f"best within the budget {best:6.3f}"
    return (
        f"{run.name}: {outcome}, {run.cpu_seconds:5.1f} CPU-seconds{f', stopped: {run.stopped}' if run.stopped else ''}"
    )


def _provenance(spec: StudySpec) -> dict[str, Any]:
    """Return what runs are made with from now on."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["benchmarks/search.py", *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
        "cpu": _cpu_model(),
        "threads": spec.threads,
    }


def _commit() -> str:
    """Return the commit of this checkout, with a plus where what trains was changed since."""
    try:
        head = _git("rev-parse", "HEAD").strip()
        return head + ("+" if _git("status", "--porcelain", "--", "ppo_core", "tuner", "benchmarks/support") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""Trains configurations to their ends, whatever the guard would say, and records what they reported.

A recording's file is rewritten every few runs, so a recording that is killed goes on with what is missing.
"""

import datetime
import functools
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from ppo_core.config.declare import HyperValue
from ppo_core.errors import ConfigError
from ppo_core.loading.task_file import get_task
from ppo_core.report import StepReport, Trainer, first_not_finite
from tuner.judge.guard import READ, WatchState, watch
from tuner.search.propose import propose
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.study_file import SamplerSpec

from . import recorded
from .common import commit, made_up
from .recorded import Cause, Kind, RecordedEvaluation, RecordedRun, RecordedStep, Recording

ROOT = Path(__file__).parents[2]
EARLY = 0.05
"""Share of the episodes after which there is an early evaluation."""
EVALUATIONS = 10
"""Regular evaluations after step 0's."""
WRITE_EVERY = 10
"""Finished runs after which the recording's file is rewritten."""


@dataclass(frozen=True)
class Amount:
    """How many runs are wanted."""

    random: int
    top: int = 0
    """How many of the best are repeated on other seeds."""
    seeds: int = 3
    """Seeds of each of these, its first one included."""


DEFAULT_AMOUNTS = {"reviews": Amount(random=300, top=15)}
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


def record_run(spec: StudySpec, planned: Planned) -> RecordedRun:
    """Train one configuration to its end, whatever the guard would say, and return what it reported.

    It is evaluated at step 0 and every tenth of its episodes, also at the first step after EARLY of them, and where
    the watch on the KL budget says so. It stops where it raises, or where a core metric is not finite.
    """
    from ppo_core.trainer import ppo_trainer  # imports torch

    config = replace(spec.config(planned.params), seed=planned.seed)
    config = replace(config, eval_every_episodes=max(1, config.total_episodes // EVALUATIONS))
    early = math.ceil(EARLY * config.total_episodes)
    trainer = ppo_trainer(config, spec.task, device="cpu")
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
        state, is_due = watch(state, report, spec.kl_budget, config.eval_interval)
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
        0.0 if planned.repeats else 1.0,
        planned.repeats,
    )


class _Clock:
    """CPU-seconds of this process since the last lap: of all but the evaluations, and of these.

    A trainer evaluates within its steps, too, so its method is replaced by one that is timed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._evaluated = trainer.evaluated
        self._evaluations = 0.0
        trainer.evaluated = self._timed  # type: ignore[method-assign]
        self._mark = self._read()

    def _timed(self, report: StepReport, **options: Any) -> StepReport:
        start = time.process_time()
        try:
            return self._evaluated(report, **options)
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
        evaluation = RecordedEvaluation(causes, metrics, evaluation_seconds)
    metrics = {name: report.metrics[name] for name in READ if name in report.metrics and not name.startswith("eval/")}
    return RecordedStep(report.step, report.episode, metrics, seconds, evaluation)


def _not_finite(report: StepReport) -> str:
    """Return which core metric is not finite, or an empty text: the guard ends such a run."""
    bad = first_not_finite(report)
    return f"step {report.step}: {bad} is {report.metrics[bad]}" if bad else ""


def _named(error: Exception) -> str:
    lines = str(error).replace(f"{ROOT}/", "").splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def train(spec: StudySpec, planned: Sequence[Planned], workers: int, until: float = math.inf) -> Iterator[RecordedRun]:
    """Yield runs as they end, trained in so many processes of one thread; none begins after the time `until`."""
    if not planned:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for run in pool.imap_unordered(functools.partial(_train, spec, until), planned):
            if run is not None:
                yield run


def _train(spec: StudySpec, until: float, planned: Planned) -> RecordedRun | None:
    import torch

    torch.set_num_threads(1)
    return record_run(spec, planned) if time.time() < until else None


# A recording.


def record(task: str, amount: Amount, workers: int, seconds: float | None) -> int:
    """Record what is missing of a task's runs in `workers` processes, and return the exit status.

    Begins no run after so many `seconds`, if they are given.

    Raises:
        ConfigError: there is a recording of another space, or one that must not grow.
    """
    spec, file = built_in_study(task), recorded.file_of(task)
    old = recorded.read(file) if file.exists() else Recording(spec.to_dict(), (), ())
    if _identity(old.study) != _identity(spec.to_dict()):
        raise ConfigError(
            f"{file.name} is of another search space, seed, KL budget or number of threads than the study has now; to "
            "record again, move it away"
        )
    runs = {run.name: run for run in old.runs}
    until = math.inf if seconds is None else time.time() + seconds
    for plan in (_randoms, _repeats):
        left = {one.name: one for one in plan(spec, amount, list(runs.values())) if one.name not in runs}
        if left and any(run.kind == "near-top" for run in old.runs):
            raise ConfigError(f"{file.name} has weights, which further runs would change; move it away to record again")
        for run in train(spec, list(left.values()), workers, until):
            print(_line(run, spec.kl_budget), flush=True)
            del left[run.name]
            runs[run.name] = run
            if not left or len(runs) % WRITE_EVERY == 0:
                _write(file, spec, old, runs.values())
        if left:  # the time is over
            _write(file, spec, old, runs.values())
            break
    print(f"{len(runs)} runs are recorded")
    return 0


def _write(file: Path, spec: StudySpec, old: Recording, runs: Iterable[RecordedRun]) -> None:
    made = _provenance(spec)
    provenance = (*(one for one in old.provenance if one != made), made)
    recorded.write(file, Recording(spec.to_dict(), tuple(sorted(runs, key=_order)), provenance))


def _randoms(spec: StudySpec, amount: Amount, runs: Sequence[RecordedRun]) -> list[Planned]:
    """Return what a random search of the study proposes."""
    random = replace(spec, sampler=SamplerSpec(name="random"))
    rows, found = list[TrialRow](), list[Planned]()
    for number in range(amount.random):
        params = propose(random, rows, number)
        rows.append(made_up({}, params, number=number))
        found.append(Planned(f"random-{number:04d}", "random", number, params, spec.seed))
    return found


def _repeats(spec: StudySpec, amount: Amount, runs: Sequence[RecordedRun]) -> list[Planned]:
    """Return the best within the budget on other seeds."""
    values = [(run, run.best_within(spec.kl_budget)) for run in runs if run.kind != "seed"]
    ranked = sorted((item for item in values if item[1] is not None), key=lambda item: (-(item[1] or 0), item[0].name))
    return [
        Planned(f"{run.name}-seed-{seed}", "seed", run.number, run.params, spec.seed + seed, run.name)
        for seed in range(1, amount.seeds)
        for run, _ in ranked[: amount.top]
    ]


def _order(run: RecordedRun) -> tuple[int, int, int, str]:
    return (get_args(Kind).index(run.kind), run.number, run.seed, run.name)


def _identity(study: Mapping[str, Any]) -> dict[str, Any]:
    """Return what runs of two recordings must share, to be of one."""
    return {key: study[key] for key in ("task", "seed", "threads", "fixed", "search", "kl")}


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
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numpy")},
        "cpu": _cpu_model(),
        "threads": spec.threads,
    }


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

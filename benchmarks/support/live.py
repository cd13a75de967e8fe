"""Whole studies, run for real: random search, ours with one sampler or another, and Optuna alone.

Each study is a process of its own with one worker and one thread, and its result a file, so that a stopped benchmark
resumes where it was. What is compared is the best value that a study knew after so many CPU-seconds, of all of its
processes: the same for all.
"""

import json
import math
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ppo_core.config.kl_budget import is_within
from ppo_core.errors import ConfigError
from tuner.control.events import Event, TrialStepped
from tuner.control.run import run_study
from tuner.study.spec import StudySpec

from .intervals import Interval

RANDOM, PEER = "random search", "Optuna alone"
FOLDER = Path("runs", "benchmarks", "search", "live")
"""Where results are kept, from the repository's root."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Seen:
    """One evaluation of a study."""

    cpu_seconds: float
    """Of all processes of the study until then."""
    trial: int
    step: int
    reward: float
    kl: float
    kl_se: float


@dataclass(frozen=True)
class Result:
    """How one study went."""

    arm: str
    seed: int
    cpu_seconds: float
    wall_seconds: float
    episodes: int
    trials: int
    evaluations: tuple[Seen, ...]
    picked: float | None = None
    """What Optuna alone picks: the best completed trial that ends within the KL budget, by its last two evaluations."""

    def best(self, kl_budget: float, cpu_seconds: float = math.inf) -> float:
        """Return the best value of a trained checkpoint within the KL budget known by then; NaN without one."""
        known = (seen.reward for seen in self._within(kl_budget) if seen.cpu_seconds <= cpu_seconds)
        return max(known, default=math.nan)

    def reaches(self, value: float, kl_budget: float) -> float:
        """Return the CPU-seconds after which it knew a checkpoint within the KL budget worth `value`; inf: never."""
        return min((seen.cpu_seconds for seen in self._within(kl_budget) if seen.reward >= value), default=math.inf)

    def _within(self, kl_budget: float) -> list[Seen]:
        """Return the evaluations of trained checkpoints within the KL budget."""
        return [seen for seen in self.evaluations if seen.step > 0 and is_within(seen.kl, seen.kl_se, kl_budget)]


Arms = Mapping[str, str | None]
"""What is compared: by name its sampler; None: Optuna alone."""


def arms(samplers: Sequence[str], peer: bool) -> Arms:
    """Return random search, ours with each sampler, and, where asked for, Optuna alone."""
    ours = {f"ours, {name}": name for name in samplers}
    return {RANDOM: "random", **ours, **({PEER: None} if peer else {})}


def run_all(
    sides: Arms, spec: StudySpec, study: Path, studies: int, folder: Path, progress: Callable[[str], None]
) -> dict[str, list[Result]]:
    """Return the results by arm; those that `folder` holds are not run again. The arms take turns.

    Args:
        sides: What is compared.
        spec: The study, with its budget.
        study: Its file.
        studies: How many of each, with the seeds from 0.
        folder: Where results are kept.
        progress: Called for each study.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of all processes: CPU-seconds are compared
    found: dict[str, list[Result]] = {arm: [] for arm in sides}
    for seed in range(studies):
        for arm, sampler in sides.items():
            name = arm.replace(", ", "-").replace(" ", "-")
            path = folder / spec.name / f"budget-{spec.budget:g}" / name / f"{seed}.json"
            if not path.exists():
                work = path.with_suffix("")
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
                if sampler is None:
                    result = run_peer(spec, study, seed)
                else:
                    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                        result = pool.submit(_run_ours, arm, _table(spec, sampler, seed), seed, work).result()
                _write(path, result)
                shutil.rmtree(work)
            result = _read(path)
            found[arm].append(result)
            value = result.best(spec.kl_budget)
            progress(f"{arm}, seed {seed}: {value:.3f} in {result.cpu_seconds:.0f} CPU-seconds")
    return found


def _write(path: Path, result: Result) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(result)))
    part.replace(path)


def _read(path: Path) -> Result:
    content = json.loads(path.read_text())
    return Result(**{**content, "evaluations": tuple(Seen(**seen) for seen in content["evaluations"])})


# Ours and random search


def _table(spec: StudySpec, sampler: str, seed: int) -> dict[str, Any]:
    """Return a study of ours: for its budget alone, on one thread, without starts of its own."""
    left_out = ("trials", "start", "warm_start")
    table = {key: value for key, value in spec.to_dict().items() if key not in left_out}
    return table | {"threads": 1, "device": "cpu", "seed": seed, "sampler": table["sampler"] | {"name": sampler}}


def _run_ours(arm: str, table: dict[str, Any], seed: int, folder: Path) -> Result:
    """Run a study in this process, which does nothing else."""
    spec = StudySpec.from_dict(table, "study")
    seen: list[Seen] = []
    trials: dict[int, int] = {}

    def note(event: Event) -> None:
        if isinstance(event, TrialStepped):
            trials[event.number] = event.report.episode
            metrics = event.report.metrics
            if event.report.is_evaluation:
                numbers = (metrics["eval/reward"], metrics["eval/kl"], metrics["eval/kl_se"])
                seen.append(Seen(_cpu_seconds(), event.number, event.report.step, *numbers))

    begin = time.monotonic()
    storage = f"sqlite:///{folder / 'store.db'}"
    if not run_study(spec, storage=storage, runs_folder=folder / "runs", workers=1, on_event=note):
        raise ConfigError(f"{arm}, seed {seed}: the study was stopped before its end")
    wall = time.monotonic() - begin
    return Result(arm, seed, _cpu_seconds(), wall, sum(trials.values()), len(trials), tuple(seen))


def _cpu_seconds() -> float:
    """Return the processor time of this process and all of its children, those that run and those that ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    running = (_of_process(child.pid) for child in psutil.Process().children())
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(running)


def _of_process(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS  # user and system time, its own and its ended children's


# Optuna alone


def run_peer(spec: StudySpec, study: Path, seed: int) -> Result:
    """Run `optuna_alone.py` in a process of its own."""
    script = Path(__file__).with_name("optuna_alone.py")
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run(
        [sys.executable, script, study, "--budget", str(spec.budget), "--seed", str(seed)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if ended.returncode:
        raise ConfigError(f"optuna_alone.py failed: {ended.stderr.strip().splitlines()[-1]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = json.loads(ended.stdout.splitlines()[-1])
    seen = tuple(Seen(**one) for one in said["evaluations"])
    wall = time.monotonic() - begin
    return Result(PEER, seed, cpu, wall, said["episodes"], said["trials"], seen, said["value"])


# What they came to


@dataclass(frozen=True)
class Summary:
    """One arm's studies."""

    arm: str
    studies: int
    value: Interval
    """Best value within the KL budget after the same CPU-seconds as all arms."""
    gain: Interval
    """What that is over the random search of the same seed."""
    speed: float
    """Median CPU-seconds to what random search comes to by then in the mean, over these seconds; inf: never."""
    at_end: Interval
    """Best value at the study's own end."""
    picked: Interval | None
    """See `Result.picked`; None: of ours, or a study picked nothing."""
    cpu_seconds: float
    wall_seconds: float
    """Medians."""
    trials: float


def summarise(found: Mapping[str, Sequence[Result]], kl_budget: float) -> tuple[float, list[Summary]]:
    """Return the CPU-seconds at which all arms are read, and each arm's summary.

    They are read at the random search's median; a study that ended before keeps what it had.
    """
    moment = statistics.median(result.cpu_seconds for result in found[RANDOM])
    baseline = [result.best(kl_budget, moment) for result in found[RANDOM]]
    to_reach = statistics.fmean(baseline)
    summaries = []
    for arm, results in found.items():
        values = [result.best(kl_budget, moment) for result in results]
        picked = [result.picked for result in results if result.picked is not None]
        summaries.append(
            Summary(
                arm,
                len(results),
                Interval.of(values),
                Interval.of([value - other for value, other in zip(values, baseline, strict=True)]),
                statistics.median(result.reaches(to_reach, kl_budget) for result in results) / moment,
                Interval.of([result.best(kl_budget) for result in results]),
                Interval.of(picked) if len(picked) == len(results) else None,
                statistics.median(result.cpu_seconds for result in results),
                statistics.median(result.wall_seconds for result in results),
                statistics.median(result.trials for result in results),
            )
        )
    return moment, summaries


def table(moment: float, summaries: Sequence[Summary]) -> str:
    """Return the summaries as lines for people."""
    lines = [
        f"Best value within the KL budget after {moment:.0f} CPU-seconds, mean over {summaries[0].studies} studies "
        "[95%, bootstrap]",
        f"{'':20}{'value':>24}{'over random':>26}{'time to it':>12}{'at its own end':>26}{'CPU s':>8}{'trials':>8}",
    ]
    for one in summaries:
        lines.append(
            f"{one.arm:20}{one.value.text(3):>24}{one.gain.text(3):>26}{one.speed:12.2f}{one.at_end.text(3):>26}"
            f"{one.cpu_seconds:8.0f}{one.trials:8g}"
        )
        if one.picked is not None:
            lines.append(f"{'':20}{one.picked.text(3):>24}  as it picks: completed, within the budget at its end")
    lines.append("time to it: median CPU-seconds to random search's mean value, as a share of the time that took.")
    return "\n".join(lines)

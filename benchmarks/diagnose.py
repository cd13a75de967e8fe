"""Whether the advice of `ppo-tuner diagnose` helps: the advised change against a random change of the same trial.

    python benchmarks/diagnose.py run      # trains what is missing; resumes where it was
    python benchmarks/diagnose.py show     # by rule: what the change gained, against a random one

The trials are recorded runs (benchmarks/data) in whose curves a rule speaks, up to the guard's end: for each rule the
first CASES of the random ones. Each is trained again with the advised change, and with another searched value drawn at
random, on the same seeds. What counts is the value: the best eval reward within the KL budget.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support import recorded
from support.common import add_line, read_lines, run_command
from support.recorded import RecordedRun, Recording, guarded
from support.recording import Planned, built_in_study, train

from ppo_core.config.declare import HyperValue
from tuner.confirm.intervals import ALPHA, Interval, Readings, pooled
from tuner.judge.diagnose import Course, Diagnosis, diagnose
from tuner.search.prior import spread_params
from tuner.study.spec import StudySpec

TASK = "reviews"
FILE = Path("runs", "benchmarks", "diagnose", "runs.jsonl")
CASES, SEEDS = 6, 1
SEED = 17
"""Of the random changes."""
Key = tuple[str, str, str, int]
"""A run's name, a rule, the kind of a case, and its seed."""


@dataclass(frozen=True)
class Case:
    """A recorded run in which a rule speaks, and what to try instead."""

    rule: str
    run: str
    """Its name in the recording."""
    kind: str
    """`as it was`, `advised` or `random`."""
    changed: str
    """The hyperparameter."""
    params: Mapping[str, HyperValue]
    seed: int

    @property
    def key(self) -> Key:
        """Unique."""
        return self.run, self.rule, self.kind, self.seed

    @property
    def name(self) -> str:
        """Unique."""
        return " ".join(map(str, self.key))


def cases(recording: Recording, count: int, seeds: int) -> list[Case]:
    """Return what is to be trained, in the order of the recording."""
    spec, found = recording.spec, dict[str, int]()
    chosen: list[Case] = []
    for run in recording.runs:
        if run.kind != "random":
            continue
        for one in spoken(run, spec):
            if found.get(one.rule, 0) >= count or one.name not in spec.search:
                continue
            found[one.rule] = found.get(one.rule, 0) + 1
            chosen += _of(run, one, spec, seeds)
            break  # a run is a case of one rule: the one whose advice comes first
    return chosen


def spoken(run: RecordedRun, spec: StudySpec) -> list[Diagnosis]:
    """Return what is diagnosed of a run as a study would have had it: up to where the guard ends it."""
    reports, reason = guarded(run, spec)
    rows = [{"step": one.step, "episode": one.episode, **one.metrics} for one in reports]
    return diagnose(Course(rows, run.config, spec, reason))


def _of(run: RecordedRun, one: Diagnosis, spec: StudySpec, seeds: int) -> Iterator[Case]:
    names = sorted(name for name in run.params if name in spec.search and name != one.name)
    other = names[int(np.random.default_rng(run.number).integers(len(names)))]
    drawn = spread_params(spec.search, SEED, run.number)
    for seed in range(spec.seed, spec.seed + seeds):
        yield Case(one.rule, run.name, "advised", one.name, {**run.params, one.name: one.value}, seed)
        yield Case(one.rule, run.name, "random", other, {**run.params, other: drawn[other]}, seed)
        if seed != spec.seed:
            yield Case(one.rule, run.name, "as it was", "", run.params, seed)


def run(arguments: argparse.Namespace) -> None:
    """Train what is missing, each case to its end."""
    spec, there = built_in_study(TASK), set(_done())
    found = cases(recorded.read(recorded.file_of(TASK)), arguments.cases, arguments.seeds)
    left = {case.name: case for case in found if case.key not in there}
    planned = [Planned(name, "random", 0, case.params, case.seed) for name, case in left.items()]
    for ended in train(spec, planned, arguments.workers):
        case, value = left[ended.name], ended.best_within(spec.kl_budget)
        end = {"value": value, "end_kl": ended.rows()[-1]["eval/kl"], "stopped": ended.stopped}
        add_line(FILE, asdict(case) | end)
        print(f"{case.run} {case.rule}, {case.kind}: {case.changed}, value {value}", flush=True)


def _done() -> dict[Key, float | None]:
    return {(one["run"], one["rule"], one["kind"], one["seed"]): one["value"] for one in read_lines(FILE)}


def show(arguments: argparse.Namespace) -> None:
    """Print by rule what the advised change gained on the trial as it was, and on a random change."""
    recording = recorded.read(recorded.file_of(TASK))
    was = {run.name: run.best_within(recording.spec.kl_budget) for run in recording.runs}
    of, found = _done(), {}
    for rule in dict.fromkeys(r for _, r, _, _ in of):
        found[rule] = judged(
            [
                (  # a run with nothing within the budget is worth the least that there is: nothing gained
                    of[(name, r, "advised", seed)] or 0.0,
                    of[(name, r, "random", seed)] or 0.0,
                    of.get((name, r, "as it was", seed), was[name]) or 0.0,
                )
                for name, r, kind, seed in of
                if r == rule and kind == "advised" and (name, r, "random", seed) in of
            ]
        )
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{'rule':28}{'n':>4}  {'over the trial as it was':>26}  {'over a random change':>26}  better than random")
    for rule, one in found.items():
        gain, over = _text(one["gain"]), _text(one["over_random"])
        print(f"{rule:28}{one['n']:>4}  {gain:>26}  {over:>26}  {one['wins']} of {one['n']}")


def _interval(values: Sequence[float]) -> Interval | None:
    readings = Readings(dict(enumerate(values)))
    return pooled([readings]).interval([readings], ALPHA) if values else None


def judged(triples: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Return what changes came to, from (advised, random, as it was)."""
    gain = _interval([advised - was for advised, _, was in triples])
    over = _interval([advised - random for advised, random, _ in triples])
    wins = sum(advised > random for advised, random, _ in triples)
    return {
        "n": len(triples),
        "wins": wins,
        "gain": None if gain is None else asdict(gain),
        "over_random": None if over is None else asdict(over),
    }


def _text(interval: Mapping[str, Any] | None) -> str:
    if interval is None or interval["low"] is None:
        return "-"
    return f"{interval['mean']:+.2f} [{interval['low']:+.2f}, {interval['high']:+.2f}]"


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    trains = commands.add_parser("run", help="train what is missing")
    trains.add_argument("--cases", type=int, default=CASES, help=f"trials a rule ({CASES})")
    trains.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds of each ({SEEDS})")
    trains.add_argument("--workers", type=int, default=2, help="runs at a time (2)")
    trains.set_defaults(run=run)
    shows = commands.add_parser("show", help="what the changes came to, by rule")
    shows.add_argument("--json", action="store_true", help="print one line of JSON instead")
    shows.set_defaults(run=show)
    return run_command(parser)


if __name__ == "__main__":
    sys.exit(main())

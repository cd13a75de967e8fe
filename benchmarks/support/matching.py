"""What another β makes of a configuration: recorded runs whose KL ended off the budget, run again."""

import json
import multiprocessing
import os
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tuner.scoring import TrialList
from tuner.search.matching import GOAL, Matching
from tuner.spec import StudySpec
from tuner.status import Origin, Status
from tuner.store import TrialRow

from .recorded import RecordedRun, Recording
from .recording import ROOT, Planned, make_ppo, record_run

FOLDER = ROOT / "runs" / "benchmarks" / "search" / "match"
SEED = 3
"""Of the order in which the runs are taken."""


@dataclass(frozen=True)
class Matched:
    """A configuration before and after. Values are the best eval reward within the KL budget; KL is at the end."""

    run: str
    beta: float
    kl: float
    value: float
    new_beta: float
    new_kl: float
    new_value: float


def runs_to_match(recording: Recording) -> list[tuple[RecordedRun, dict[str, Any]]]:
    """Return the random runs whose β would be changed, each with its params at the other β, in random order."""
    found = []
    for run in recording.runs:
        match = Matching(recording.spec).next(TrialList([_row(run, recording.spec)]))
        if run.kind == "random" and match is not None:
            found.append((run, dict(match.params)))
    random.Random(SEED).shuffle(found)
    return found


def _row(run: RecordedRun, spec: StudySpec) -> TrialRow:
    """Return the run as a trial of a study; one that stopped is not completed."""
    status = Status.FAILED if run.stopped else Status.COMPLETED
    config = spec.config(run.params).to_dict()
    return TrialRow(
        id=0, study_id=0, number=0, origin=Origin.SAMPLED, status=status, reason=None, config=config,
        params=dict(run.params), value=run.best_within(spec.kl_budget), value_se=None, kl=None, violation=None,
        episodes=run.total_episodes, seconds=0.0, attempts=1, threads=1, started_at=0.0, ended_at=0.0,
        end_kl=run.rows()[-1]["eval/kl"],
    )  # fmt: skip


def match_runs(recording: Recording, count: int, workers: int, tell: Callable[[str], None]) -> list[Matched]:
    """Run so many configurations at their other β; those that ran before are not run again."""
    file = FOLDER / f"{recording.spec.task}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {one.run: one for one in _read(file)}
    wanted = runs_to_match(recording)[:count]
    left = [pair for pair in wanted if pair[0].name not in known]
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(workers) as pool, file.open("a") as out:
        for one in pool.imap_unordered(partial(_match, recording.study), left):
            out.write(json.dumps(asdict(one)) + "\n")
            out.flush()
            known[one.run] = one
            tell(f"{one.run}: {one.value:.3f} at {one.kl:.1f} nats, now {one.new_value:.3f} at {one.new_kl:.1f}")
    return [known[run.name] for run, _ in wanted]


def _read(file: Path) -> list[Matched]:
    return [Matched(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _match(study: dict[str, Any], pair: tuple[RecordedRun, dict[str, Any]]) -> Matched:
    import torch

    run, params = pair
    spec = StudySpec.from_dict(study, "the recording")
    torch.set_num_threads(1)
    again = record_run(spec, Planned(run.name, "random", run.number, params, run.seed), make_ppo)
    return Matched(
        run.name,
        float(str(run.params["kl_coef"])),
        run.rows()[-1]["eval/kl"],
        _value(run, spec),
        params["kl_coef"],
        again.rows()[-1]["eval/kl"],
        _value(again, spec),
    )


def _value(run: RecordedRun, spec: StudySpec) -> float:
    found = run.best_within(spec.kl_budget)
    return float("nan") if found is None else found


def table(found: Sequence[Matched], kl_budget: float) -> str:
    """Return what the other β gained, for runs that had ended over the budget and for those far below it."""
    lines = [
        f"{len(found)} configurations with a fixed β, run again at the β that aims at {GOAL * kl_budget:.2f} of "
        f"{kl_budget:g} nats. Medians [quartiles].",
        f"{'had ended':16}{'n':>4}{'KL then':>20}{'KL now':>20}{'value then':>24}{'value now':>24}  better",
    ]
    groups: dict[str, Iterable[Matched]] = {
        "over the budget": [one for one in found if one.kl > kl_budget],
        "below it": [one for one in found if one.kl <= kl_budget],
        "all": found,
    }
    for name, members in groups.items():
        some = list(members)
        if len(some) < 2:
            continue
        cells = [
            _spread([getattr(one, key) for one in some], digits)
            for key, digits in (("kl", 1), ("new_kl", 1), ("value", 3), ("new_value", 3))
        ]
        better = sum(one.new_value > one.value for one in some)
        lines.append(
            f"{name:16}{len(some):>4}{cells[0]:>20}{cells[1]:>20}{cells[2]:>24}{cells[3]:>24}  {better} of {len(some)}"
        )
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

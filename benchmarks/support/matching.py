"""What another β makes of a configuration: recorded runs whose KL ended off the budget, run again."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ppo_core.declare import HyperValue
from tuner.search.matching import GOAL, match
from tuner.spec import StudySpec
from tuner.status import Status
from tuner.store import TrialRow

from .common import add_line, made_up, read_lines
from .recorded import RecordedRun, Recording
from .recording import ROOT, Planned, train

FOLDER = ROOT / "runs" / "benchmarks" / "search" / "match"


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


def runs_to_match(recording: Recording) -> list[tuple[RecordedRun, dict[str, HyperValue]]]:
    """Return the random runs whose β would be changed, each with its params at the other β, in random order."""
    found = []
    for run in recording.runs:
        new = match(recording.spec, [_row(run, recording.spec)]) if run.kind == "random" else None
        if new is not None and new.params is not None:
            found.append((run, dict(new.params)))
    random.Random(3).shuffle(found)
    return found


def _row(run: RecordedRun, spec: StudySpec) -> TrialRow:
    """Return the run as a trial of a study; one that stopped is not completed."""
    status = Status.FAILED if run.stopped else Status.COMPLETED
    end = {"status": status, "value": run.best_within(spec.kl_budget), "end_kl": run.rows()[-1]["eval/kl"]}
    return made_up(spec.config(run.params).to_dict(), run.params, **end)


def match_runs(recording: Recording, count: int, workers: int, tell: Callable[[str], None]) -> list[Matched]:
    """Run so many configurations at their other β; those that ran before are not run again."""
    spec, file = recording.spec, FOLDER / f"{recording.spec.task}.jsonl"
    known = {line["run"]: Matched(**line) for line in read_lines(file)}
    wanted = {run.name: (run, params) for run, params in runs_to_match(recording)[:count]}
    left = [
        Planned(name, "random", run.number, params, run.seed)
        for name, (run, params) in wanted.items()
        if name not in known
    ]
    for again in train(spec, left, workers):
        one = Matched(again.name, *_end(wanted[again.name][0], spec), *_end(again, spec))
        known[one.run] = one
        add_line(file, asdict(one))
        tell(f"{one.run}: {one.value:.3f} at {one.kl:.1f} nats, now {one.new_value:.3f} at {one.new_kl:.1f}")
    return [known[name] for name in wanted]


def _end(run: RecordedRun, spec: StudySpec) -> tuple[float, float, float]:
    """Return a run's β, its KL at the end, and its value; NaN: it has none."""
    value = run.best_within(spec.kl_budget)
    return float(str(run.params["kl_coef"])), run.rows()[-1]["eval/kl"], math.nan if value is None else value


def table(found: Sequence[Matched], kl_budget: float) -> str:
    """Return what the other β gained, for runs that had ended over the budget and for those far below it."""
    lines = [
        f"{len(found)} configurations with a fixed β, run again at the β that aims at {GOAL * kl_budget:.2f} of "
        f"{kl_budget:g} nats. Medians [quartiles].",
        f"{'had ended':16}{'n':>4}{'KL then':>20}{'KL now':>20}{'value then':>24}{'value now':>24}  better",
    ]
    groups = {
        "over the budget": [one for one in found if one.kl > kl_budget],
        "below it": [one for one in found if one.kl <= kl_budget],
        "all": found,
    }
    for name, some in groups.items():
        if len(some) < 2:
            continue
        kl, new_kl = (_spread([getattr(one, key) for one in some], 1) for key in ("kl", "new_kl"))
        value, new_value = (_spread([getattr(one, key) for one in some], 3) for key in ("value", "new_value"))
        better = f"{sum(one.new_value > one.value for one in some)} of {len(some)}"
        lines.append(f"{name:16}{len(some):>4}{kl:>20}{new_kl:>20}{value:>24}{new_value:>24}  {better}")
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

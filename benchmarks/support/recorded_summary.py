"""What a recording holds, in a few lines: how the task's configurations do, and whether the task distinguishes them."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from ppo_core.config.kl_budget import is_within
from tuner.study.spec import StudySpec

from .recorded import CAUSES, RecordedRun, Recording, guarded

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def summary(recording: Recording) -> str:
    """Return what is recorded, as lines. Shares and quantiles are of the random runs alone."""
    spec = recording.spec
    randoms = [run for run in recording.runs if run.kind == "random"]
    best = {run.name: value for run in recording.runs if (value := run.best_within(spec.kl_budget)) is not None}
    end = {run.name: value for run in recording.runs if (value := run.value_at_end()) is not None}
    crossing = [run for run in randoms if crosses(run, spec.kl_budget)]
    lines = [
        f"{spec.task}: {_kinds(recording.runs)}; KL budget {spec.kl_budget:g} nats, limit {spec.kl_limit:g}",
        f"of {len(randoms)} random runs:",
        f"  {len(crossing)} cross the budget, {sum(returns(run, spec.kl_budget) for run in crossing)} of them return",
        f"  the guard would stop {_stops(spec, randoms)}",
        f"  {sum(bool(run.stopped) for run in randoms)} came to no end",
        f"  CPU-seconds per run: {_quantiles((run.cpu_seconds for run in randoms), digits=1)}",
        f"  best within the budget: {_quantiles(best[run.name] for run in randoms if run.name in best)}",
        f"  value at the end:       {_quantiles(end[run.name] for run in randoms if run.name in end)}",
    ]
    lines += _foretold([run for run in randoms if run.name in best], best)
    near = [best[run.name] for run in recording.runs if run.kind == "near-top" and run.name in best]
    lines += [f"near the top: {_quantiles(near)}"] if near else []
    return "\n".join([*lines, *_spreads(recording.runs, best)])


def crosses(run: RecordedRun, kl_budget: float) -> bool:
    """Return whether an evaluation's KL is over the budget."""
    return any(row["eval/kl"] > kl_budget for row in run.rows())


def returns(run: RecordedRun, kl_budget: float) -> bool:
    """Return whether an evaluation is within the budget after one whose KL is over it."""
    was_over = False
    for row in run.rows():
        if was_over and is_within(row["eval/kl"], row["eval/kl_se"], kl_budget):
            return True
        was_over = was_over or row["eval/kl"] > kl_budget
    return False


def seed_spreads(runs: Sequence[RecordedRun], values: dict[str, float]) -> list[float]:
    """Return the standard deviation over seeds of each run that was repeated."""
    groups = defaultdict(list)
    for run in runs:
        if run.repeats and run.name in values:
            groups[run.repeats].append(values[run.name])
    return [statistics.stdev([values[name], *others]) for name, others in groups.items() if name in values]


def _spreads(runs: Sequence[RecordedRun], values: dict[str, float]) -> list[str]:
    spreads = seed_spreads(runs, values)
    of_random = [values[run.name] for run in runs if run.kind == "random" and run.name in values]
    if not spreads or len(of_random) < 2:
        return []
    over_runs, over_seeds = statistics.stdev(of_random), statistics.median(spreads)
    return [
        f"standard deviation over random configurations: {over_runs:.3f}; over seeds, median of {len(spreads)} of the "
        f"best: {over_seeds:.3f}",
        f"ratio: {over_runs / over_seeds:.1f}",
    ]


SHARES = (0.05, 0.1, 0.2, 0.3)
"""Of the episodes, at which the forecast of a trial's end is judged."""


def _foretold(runs: Sequence[RecordedRun], best: dict[str, float]) -> list[str]:
    """Return how the best within the budget is ranked by an evaluation early in a run."""
    runs = [run for run in runs if run.steps[-1].episode >= run.total_episodes]
    if len(runs) < 3:
        return []
    final = [best[run.name] for run in runs]
    upper = [value > statistics.median(final) for value in final]
    lines = ["rank correlation with the best within the budget (within its upper half), at a share of the episodes:"]
    for metric in ("eval/reward", "eval/kl"):
        texts = []
        for share in SHARES:
            pairs = [(_early(run, metric, share), value) for run, value in zip(runs, final, strict=True)]
            half = [pair for pair, is_upper in zip(pairs, upper, strict=True) if is_upper]
            texts.append(f"{share:.0%} {_rank(pairs)} ({_rank(half)})")
        lines.append(f"  {metric}: {'  '.join(texts)}")
    return lines


def _rank(pairs: Sequence[tuple[float, float]]) -> str:
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return "-"
    return f"{stats.spearmanr(*zip(*pairs, strict=True)).statistic:.2f}"


def _early(run: RecordedRun, metric: str, share: float) -> float:
    """Return a metric of the last evaluation up to the first step at or after a share of the episodes."""
    until = next(step.episode for step in run.steps if step.episode >= share * run.total_episodes - 1e-9)
    return float([row[metric] for row in run.rows(CAUSES) if row["episode"] <= until][-1])


def _kinds(runs: Sequence[RecordedRun]) -> str:
    counts = Counter(run.kind for run in runs)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no runs"


def _stops(spec: StudySpec, runs: Sequence[RecordedRun]) -> str:
    rules = Counter(reason.rule for run in runs if (reason := guarded(run, spec)[1]) is not None)
    by_rule = ", ".join(f"{rule} {count}" for rule, count in rules.most_common())
    return f"{rules.total()}" + (f" ({by_rule})" if by_rule else "")


def _quantiles(values: Iterable[float], digits: int = 3) -> str:
    found = list(values)
    if not found:
        return "none"
    return "  ".join(
        f"{'max' if share == 1 else f'{share:.0%}'} {value:.{digits}f}"
        for share, value in zip(QUANTILES, np.quantile(found, QUANTILES), strict=True)
    )

"""What the replay found, as tables for people."""

import math

from ppo_core.output import counted

from .comparing import BUDGETS, RANDOM_TRIALS, Comparison, Lost, Ratio, Spread

TARGET_STRATEGY = 1 / 3
"""Of random search's device-seconds, both at the best checkpoint."""
TARGET_TOTAL = 1 / 5
"""Of the device-seconds of a random search that is read at its ends."""


def text(found: Comparison) -> str:
    """Return the tables of a comparison."""
    rows, random = [(row.rival.doc, row) for row in found.strategies], found.random
    lines = [
        f"{found.task}: {found.runs} recorded runs, {found.repeats} orders, {counted(found.workers, 'worker')}. A full "
        f"trial costs {found.full_trial_seconds:.1f} CPU-seconds in the median; times are in such trials. Median "
        "[quartiles].",
        "",
        "What a study finds: best value within the KL budget at the end of a study of so many full trials",
        _line("", *(f"{budget} trials" for budget in BUDGETS)),
        *(_line(doc, *(_spread(row.value_at_budget[budget], 3) for budget in BUDGETS)) for doc, row in rows),
        "",
        f"Time to what {RANDOM_TRIALS} random trials reach: {random.ends:.3f} at their ends, {random.best:.3f} at any "
        "checkpoint within the KL budget",
        _line("", f"to {random.ends:.3f}", f"to {random.best:.3f}"),
        *(_line(doc, _spread(row.to_random_at_ends, 1), _spread(row.to_random_at_best, 1)) for doc, row in rows),
        f"Those {RANDOM_TRIALS} trials, read at their ends, cost {random.cost / found.full_trial_seconds:.1f}.",
        "",
        f"Best {rows[0][1].never_finished.configurations} configurations that are never finished, if all are searched, "
        "and the highest share that so few allow (95%)",
        _line("", "at screening", "by the guard"),
        *(_line(doc, *_lost(row.never_finished)) for doc, row in rows),
        "",
        _ratio("ratio_strategy", found.ratio_strategy, TARGET_STRATEGY),
        _ratio("ratio_total", found.ratio_total, TARGET_TOTAL),
        "In brackets: 90% over pools of resampled runs.",
    ]
    if found.runs < RANDOM_TRIALS * 3:
        lines.append(f"Only {found.runs} runs are recorded: the orders hardly differ, and the figures mean little.")
    lines += [
        f"{row.evaluations_missing} evaluations were asked for and not recorded: {doc}"
        for doc, row in rows
        if row.evaluations_missing
    ]
    return "\n".join(line.rstrip() for line in lines)


def _line(name: str, *cells: str) -> str:
    return f"{name:31}" + "".join(f"  {cell:>22}" for cell in cells)


def _spread(spread: Spread, digits: int) -> str:
    middle, low, high = (_finite(value, digits) for value in (spread.median, spread.low, spread.high))
    never = f" ({spread.never} never)" if spread.never else ""
    return f"{middle} [{low}, {high}]{never}"


def _finite(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def _lost(lost: Lost) -> list[str]:
    return [f"{lost.rung:.0%}, at most {lost.rung_at_most:.0%}", f"{lost.guard:.0%}, at most {lost.guard_at_most:.0%}"]


def _ratio(name: str, found: Ratio, target: float) -> str:
    ratio = f"{found.ratio:.2f}" if math.isfinite(found.ratio) else "not reached in half of the orders"
    return f"{name} {ratio} [{_finite(found.low, 2)}, {_finite(found.high, 2)}] (target: at most {target:.2f})"

"""What the replay found, as tables for people and as one line of JSON."""

import math
from typing import Any

from .comparing import BUDGETS, RANDOM_TRIALS, Comparison, Interval, Lost, Row, Spread

TARGET_STRATEGY = 1 / 3
"""Of random search's device-seconds, both at the best checkpoint."""
TARGET_TOTAL = 1 / 5
"""Of the device-seconds of a random search that is read at its ends."""


def text(found: Comparison) -> str:
    """Return the tables of a comparison."""
    width = max(len(row.rival.doc) for row in found.rows)
    workers = "1 worker" if found.workers == 1 else f"{found.workers} workers"
    lines = [
        f"{found.task}: {found.runs} recorded runs, {found.repeats} orders, {workers}. A full trial costs "
        f"{found.full_trial:.1f} CPU-seconds in the median; times are in such trials. Median [quartiles].",
        "",
        "What a study finds: best value within the KL budget at the end of a study of so many full trials",
        _line(width, "", [f"{budget} trials" for budget in BUDGETS]),
        *(_line(width, row.rival.doc, [_value(row.at[budget]) for budget in BUDGETS]) for row in found.rows),
        "",
        f"Time to what {RANDOM_TRIALS} random trials reach: {found.targets.ends:.3f} at their ends, "
        f"{found.targets.best:.3f} at any checkpoint within the KL budget",
        _line(width, "", [f"to {found.targets.ends:.3f}", f"to {found.targets.best:.3f}"]),
        *(_line(width, row.rival.doc, [_time(row.to_ends), _time(row.to_best)]) for row in found.rows),
        f"Those {RANDOM_TRIALS} trials, read at their ends, cost {found.targets.cost / found.full_trial:.1f}.",
        "",
        f"Best {found.rows[0].lost.configurations} configurations that are never finished, if all are searched, and "
        "the highest share that so few allow (95%)",
        _line(width, "", ["at the rung", "by the guard"]),
        *(_line(width, row.rival.doc, _lost(row.lost)) for row in found.rows),
        "",
        _ratio("ratio_strategy", found.ratio_strategy(), found.strategy_interval, TARGET_STRATEGY),
        _ratio("ratio_total", found.ratio_total(), found.total_interval, TARGET_TOTAL),
        "In brackets: 90% over pools of resampled runs.",
        *(
            f"{row.rival.doc}: {_text(found.ratio_strategy(row.rival))} and {_text(found.ratio_total(row.rival))}"
            for row in found.rows
            if row.rival.prior is not None
        ),
        *_warnings(found),
    ]
    return "\n".join(line.rstrip() for line in lines)


def as_json(found: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values; None stands for what was never reached in half of the orders."""
    return {
        "task": found.task,
        "runs": found.runs,
        "repeats": found.repeats,
        "workers": found.workers,
        "full_trial_seconds": found.full_trial,
        "random_at_ends": _plain(found.targets.ends),
        "random_at_best": _plain(found.targets.best),
        "random_cost": found.targets.cost / found.full_trial,
        "strategies": {
            row.rival.name: _row(row)
            | {"ratio_strategy": found.ratio_strategy(row.rival), "ratio_total": found.ratio_total(row.rival)}
            for row in found.rows
        },
        "ratio_strategy": found.ratio_strategy(),
        "ratio_strategy_interval": [_plain(end) for end in found.strategy_interval],
        "ratio_total": found.ratio_total(),
        "ratio_total_interval": [_plain(end) for end in found.total_interval],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "to_random_at_ends": _spread(row.to_ends),
        "to_random_at_best": _spread(row.to_best),
        "value_at_budget": {str(budget): _spread(spread) for budget, spread in row.at.items()},
        "spent_at_budget": {str(budget): spent for budget, spent in row.spent.items()},
        "never_finished": {
            "configurations": row.lost.configurations,
            "rung": row.lost.rung,
            "rung_at_most": row.lost.rung_bound,
            "guard": row.lost.guard,
            "guard_at_most": row.lost.guard_bound,
        },
        "evaluations_missing": row.missing,
    }


def _spread(spread: Spread) -> dict[str, Any]:
    numbers = {"median": spread.median, "low": spread.low, "high": spread.high}
    return {name: _plain(value) for name, value in numbers.items()} | {"never": spread.never}


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _line(width: int, name: str, cells: list[str]) -> str:
    return f"{name:{width}}" + "".join(f"  {cell:>22}" for cell in cells)


def _value(spread: Spread) -> str:
    return f"{_finite(spread.median, 3)} [{_finite(spread.low, 3)}, {_finite(spread.high, 3)}]"


def _time(spread: Spread) -> str:
    never = f" ({spread.never} never)" if spread.never else ""
    return f"{_finite(spread.median, 1)} [{_finite(spread.low, 1)}, {_finite(spread.high, 1)}]{never}"


def _finite(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def _lost(lost: Lost) -> list[str]:
    return [f"{lost.rung:.0%}, at most {lost.rung_bound:.0%}", f"{lost.guard:.0%}, at most {lost.guard_bound:.0%}"]


def _ratio(name: str, ratio: float | None, interval: Interval, target: float) -> str:
    between = f"[{_finite(interval[0], 2)}, {_finite(interval[1], 2)}]"
    return f"{name} {_text(ratio)} {between} (target: at most {target:.2f})"


def _text(ratio: float | None) -> str:
    return "not reached in half of the orders" if ratio is None else f"{ratio:.2f}"


def _warnings(found: Comparison) -> list[str]:
    """Return what makes the figures less sure than they look."""
    lines = []
    if found.runs < RANDOM_TRIALS * 3:
        lines.append(f"Only {found.runs} runs are recorded: the orders hardly differ, and the figures mean little.")
    missing = {row.rival.doc: row.missing for row in found.rows if row.missing}
    lines += [f"{count} evaluations were asked for and not recorded: {doc}" for doc, count in missing.items()]
    return lines

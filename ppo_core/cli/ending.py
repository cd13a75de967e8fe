"""A run's ending: its last evaluation compared with its start, its KL budget and its best checkpoint. No torch."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ppo_core.config.kl_budget import Point, Rank, bound, front, is_within, rank, thinned
from ppo_core.output import KL_UNIT, measured, nats, plain_table, plus_minus, short
from ppo_core.report import SplitReading


@dataclass(frozen=True)
class EvalReading:
    """Readings of one evaluation; a number that was not finite is NaN."""

    step: int
    episode: int
    reward: float
    reward_se: float
    kl: float
    """In nats per response."""
    kl_se: float = 0.0

    @classmethod
    def of(cls, step: Mapping[str, Any]) -> "EvalReading":
        """Return the evaluation in a line of `steps.jsonl`."""
        unknown = {"reward": math.nan, "reward_se": 0.0, "kl": math.nan, "kl_se": 0.0}
        read = {name: _number(step, f"eval/{name}", default) for name, default in unknown.items()}
        return cls(step["step"], step["episode"], **read)

    def is_within(self, kl_budget: float) -> bool:
        """Return True if it is within the budget; see `ppo_core.config.kl_budget`."""
        return is_within(self.kl, self.kl_se, kl_budget)

    @property
    def kl_text(self) -> str:
        """Its KL in words, with the standard error if known."""
        return f"{plus_minus(self.kl, self.kl_se)} {KL_UNIT}"

    @property
    def text(self) -> str:
        """`reward 1.971 ± 0.031, KL 5.56 ± 0.12 nats/response`."""
        return f"reward {plus_minus(self.reward, self.reward_se)}, KL {self.kl_text}"


def _number(step: Mapping[str, Any], name: str, default: float) -> float:
    value = step.get(name)
    return default if value is None or math.isnan(value) else float(value)


@dataclass(frozen=True)
class Ending:
    """The report on a run that has ended, also the value of `ending` in `run.json`."""

    kl_budget: float
    note: str | None = None
    """One line on a problem of the trained policy, or None."""
    best: EvalReading | None = None
    """Evaluation of the best checkpoint, whose model is also saved; None: the end is the best, or none is in budget."""
    kl_course: str | None = None
    """One line on when KL left the budget or came back; None: it never left."""
    test: SplitReading | None = None
    """The result on the test prompts of the best checkpoint, else of the end; None: not evaluated."""


FRONT_SHOWN = 5
"""Most checkpoints of a run's front that are shown."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run within its KL budget, and its front up to there."""

    reading: EvalReading
    """That of the model to use: the best checkpoint's, else the end's."""
    start: EvalReading
    """The SFT policy's."""
    front: tuple[EvalReading, ...]
    """The evaluations that were best for some budget up to the run's, by rising KL."""
    kl_budget: float

    @property
    def text(self) -> str:
        """One line for people."""
        return (
            f"reached: {self.reading.text} of {short(self.kl_budget)}, at episode {self.reading.episode}; the SFT "
            f"policy: reward {_reward(self.start)}"
        )

    @property
    def front_table(self) -> Table:
        """Table of the rewards that smaller KL budgets would have given."""
        title = "What a KL budget would have given, by this run's evaluations"
        columns = ("KL budget from", "eval reward", "eval KL", "episode")
        table = plain_table(title, columns, justify="right")
        for each in self.front:
            lowest = measured(bound(each.kl, each.kl_se))
            table.add_row(lowest, _reward(each), plus_minus(each.kl, each.kl_se), str(each.episode))
        return table


def outcome(steps: Sequence[Mapping[str, Any]], ending: Ending) -> Outcome | None:
    """Return what a run of these lines reached; None: nothing was evaluated."""
    readings = {each["step"]: EvalReading.of(each) for each in steps if "eval/reward" in each}
    if not readings:
        return None
    points = [Point(each.reward, bound(each.kl, each.kl_se), 0, step) for step, each in readings.items()]
    within = thinned([point for point in front(points) if point.bound <= ending.kl_budget], FRONT_SHOWN)
    first, last = min(readings), max(readings)
    return Outcome(
        reading=ending.best or readings[last],
        start=readings[first],
        front=tuple(readings[point.step] for point in within),
        kl_budget=ending.kl_budget,
    )


def judge(steps: Sequence[Mapping[str, Any]], kl_budget: float, checkpoint_step: int | None) -> Ending:
    """Return how a run of these lines ended, whose best kept checkpoint within the budget is of `checkpoint_step`."""
    readings = [EvalReading.of(step) for step in steps if "eval/reward" in step]
    if not readings:
        return Ending(kl_budget)
    kl_course = _kl_course(readings, kl_budget)
    start, end = readings[0], readings[-1]
    best = next((reading for reading in readings if reading.step == checkpoint_step), None)
    within = end.is_within(kl_budget) and math.isfinite(end.reward)
    wrong = [*_budget_problem(end, kl_budget), *_fall(start, end)]
    if best is not None and within and _rank(end) <= _rank(best):
        best = None
    is_worse = best is not None and best.reward > end.reward + _error(best, end)
    note = _note(wrong, start, end, best, within) if wrong or is_worse else None
    return Ending(kl_budget, note, best, kl_course)


def _kl_course(readings: Sequence[EvalReading], kl_budget: float) -> str | None:
    known = [each for each in readings if math.isfinite(each.kl)]
    over = [not each.is_within(kl_budget) for each in known]
    if not any(over):
        return None
    budget = f"the budget of {nats(kl_budget)}"
    last_run = len(list(itertools.takewhile(bool, reversed(over))))
    if last_run:
        left = known[-last_run]
        return f"KL left {budget} for good at step {left.step} (episode {left.episode})"
    left, back = known[over.index(True)], known[len(over) - over[::-1].index(True)]
    return (
        f"KL was over {budget} at step {left.step} (episode {left.episode}), and stayed within it from step "
        f"{back.step} (episode {back.episode})"
    )


def _budget_problem(end: EvalReading, kl_budget: float) -> list[str]:
    if not (math.isfinite(end.kl) and math.isfinite(end.reward)):
        return ["its last evaluation is not finite"]
    if end.is_within(kl_budget):
        return []
    error = " with its standard error" if end.kl <= kl_budget else ""
    return [f"its KL of {end.kl_text} is{error} over the budget of {short(kl_budget)}"]


def _fall(start: EvalReading, end: EvalReading) -> list[str]:
    fell = end.reward < start.reward - 2 * _error(start, end)
    return [f"its reward of {_reward(end)} is below the start's {_reward(start)}"] if fell else []


def _note(wrong: Sequence[str], start: EvalReading, end: EvalReading, best: EvalReading | None, within: bool) -> str:
    problem = " and ".join(wrong) or f"its reward of {_reward(end)} is below that of an earlier checkpoint"
    if best is None:
        lack = "no better checkpoint was kept" if within else "no checkpoint was within the budget"
        return f"be careful with the trained policy: {problem}; {lack}"
    lower = f", which is also below the start's {_reward(start)}" if _fall(start, best) else ""
    better = f"the best within the budget is that of episode {best.episode}: {best.text}{lower}"
    return f"the trained policy is not the best of this run: {problem}; {better}"


def _rank(reading: EvalReading) -> Rank:
    return rank(reading.reward, reading.kl, reading.step)


def _error(one: EvalReading, other: EvalReading) -> float:
    """Return an upper bound of the difference's standard error; both were measured on the same prompts."""
    return math.hypot(one.reward_se, other.reward_se)


def _reward(reading: EvalReading) -> str:
    return plus_minus(reading.reward, reading.reward_se)

"""How a run's end compares with its start, its KL budget and its best checkpoint, in one line. Never imports torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ppo_core.command.output import KL_UNIT, measured, plus_minus, short


@dataclass(frozen=True)
class Reading:
    """What one evaluation read; a number that was not finite is NaN."""

    step: int
    episode: int
    reward: float
    reward_se: float
    kl: float
    """In nats per response."""

    @classmethod
    def of(cls, step: Mapping[str, Any]) -> "Reading":
        """Return the evaluation in a line of `steps.jsonl`."""
        numbers = (step.get(name) for name in ("eval/reward", "eval/reward_se", "eval/kl"))
        reward, se, kl = (math.nan if number is None else float(number) for number in numbers)
        return cls(step["step"], step["episode"], reward, 0.0 if math.isnan(se) else se, kl)

    @property
    def text(self) -> str:
        """The readings in words."""
        return f"reward {plus_minus(self.reward, self.reward_se)}, KL {measured(self.kl)} {KL_UNIT}"


@dataclass(frozen=True)
class Ending:
    """What is said of a run that has ended."""

    kl_budget: float
    note: str | None = None
    """One line on what is wrong with the trained policy; None: nothing is."""
    best: Reading | None = None
    """The evaluation of the kept checkpoint that is better than the end; its model is saved, too."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def judge(steps: Sequence[Mapping[str, Any]], kl_budget: float, checkpoint_step: int | None) -> Ending:
    """Return how a run ended.

    Args:
        steps: Its lines of metrics.
        kl_budget: In nats per response.
        checkpoint_step: The step of the best kept checkpoint within the budget; None: there is none.
    """
    readings = [Reading.of(step) for step in steps if "eval/reward" in step]
    if not readings:
        return Ending(kl_budget)
    start, end = readings[0], readings[-1]
    best = next((reading for reading in readings if reading.step == checkpoint_step), None)
    within = end.kl <= kl_budget and math.isfinite(end.reward)
    wrong = [*_budget_problem(end, kl_budget), *_fall(start, end)]
    margin = 0.0 if wrong else _error(best or end, end)
    if best is not None and within and best.reward <= end.reward + margin:
        best = None
    if best is None and not wrong:
        return Ending(kl_budget)
    return Ending(kl_budget, _note(wrong, start, end, best, within), best)


def _budget_problem(end: Reading, kl_budget: float) -> list[str]:
    if not (math.isfinite(end.kl) and math.isfinite(end.reward)):
        return ["its last evaluation is not finite"]
    return [f"its KL of {_unit(end.kl)} is over the budget of {short(kl_budget)}"] if end.kl > kl_budget else []


def _fall(start: Reading, end: Reading) -> list[str]:
    fell = end.reward < start.reward - 2 * _error(start, end)
    return [f"its reward of {_reward(end)} is below the start's {_reward(start)}"] if fell else []


def _note(wrong: Sequence[str], start: Reading, end: Reading, best: Reading | None, within: bool) -> str:
    what = " and ".join(wrong) or f"its reward of {_reward(end)} was higher before"
    if best is None:
        lack = "no better checkpoint was kept" if within else "no checkpoint was within the budget"
        return f"take care with the trained policy: {what}; {lack}"
    lower = f", which is below the start's {_reward(start)}, too" if _fall(start, best) else ""
    found = f"the best within the budget is that of episode {best.episode}: {best.text}{lower}"
    return f"the trained policy is not the best of this run: {what}; {found}"


def _error(one: Reading, other: Reading) -> float:
    """Return the standard error of the difference: an upper bound, since both were measured on the same prompts."""
    return math.hypot(one.reward_se, other.reward_se)


def _reward(reading: Reading) -> str:
    return plus_minus(reading.reward, reading.reward_se)


def _unit(kl: float) -> str:
    return f"{measured(kl)} {KL_UNIT}"

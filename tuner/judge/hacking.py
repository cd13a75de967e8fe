"""Reward hacking: does a trial's reward rise while something that nobody rewards gets worse? Pure functions.

`RULE` is the criterion. It reads the held-out metrics (`eval/*`), or where those were not measured, the rollouts: the
first number, and the mean of the last two evaluations or five rollouts. A rise with nothing worse is `clean`, with
something worse `suspect`: a reason to read samples, not a proof. Runs on fresh seeds decide where there are any: it is
`repeated` if at least half of them are suspect, and `borderline` if fewer are, or only its run in the search was.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ppo_core.output import KL_UNIT, measured
from tuner.study.rules import SIGNS

Step = Mapping[str, Any]
"""A trial's step: `step` and metrics by name; what was not measured is None, NaN or not there."""

Verdict = Literal["suspect", "repeated", "borderline", "clean", "no rise", "too early"]

LENGTH = ("eval/length", "response/length_mean")
REPETITION = ("eval/repetition", "response/repetition")
ENTROPY = ("eval/entropy", "policy/entropy_avg")
NEEDED = ("eval/reward", "eval/reward_se", "eval/kl", *LENGTH, *REPETITION, *ENTROPY)
"""The metrics that the rule reads."""

LAST = (2, 5)
"""Evaluations or, where there are fewer than two, iterations, whose mean is the last reading, against odd batches."""
ERRORS = 2.0
"""Standard errors that a rise must exceed."""
RULE = (
    f"Reward rises if its last two evaluations are above its start by more than {ERRORS:g} standard errors. It is "
    f"suspect if at the same time the eval KL ends over the budget, responses grow to over {SIGNS['longer'].limit:g} "
    f"times or shrink to under {SIGNS['shorter'].limit:g} times their first length, repetition rises by over "
    f"{SIGNS['repeats'].limit:g}, or entropy falls to under {SIGNS['narrows'].limit:g} of its first reading."
)


@dataclass(frozen=True)
class Symptom:
    name: str
    is_worse: bool | None
    """None: it was not measured."""
    numbers: str = ""
    text: str = ""
    """The numbers in a clause."""
    way: float = 0.0
    """Share of the way from the start to the limit that it went; over 1: it is worse, where reward rises."""


@dataclass(frozen=True)
class Finding:
    trial: int
    verdict: Verdict
    rise: float
    """Gain of eval reward; NaN where it is too early."""
    rise_se: float
    readings: tuple[Symptom, ...]
    """KL, length, repetition and entropy; empty where it is too early."""

    @property
    def worse(self) -> tuple[str, ...]:
        return tuple(symptom.text for symptom in self.readings if symptom.is_worse)


def check(number: int, steps: Sequence[Step], kl_budget: float) -> Finding:
    """Return a trial's finding, from its steps (with the metrics `NEEDED`) in order of step."""
    evaluated = [row for row in steps if is_measured(row, "eval/reward")]
    before, after = evaluated[:1], evaluated[1:]
    if not before or before[0]["step"] != 0 or not after:
        return Finding(number, "too early", math.nan, math.nan, ())
    last = after[-2:]
    rise = statistics.fmean(row["eval/reward"] for row in last) - before[0]["eval/reward"]
    errors = values(last, "eval/reward_se")
    se = math.hypot(statistics.fmean(errors) if errors else 0.0, *values(before, "eval/reward_se"))
    readings = tuple(_symptoms(steps, kl_budget))
    verdict: Verdict = "no rise"
    if rise > ERRORS * se:
        verdict = "suspect" if any(symptom.is_worse for symptom in readings) else "clean"
    return Finding(number, verdict, rise, se, readings)


def on_fresh_seeds(finding: Finding, fresh: Sequence[Finding]) -> Finding:
    """Return a trial's finding given those of its runs on fresh seeds; its readings are then of a suspect one."""
    suspect = [one for one in fresh if one.verdict == "suspect"]
    if fresh and 2 * len(suspect) >= len(fresh):
        return replace(suspect[0], trial=finding.trial, verdict="repeated")
    is_any = bool(fresh) and (bool(suspect) or finding.verdict == "suspect")
    return replace(finding, verdict="borderline") if is_any else finding


def is_measured(row: Step, metric: str) -> bool:
    value = row.get(metric)
    return isinstance(value, int | float) and not math.isnan(value)


def values(steps: Iterable[Step], metric: str) -> list[float]:
    return [float(row[metric]) for row in steps if is_measured(row, metric)]


def eval_kls(steps: Iterable[Step]) -> list[float]:
    """Return the eval KLs of the trained policy, in order of step: that before training is left out."""
    return values((row for row in steps if row["step"] > 0), "eval/kl")


def length_ratio(steps: Sequence[Step]) -> float | None:
    """Return the length of the last responses over that of the first, as the rule reads it; None: not measured."""
    ends = _first_and_last(steps, LENGTH)
    return None if ends is None or ends[0] <= 0 else ends[1] / ends[0]


def _symptoms(steps: Sequence[Step], kl_budget: float) -> Iterator[Symptom]:
    if kls := eval_kls(steps):
        is_over = SIGNS["kl_end"].is_broken(kls[-1], kl_budget)
        side = "over" if is_over else "within"
        text = f"KL ends at {measured(kls[-1])} {KL_UNIT}, {side} the budget of {kl_budget:g}"
        yield Symptom("KL", is_over, measured(kls[-1]), text, kls[-1] / kl_budget)
    else:
        yield Symptom("KL", None)
    for name, metrics in {"length": LENGTH, "repetition": REPETITION, "entropy": ENTROPY}.items():
        ends = _first_and_last(steps, metrics)
        if ends is None or (ends[0] <= 0 and name != "repetition"):
            yield Symptom(name, None)
            continue
        first, last = ends
        verb = "goes"
        match name:
            case "length":
                grows = SIGNS["longer"].is_broken(last / first)
                shrinks = SIGNS["shorter"].is_broken(last / first)
                is_worse, way = grows or shrinks, max(_way("longer", last / first), _way("shorter", last / first))
                verb = "grows" if grows else "shrinks" if shrinks else verb
                digits, unit = ".0f", " tokens"
            case "repetition":
                is_worse, way = SIGNS["repeats"].is_broken(last - first), _way("repeats", last - first, 0.0)
                digits, unit = ".0%", ""
            case _:
                is_worse, way = SIGNS["narrows"].is_broken(last, first), _way("narrows", last / first)
                digits, unit = ".2f", " nats/token"
        numbers = [f"{end:{digits}}" for end in ends]
        yield Symptom(name, is_worse, " → ".join(numbers), f"{name} {verb} from {' to '.join(numbers)}{unit}", way)


def _way(sign: str, value: float, start: float = 1.0) -> float:
    """Return the share of the way from `start` to a sign's limit at which a reading is; 0: on the other side."""
    return max(0.0, (value - start) / (SIGNS[sign].limit - start))


def _first_and_last(steps: Sequence[Step], names: tuple[str, str]) -> tuple[float, float] | None:
    """Return a reading's first number and the mean of its last ones: held-out where there are two, else rollouts'."""
    for name, most in zip(names, LAST, strict=True):
        numbers = values(steps, name)
        if len(numbers) > 1:
            return numbers[0], statistics.fmean(numbers[1:][-most:])
    return None

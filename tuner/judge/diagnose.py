"""Diagnosis: find a trial's problems in its curves, and the one change to try next. Pure functions, no torch.

`tuner.judge.rules.SIGNS` has the limits and the changes. Each advice is a single change: with several, nobody knows
which one helped. KL first: "adjust β or the adaptive KL target first if the policy diverges too quickly".
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ppo_core.config.declare import Choices, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig, inert
from ppo_core.output import KL_UNIT, short
from tuner.judge import hacking
from tuner.judge.hacking import Step, values
from tuner.judge.rules import EARLY, HEALTH, KL, RULES, SIGNS, Blame, Rule
from tuner.store import Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Reason, Role, Status

HEALTH_METRICS = tuple(dict.fromkeys(str(SIGNS[name].metric) for name in HEALTH))
NEEDED = (*hacking.NEEDED, KL, "objective/kl_coef", *HEALTH_METRICS)
"""Metrics that the rules read."""

LATEST = 10
"""Latest steps of which a reading is the median, against one odd batch."""
GOAL, SLOPE = 0.78, 0.8
"""Target for the final KL as a share of the budget; slope of log KL in log β, negated."""
LEAST_EVALUATIONS = 4
"""Fewest evaluations for a statement on the course of reward."""


@dataclass(frozen=True)
class Measurement:
    """Reading of one sign of health."""

    sign: Rule
    value: float | None
    """None: not measured, or too few steps."""
    is_out: bool
    """True if out of its range, or if the guard ended the trial for its metric."""


@dataclass(frozen=True)
class Diagnosis:
    """A rule's finding, and the change that it advises."""

    rule: str
    finding: str
    """The evidence in a sentence, with numbers."""
    name: str
    """The hyperparameter to change."""
    was: HyperValue
    value: HyperValue

    @property
    def advice(self) -> str:
        """The change in words."""
        return f"{self.name} = {short(self.value)} (was {short(self.was)})"


class Course:
    """A trial's curves for the rules to read."""

    def __init__(
        self, steps: Sequence[Step], config: Mapping[str, HyperValue], spec: StudySpec, reason: Reason | None = None
    ) -> None:
        """Take a trial's steps (with the metrics `NEEDED`, by step), its configuration, and why it ended early."""
        self.steps, self.config, self.spec, self.reason = steps, config, spec, reason
        self.total = PPOConfig.from_dict(config).total_episodes

    @cached_property
    def share(self) -> float:
        """Share of its episodes that it ran."""
        return self.steps[-1]["episode"] / self.total if self.steps else 0.0

    @cached_property
    def end_kl(self) -> float:
        """Eval KL of the last evaluation after step 0, else the last rollout KL, else NaN."""
        found = hacking.eval_kls(self.steps) or values(self.steps, KL)
        return found[-1] if found else math.nan

    @cached_property
    def blame(self) -> Blame | None:
        """Kind of problem for which the guard ended it, or None."""
        return RULES[self.reason.rule].blame if self.reason is not None and self.reason.rule in RULES else None

    @cached_property
    def over_limit_at(self) -> float | None:
        """Share of its episodes at which the rollout KL first exceeded the guard's limit, or None."""
        measured, limit = (row for row in self.steps if hacking.is_measured(row, KL)), self.spec.kl_limit
        first = next((row for row in measured if SIGNS["kl_early"].is_broken(row[KL], limit)), None)
        return None if first is None else first["episode"] / self.total

    @cached_property
    def readings(self) -> list[Measurement]:
        """Readings of all signs of health, in declared order."""
        return [self._reading(SIGNS[name]) for name in HEALTH]

    def _reading(self, sign: Rule) -> Measurement:
        found = values((row for row in self.steps if row["step"] > 0), str(sign.metric))
        is_ended = self.blame is not None and self.reason is not None and self.reason.metric == sign.metric
        first = statistics.median(found[:LATEST]) if sign.relative_to and found else 1.0
        if len(found) < sign.steps or first <= 0:
            return Measurement(sign, None, is_ended)
        value = statistics.median(found[-LATEST:]) / first
        return Measurement(sign, value, is_ended or sign.is_broken(value))

    @cached_property
    def evaluations(self) -> list[Step]:
        """Evaluated steps."""
        return [row for row in self.steps if hacking.is_measured(row, "eval/reward")]

    def change(self, rule: Rule, finding: str, factor: float = 1.0) -> Diagnosis | None:
        """Return the first of a rule's moves that changes something.

        Args:
            rule: From the table.
            finding: The numbers, in a sentence.
            factor: On the price of KL, where the rule leaves it open; its square root on the learning rate.
        """
        # Fewer epochs come last where there are one or two.
        few = int(self.config.get("num_ppo_epochs") or 1) <= 2
        for name, declared in sorted(rule.moves, key=lambda move: few and move[0] == "num_ppo_epochs"):
            open_factor = math.sqrt(factor) if name == "learning_rate" else factor
            times = {math.inf: open_factor, 0.0: 1 / open_factor}.get(declared, declared)
            if name == "kl_coef" and self.config.get("kl_target") is not None:
                if times < 1 and self.config.get("kl_controller") == "landing":
                    continue  # β was lowered as far as it helped
                name, times = "kl_target", 1 / times
            was = self.config.get(name)
            if not isinstance(was, int | float) or isinstance(was, bool) or inert(name, self.config):
                continue
            value = self._moved(name, float(was), times)
            if not math.isclose(value, float(was), rel_tol=0.05):
                return Diagnosis(rule.label, finding, name, was, value)
        return None

    def _moved(self, name: str, was: float, factor: float) -> int | float:
        """Return a value times a factor, in the study's range, rounded for whole numbers."""
        value, span = was * factor, self.spec.search.get(name)
        if isinstance(span, Choices):
            numbers = [one for one in span.values if isinstance(one, int | float)]
            return min(numbers, key=lambda one: abs(one - value), default=was)
        if span is not None:
            value = min(max(value, span.low), span.high)
        if HYPERPARAMETERS[name].kind is int:
            return max(1, round(value))
        return float(f"{value:.3g}")


Check = Callable[[Course], Diagnosis | None]


def kl_too_high(course: Course) -> Diagnosis | None:
    """KL that ends over the budget, or for which the guard ended the trial."""
    kl, budget, blamed = course.end_kl, course.spec.kl_budget, course.blame == "kl"
    if not blamed and not SIGNS["kl_end"].is_broken(kl, budget):
        return None
    at = course.over_limit_at
    if at is not None and at <= EARLY:
        text = (
            f"KL was over the limit of {course.spec.kl_limit:g} {KL_UNIT} after {at:.0%} of the episodes, before β "
            "could answer."
        )
        return course.change(SIGNS["kl_early"], text)
    reading = max(kl, course.reason.value or kl) if blamed and course.reason else kl
    text = f"KL ended at {reading:.1f} {KL_UNIT}, over the budget of {budget:g}."
    return course.change(SIGNS["kl_end"], text, _to_the_goal(reading, budget))


def kl_stuck(course: Course) -> Diagnosis | None:
    """KL that stays near 0 for half of the episodes or more, or for which the guard ended the trial."""
    sign, kls = SIGNS["kl_stuck"], [*values(course.evaluations, "eval/kl"), *values(course.steps, KL)]
    highest = max(kls, default=math.nan)
    is_stuck = course.share >= 0.5 and sign.is_broken(highest, course.spec.kl_budget)
    if course.blame != "idle" and not is_stuck:
        return None
    text = f"KL never came over {highest:.2f} {KL_UNIT} in {course.share:.0%} of the episodes: the policy hardly moved."
    usual = course.spec.config({}).kl_coef
    # β comes last where it adapts: it has come down by itself, and another target gains nothing.
    if course.config.get("kl_target") is None and float(course.config.get("kl_coef") or 0.0) > usual:
        sign = replace(sign, moves=sign.moves[::-1])
    return course.change(sign, text)


def out_of_range(label: str) -> Check:
    """Return the check of the signs of health with this label."""

    def check(course: Course) -> Diagnosis | None:
        out = [one for one in course.readings if one.is_out and one.sign.label == label]
        texts = [one.sign.reads(one.value) for one in out if one.value is not None]
        if course.reason is not None and course.reason.metric in [one.sign.metric for one in out]:
            texts.append(course.reason.message)
        return course.change(out[0].sign, f"{'; '.join(texts)}.") if out else None

    return check


def broke(course: Course) -> Diagnosis | None:
    """A run that the guard ended as broken, for a metric outside the signs of health."""
    if course.reason is None or course.blame != "broken" or course.reason.metric in HEALTH_METRICS:
        return None
    return course.change(RULES[course.reason.rule], f"{course.reason.message}.")


def reward_hacked(course: Course) -> Diagnosis | None:
    """Reward that rises while texts repeat, shrink, grow or narrow (see `tuner.judge.hacking`)."""
    found = hacking.check(0, course.steps, math.inf)
    if found.verdict != "suspect":
        return None
    return course.change(SIGNS["repeats"], f"Reward rises ({found.rise:+.2f}) while {', '.join(found.worse)}.")


def stable_but_slow(course: Course) -> Diagnosis | None:
    """Reward that still rises at the end, with most of the KL budget unspent."""
    evaluated, kl, budget = course.evaluations, course.end_kl, course.spec.kl_budget
    is_unspent = SIGNS["kl_unspent"].is_broken(kl, budget) and not SIGNS["kl_stuck"].is_broken(kl, budget)
    if course.share < 0.9 or len(evaluated) < LEAST_EVALUATIONS or not is_unspent:
        return None
    earlier, last = evaluated[-1 - len(evaluated) // 3], evaluated[-1]
    rise = last["eval/reward"] - earlier["eval/reward"]
    errors = values((earlier, last), "eval/reward_se")
    if not rise > hacking.ERRORS * math.hypot(*errors):
        return None
    text = (
        f"Reward still rises at the end ({rise:+.2f} in the last third), and KL ended at {kl:.1f} {KL_UNIT} of a "
        f"budget of {budget:g}."
    )
    return course.change(SIGNS["kl_unspent"], text, _to_the_goal(kl, budget))


def _to_the_goal(kl: float, budget: float) -> float:
    """Return the factor for β that brings a KL just within the budget: log KL falls by SLOPE in log β."""
    return min(max(math.exp(abs(math.log(kl / (GOAL * budget))) / SLOPE), 1.5), 8.0)


RULES_OF_DIAGNOSIS: tuple[Check, ...] = (
    kl_too_high,
    kl_stuck,
    *(out_of_range(label) for label in dict.fromkeys(SIGNS[name].label for name in HEALTH)),
    broke,
    reward_hacked,
    stable_but_slow,
)
"""In the order in which to try their advice."""


def diagnose(course: Course) -> list[Diagnosis]:
    """Return the findings in a trial's curves, the change to try first in front.

    If several change one hyperparameter, the first one's value is used for all.
    """
    found: list[Diagnosis] = []
    for rule in RULES_OF_DIAGNOSIS:
        one = rule(course)
        if one is not None:
            known = next((other for other in found if other.name == one.name), one)
            found.append(replace(one, value=known.value))
    return found


def with_repeats(found: Sequence[Diagnosis]) -> list[tuple[Diagnosis, bool]]:
    """Return each diagnosis with True if an earlier one advises the same change."""
    changes = [one.advice for one in found]
    return [(one, one.advice in changes[:place]) for place, one in enumerate(found)]


def is_choice(found: Sequence[Diagnosis]) -> bool:
    """Return True if more than one change is advised."""
    return len({one.advice for one in found}) > 1


NEAR = 1.3
"""Values within this factor of the advised one count as the advised one."""


def tried(trials: Sequence[TrialRow], trial: TrialRow, found: Diagnosis, spec: StudySpec) -> TrialRow | None:
    """Return a trial of the study that has the change already, or a greater one, or None."""
    names = {*spec.search, "kl_target"} - {found.name}
    there = []
    for row in trials:
        value = row.config.get(found.name)
        is_alike = row.role is Role.SEARCH and all(row.config.get(n) == trial.config.get(n) for n in names)
        if is_alike and isinstance(value, int | float) and _is_as_far(float(value), found):
            there.append((abs(math.log(value / float(found.value or 1))), row))
    return min(there, key=lambda pair: (pair[0], pair[1].number))[1] if there else None


def _is_as_far(value: float, found: Diagnosis) -> bool:
    """Return True if a value goes about as far as the advised one, in its direction, or further."""
    if not isinstance(found.value, int | float) or min(value, found.value) <= 0:
        return False
    return value * NEAR > found.value if _is_up(found) else value < found.value * NEAR


def why_nothing(trial: TrialRow) -> str:
    """Return the line for a trial in which no rule finds anything to change."""
    if trial.status is Status.FAILED:
        return "The trial failed; its log says why."
    if trial.reason is not None and trial.reason.rule in RULES:
        return f"The guard ended it: {trial.reason.message}. No change of a hyperparameter is known to help."
    return "No rule finds anything to change."


def enqueued(trial: TrialRow, found: Diagnosis) -> dict[str, HyperValue]:
    """Return the values of a trial that tries the change."""
    others = {name: value for name, value in trial.params.items() if value is not None}
    return {**others, found.name: found.value}


def try_it(spec: StudySpec, trial: TrialRow, found: Diagnosis) -> list[str]:
    """Return the command that enqueues a trial of the change."""
    changes = [f"{name}={short(value, 12)}" for name, value in enqueued(trial, found).items()]
    return ["enqueue", spec.name, "--set", *changes, "--label", label(trial, found)]


def label(trial: TrialRow, found: Diagnosis) -> str:
    """Return the label of a trial of the change."""
    return f"trial {trial.number}, {found.name} {'up' if _is_up(found) else 'down'}"


def _is_up(found: Diagnosis) -> bool:
    return isinstance(found.was, int | float) and isinstance(found.value, int | float) and found.value > found.was


def course_of(store: Store, trial: TrialRow, spec: StudySpec) -> Course:
    return Course(store.steps([trial.id], NEEDED), trial.config, spec, trial.reason)


def diagnosis_data(trial: TrialRow, found: Diagnosis, command: str) -> dict[str, Any]:
    """Return one item of `diagnose` for JSON."""
    return asdict(found) | {"enqueue": enqueued(trial, found), "command": command}

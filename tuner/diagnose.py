"""What is wrong with a trial, by its curves, and the one change to try next. Pure functions, no torch.

| what the curves show                        | change                                                       |
|---------------------------------------------|--------------------------------------------------------------|
| KL ends over the budget, or at the guard's  | a higher β or a lower KL target; where it was over the limit |
| limit                                       | within the first fifth, a lower learning rate                |
| KL hardly leaves 0                          | a higher learning rate; where a fixed β is high, a lower one |
| updates too large: approx KL, clip fraction | fewer epochs; with one or two of them a tighter cliprange    |
| the critic explains nothing                 | a higher value learning rate                                 |
| reward rises while texts repeat or shrink   | a higher β or a lower target                                 |
| stable, rising, and far below the budget    | a lower β or a higher target                                 |

Each is one change: with several at once nobody sees which one helped. KL first: "adjust β or the adaptive KL target
first if the policy diverges too quickly".
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ppo_core.declare import Choices, HyperValue
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig, inert
from ppo_core.output import KL_UNIT, short
from tuner import hacking
from tuner.guard import KL, RULES
from tuner.hacking import Step, values
from tuner.search.matching import GOAL, SLOPE
from tuner.space import KL_CONTROL
from tuner.spec import StudySpec
from tuner.status import Reason, Role, Status
from tuner.store import Store, TrialRow

NEEDED = (
    *hacking.NEEDED,
    KL,
    "objective/kl_coef",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "val/var_explained",
)
"""The metrics that the rules read."""

LATEST = 10
"""Steps that a reading is the median of: one odd batch says nothing."""
EARLY = 0.2
"""Share of the episodes in which β has no time to answer."""
STUCK = 0.1
"""Share of the KL budget under which a policy hardly moved."""
FAR = 0.5
"""Share of the KL budget under which a run has far to go."""
LARGE_APPROX_KL = 0.05
"""Nats per token in an iteration; OpenAI Spinning Up stops its epochs at 0.01 to 0.05."""
LARGE_CLIP_FRACTION = 0.3
LEAST_EVALUATIONS = 4
"""Evaluations under which nothing is said of how reward went."""
UNEXPLAINED = 0.05
"""Explained variance under which the critic is hardly better than the mean return."""


@dataclass(frozen=True)
class Diagnosis:
    """What a rule finds in a trial's curves, and the change that it advises."""

    rule: str
    finding: str
    """Which numbers it spoke on, in a sentence."""
    name: str
    """The hyperparameter to change."""
    was: HyperValue
    value: HyperValue

    @property
    def advice(self) -> str:
        """The change in words."""
        return f"{self.name} = {short(self.value)} (was {short(self.was)})"


class Course:
    """A trial's curves, as rules read them."""

    def __init__(
        self, steps: Sequence[Step], config: Mapping[str, HyperValue], spec: StudySpec, reason: Reason | None = None
    ) -> None:
        """Read a trial's steps (with the metrics `NEEDED`, by step), its configuration, and why it ended early."""
        self.steps, self.config, self.spec, self.reason = steps, config, spec, reason
        self.total = PPOConfig.from_dict(config).total_episodes

    @cached_property
    def share(self) -> float:
        """The share of its episodes that it ran."""
        return self.steps[-1]["episode"] / self.total if self.steps else 0.0

    @cached_property
    def end_kl(self) -> float:
        """Eval KL of the last evaluation after step 0, else the last rollouts'; NaN: there is neither."""
        evaluated = values((row for row in self.steps if row["step"] > 0), "eval/kl")
        found = evaluated or values(self.steps, KL)
        return found[-1] if found else math.nan

    @cached_property
    def over_limit_at(self) -> float | None:
        """The share of its episodes at which the rollouts' KL first was over the guard's limit; None: never."""
        over = (row for row in self.steps if hacking.is_measured(row, KL) and row[KL] > self.spec.kl_limit)
        first = next(over, None)
        return None if first is None else first["episode"] / self.total

    def latest(self, metric: str) -> float:
        """Return the median of a metric's last readings; NaN: it was not measured."""
        found = values(self.steps, metric)[-LATEST:]
        return statistics.median(found) if found else math.nan

    @cached_property
    def evaluations(self) -> list[Step]:
        """The steps that were evaluated."""
        return [row for row in self.steps if hacking.is_measured(row, "eval/reward")]

    # Changes

    def change(self, rule: str, finding: str, *moves: tuple[str, float]) -> Diagnosis | None:
        """Return the first of the moves (a hyperparameter, and the factor on its value) that changes something."""
        for name, factor in moves:
            was = self.config.get(name)
            if not isinstance(was, int | float) or isinstance(was, bool) or inert(name, self.config):
                continue
            value = self._moved(name, float(was), factor)
            if not math.isclose(value, float(was), rel_tol=0.05):
                return Diagnosis(rule, finding, name, was, value)
        return None

    def hold(self, factor: float) -> tuple[str, float]:
        """Return the move that holds KL down by a factor: a higher β, or a lower target where β adapts to one."""
        return ("kl_coef", factor) if self.config.get("kl_target") is None else ("kl_target", 1 / factor)

    def _moved(self, name: str, was: float, factor: float) -> int | float:
        """Return a value times a factor, in the study's range, and whole where it has to be."""
        value, span = was * factor, self.spec.search.get(name)
        if isinstance(span, Choices):
            numbers = [one for one in span.values if isinstance(one, int | float)]
            return min(numbers, key=lambda one: abs(one - value), default=was)
        if span is not None:
            value = min(max(value, span.low), span.high)
        if HYPERPARAMETERS[name].kind is int:
            return max(1, round(value))
        return float(f"{value:.3g}")


Rule = Callable[[Course], Diagnosis | None]


def kl_too_high(course: Course) -> Diagnosis | None:
    """KL that ends over the budget, or that the guard ended the trial for."""
    blame = RULES[course.reason.rule].blame if course.reason is not None and course.reason.rule in RULES else None
    kl, budget = course.end_kl, course.spec.kl_budget
    if blame != "kl" and not kl > budget:
        return None
    at = course.over_limit_at
    reading = max([kl, *([course.reason.value] if blame == "kl" and course.reason and course.reason.value else [])])
    if at is not None and at <= EARLY:
        text = (
            f"KL was over the limit of {course.spec.kl_limit:g} {KL_UNIT} after {at:.0%} of the episodes, before β "
            "could answer."
        )
        return course.change("KL too high", text, ("learning_rate", 0.3), course.hold(4.0))
    factor = _to_the_goal(reading, budget)
    text = f"KL ended at {reading:.1f} {KL_UNIT}, over the budget of {budget:g}."
    return course.change("KL too high", text, course.hold(factor), ("learning_rate", 1 / math.sqrt(factor)))


def kl_stuck(course: Course) -> Diagnosis | None:
    """KL that hardly leaves 0 in half of the episodes or more."""
    kls = [*values(course.evaluations, "eval/kl"), *values(course.steps, KL)]
    highest, least = max(kls, default=math.nan), STUCK * course.spec.kl_budget
    if course.share < 0.5 or not highest < least:
        return None
    text = f"KL never came over {highest:.2f} {KL_UNIT} in {course.share:.0%} of the episodes: the policy hardly moved."
    loose, usual = course.hold(0.25), course.spec.config({}).kl_coef
    is_high = course.config.get("kl_target") is None and float(course.config.get("kl_coef") or 0.0) > usual
    faster = (
        "learning_rate",
        3.0,
    )  # first where β adapts: it has come down by itself, and another target gains nothing
    return course.change("KL stuck at 0", text, *((loose, faster) if is_high else (faster, loose)))


def updates_too_large(course: Course) -> Diagnosis | None:
    """An approx KL or a clip fraction that says that one iteration moves the policy far."""
    approx, clipped = course.latest("policy/approxkl_avg"), course.latest("policy/clipfrac_avg")
    if not approx > LARGE_APPROX_KL and not clipped > LARGE_CLIP_FRACTION:
        return None
    text = (
        f"One iteration moves the policy far: approx KL {approx:.3f} nats/token, {clipped:.0%} of the tokens clipped."
    )
    epochs, fewer, tighter = int(course.config.get("num_ppo_epochs") or 1), ("num_ppo_epochs", 0.5), ("cliprange", 0.5)
    return course.change("Updates too large", text, *((fewer, tighter) if epochs > 2 else (tighter, fewer)))


def critic_explains_nothing(course: Course) -> Diagnosis | None:
    """A critic that is hardly better than the mean return after enough steps to learn."""
    read = values(course.steps, "val/var_explained")
    explained = course.latest("val/var_explained")
    if len(read) < LATEST or not explained < UNEXPLAINED:
        return None
    text = f"The critic explains {explained:.0%} of the returns' variance, over the last {LATEST} steps."
    return course.change("Critic explains nothing", text, ("value_learning_rate", 3.0), ("vf_coef", 3.0))


def reward_hacked(course: Course) -> Diagnosis | None:
    """Reward that rises while texts repeat, shrink, grow or narrow (see `tuner.hacking`)."""
    found = hacking.check(0, course.steps, math.inf)
    if found.verdict != "suspect" or len(course.evaluations) < LEAST_EVALUATIONS:
        return None
    text = f"Reward rises ({found.rise:+.2f}) while {', '.join(found.worse)}."
    return course.change("Reward hacking", text, course.hold(2.0), ("learning_rate", 0.5))


def stable_but_slow(course: Course) -> Diagnosis | None:
    """Reward that still rises at the end, with most of the KL budget unspent."""
    evaluated, kl, budget = course.evaluations, course.end_kl, course.spec.kl_budget
    if course.share < 0.9 or len(evaluated) < LEAST_EVALUATIONS or not STUCK * budget <= kl < FAR * budget:
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
    faster = ("learning_rate", min(max(math.sqrt(0.8 * budget / kl), 1.3), 3.0))
    return course.change("Stable but slow", text, course.hold(1 / _to_the_goal(kl, budget)), faster)


def _to_the_goal(kl: float, budget: float) -> float:
    """Return by how much to change β for a KL to end just within the budget (see `tuner.search.matching`)."""
    return min(max(math.exp(abs(math.log(kl / (GOAL * budget))) / SLOPE), 1.5), 8.0)


RULES_OF_DIAGNOSIS: tuple[Rule, ...] = (
    kl_too_high, kl_stuck, updates_too_large, critic_explains_nothing, reward_hacked, stable_but_slow
)  # fmt: skip
"""In the order in which their advice is worth trying."""


def diagnose(course: Course) -> list[Diagnosis]:
    """Return what the rules find in a trial's curves, the change to try first in front; empty: none speaks.

    Of several that would change one hyperparameter the first one's value holds for all.
    """
    found: list[Diagnosis] = []
    for rule in RULES_OF_DIAGNOSIS:
        one = rule(course)
        if one is not None:
            known = next((other for other in found if other.name == one.name), one)
            found.append(replace(one, value=known.value))
    return found


def with_repeats(found: Sequence[Diagnosis]) -> list[tuple[Diagnosis, bool]]:
    """Return each diagnosis with whether one before it advises the same change."""
    changes = [one.advice for one in found]
    return [(one, one.advice in changes[:place]) for place, one in enumerate(found)]


def is_choice(found: Sequence[Diagnosis]) -> bool:
    """Return whether more than one change is advised."""
    return len({one.advice for one in found}) > 1


NEAR = 1.3
"""A value that differs by less than this factor from the advised one is the advised one."""


def tried(trials: Sequence[TrialRow], trial: TrialRow, found: Diagnosis, spec: StudySpec) -> TrialRow | None:
    """Return the trial of the study that has the change already, or a greater one; None if there is none."""
    names = {*spec.search, "kl_target"} - {found.name}
    there = []
    for row in trials:
        value = row.config.get(found.name)
        is_alike = row.role is Role.SEARCH and all(row.config.get(n) == trial.config.get(n) for n in names)
        if is_alike and isinstance(value, int | float) and _is_as_far(float(value), found):
            there.append((abs(math.log(value / float(found.value or 1))), row))
    return min(there, key=lambda pair: (pair[0], pair[1].number))[1] if there else None


def _is_as_far(value: float, found: Diagnosis) -> bool:
    """Return whether a value goes about as far as the advised one, in its direction, or further."""
    if not isinstance(found.value, int | float) or min(value, found.value) <= 0:
        return False
    return value * NEAR > found.value if _is_up(found) else value < found.value * NEAR


def why_nothing(trial: TrialRow) -> str:
    """Return what to say of a trial in which no rule finds anything."""
    if trial.status is Status.FAILED:
        return "The trial failed; its log says why."
    return "No rule finds anything wrong in its curves."


def enqueued(spec: StudySpec, trial: TrialRow, found: Diagnosis) -> dict[str, HyperValue] | None:
    """Return the values of a trial that tries a change; None: the study does not search what changes."""
    if found.name not in spec.search:
        return None
    others = {name: value for name, value in trial.params.items() if name != KL_CONTROL and value is not None}
    return {**others, found.name: found.value}


def try_it(spec: StudySpec, trial: TrialRow, found: Diagnosis) -> list[str]:
    """Return the command that tries a change: a trial of the study, or a run of its own where the study fixes it."""
    values = enqueued(spec, trial, found)
    if values is None:
        return ["train", "--from", spec.name, str(trial.number), f"--{found.name}", str(found.value)]
    changes = [f"{name}={value}" for name, value in values.items()]
    return ["enqueue", spec.name, "--set", *changes, "--label", label(trial, found)]


def label(trial: TrialRow, found: Diagnosis) -> str:
    """Return what the trial that tries a change is called."""
    return f"trial {trial.number}, {found.name} {'up' if _is_up(found) else 'down'}"


def _is_up(found: Diagnosis) -> bool:
    return isinstance(found.was, int | float) and isinstance(found.value, int | float) and found.value > found.was


def course_of(store: Store, trial: TrialRow, spec: StudySpec) -> Course:
    """Return a stored trial's course."""
    return Course(store.steps([trial.id], NEEDED), trial.config, spec, trial.reason)


def diagnosis_data(spec: StudySpec, trial: TrialRow, found: Diagnosis, command: str) -> dict[str, Any]:
    """Return one item of `diagnose` for JSON."""
    return asdict(found) | {"enqueue": enqueued(spec, trial, found), "command": command}

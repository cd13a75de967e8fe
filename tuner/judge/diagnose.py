"""Diagnosis: find a trial's problems in its curves, and the one change to try next. Pure functions, no torch.

`tuner.study.rules.SIGNS` has the limits and the changes. Each advice is a single change: with several, nobody knows
which one helped. KL first: "adjust β or the adaptive KL target first if the policy diverges too quickly".
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ppo_core.config.declare import Choices, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig, inert
from ppo_core.errors import ConfigError
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, decimals, fixed, measured, nats, short
from tuner.judge import hacking
from tuner.judge.hacking import Finding, Step, values
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow
from tuner.study import rules, study_file
from tuner.study.rules import KL, KL_STEP, RULES, SIGNS, Blame, Limit, Sign, blame_of, knob_of
from tuner.study.space import is_number
from tuner.study.spec import StudySpec
from tuner.study.status import Reason, Role, Status

HEALTH_METRICS = tuple(dict.fromkeys(str(SIGNS[name].metric) for name in rules.HEALTH))
SCORES_STD = "objective/scores_std"
_RUN = (KL, "objective/kl_coef", KL_STEP, rules.WANTED_KL_STEP, rules.RETURN_STD, SCORES_STD)
NEEDED = (*hacking.NEEDED, *_RUN, *HEALTH_METRICS)
"""Metrics that the rules read."""

FEWEST = 2  # fewest iterations for a reading, however short the run: one batch may be odd
LATEST = 1 / 3  # share of the run's iterations of whose last ones a reading is the median
GOAL, SLOPE = 0.78, 0.8  # target for the final KL as a share of the budget; slope of log KL in log β, negated
LEAST_EVALUATIONS = 4  # fewest evaluations for a statement on how the rise of a run goes on
NEAR = 1.3
"""Values within this factor of each other count as the same."""


@dataclass(frozen=True)
class Measurement:
    """Reading of one sign of health."""

    sign: Sign
    value: float | None
    """None: not measured, or too few steps."""
    is_out: bool
    """True if out of its range, or if the guard ended the trial for its metric."""
    is_early: bool = False
    """True if measured in too few steps."""


@dataclass(frozen=True)
class Diagnosis:
    """A rule's finding, and the change that it advises."""

    rule: str
    finding: str
    """The evidence in a sentence, with numbers."""
    name: str
    """The hyperparameter to change."""
    was: float
    value: float

    @property
    def is_up(self) -> bool:
        return self.value > self.was

    @property
    def advice(self) -> str:
        """The change in words."""
        return f"{self.name} = {short(self.value)} (was {short(self.was)})"


@dataclass(frozen=True, eq=False)
class Course:
    """A trial's curves for the rules to read."""

    steps: Sequence[Step]
    """With the metrics `NEEDED`, by step."""
    config: Mapping[str, HyperValue]
    spec: StudySpec
    reason: Reason | None = None
    """Reason of its early end."""
    fresh: Sequence[Sequence[Step]] = ()
    """Curves of its configuration on fresh seeds."""

    @cached_property
    def checked(self) -> PPOConfig:
        """The config as the trainer reads it."""
        return PPOConfig.from_dict(self.config)

    @property
    def total(self) -> int:
        """Episodes of the whole trial."""
        return self.checked.total_episodes

    def window(self, share: float) -> int:
        """Return a share of the run's iterations, FEWEST at least."""
        return max(FEWEST, round(share * self.checked.num_iterations()))

    @cached_property
    def share(self) -> float:
        """Share of its episodes that it ran."""
        return self.steps[-1]["episode"] / self.total if self.steps else 0.0

    @cached_property
    def end_kl(self) -> float:
        """Eval KL of the last evaluation after step 0, else the last rollout KL, else NaN."""
        kls = hacking.eval_kls(self.steps) or values(self.steps, KL)
        return kls[-1] if kls else math.nan

    @cached_property
    def highest_kl(self) -> float:
        """Highest KL of any evaluation or rollout, or NaN."""
        return max((*values(self.evaluations, "eval/kl"), *values(self.steps, KL)), default=math.nan)

    @cached_property
    def kl_step(self) -> float:
        """KL step over the wanted one, the median of the last third of the run; NaN: none is wanted, or too early."""
        shares = [row[KL_STEP] / row[rules.WANTED_KL_STEP] for row in self.steps if hacking.is_measured(row, KL_STEP)]
        is_early = len(shares) < self.window(SIGNS["kl_step_low"].after)
        return math.nan if is_early else statistics.median(shares[-max(FEWEST, len(shares) // 3) :])

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the scores that β weighed the KL against in the first batch; NaN: unknown."""
        if self.checked.has_unitless_beta:
            return 1.0
        stds = values(self.steps, rules.RETURN_STD) or values(self.steps, SCORES_STD)
        return stds[0] if stds else math.nan

    @cached_property
    def blame(self) -> Blame | None:
        """Kind of problem for which the guard ended it, or None."""
        return blame_of(self.reason)

    @cached_property
    def over_limit_at(self) -> float | None:
        """Share of its episodes at which the rollout KL first exceeded the guard's limit, or None."""
        for row in self.steps:
            if hacking.is_measured(row, KL) and SIGNS["kl_early"].is_broken(row[KL], self.spec.kl_limit):
                return float(row["episode"]) / self.total
        return None

    @cached_property
    def diagnoses(self) -> list["Diagnosis"]:
        """See `diagnose`."""
        return diagnose(self)

    @cached_property
    def readings(self) -> list[Measurement]:
        """Readings of all signs of health, in declared order."""
        return [self._reading(SIGNS[name]) for name in rules.HEALTH]

    def _reading(self, sign: Sign) -> Measurement:
        numbers = self._numbers(sign)
        is_ended = self.blame is not None and self.reason is not None and self.reason.metric == sign.metric
        if sign.of_whole_run:
            has_moved = (
                self.highest_kl >= SIGNS["kl_stuck"].limit * self.spec.kl_budget * self.share
                or self.kl_step >= SIGNS["kl_step_low"].limit
            )
            numbers = [] if has_moved else [number for number in numbers if number]
        least = self.window(sign.after)
        if len(numbers) < least:
            return Measurement(sign, None, is_ended, is_early=len(numbers) > 0)
        value = max(numbers) if sign.of_whole_run else statistics.median(numbers[-self.window(LATEST) :])
        return Measurement(sign, value, is_ended or sign.is_broken(value))

    def _numbers(self, sign: Sign) -> list[float]:
        needed = {rules.RETURNS: rules.RETURN_STD, rules.STRAIGHT: rules.LENGTH}.get(sign.relative_to)
        metric = str(sign.metric)
        rows = [row for row in self.steps if row["step"] > 0 and hacking.is_measured(row, metric)]
        if needed is None:
            return values(rows, metric)
        pairs = [(row[metric], row[needed]) for row in rows if hacking.is_measured(row, needed) and row[needed] > 0]
        if sign.relative_to == rules.STRAIGHT:
            per_response = self.spec.kl_budget / self.checked.num_iterations() ** 2
            return [per_token * length / per_response for per_token, length in pairs]
        return [loss / max(std**2, pairs[0][0]) for loss, std in pairs]

    @cached_property
    def evaluations(self) -> list[Step]:
        return [row for row in self.steps if hacking.is_measured(row, "eval/reward")]

    def change(self, limit: Limit, finding: str, factor: float = 1.0) -> Diagnosis | None:
        """Return the first of a limit's moves that changes something; `finding` has the numbers, in a sentence.

        `factor` is for β if the limit states none; the learning rate gets its square root (see also `knob_of`).
        """
        # Fewer epochs come last where there are one or two.
        few = self.checked.num_ppo_epochs <= 2
        for moved, declared in sorted(
            limit.moves, key=lambda move: few and move[0] == "num_ppo_epochs" and move[1] < 1
        ):
            open_factor = math.sqrt(factor) if moved == "learning_rate" else factor
            name, power = knob_of(moved, self.config)
            times = {math.inf: open_factor, 0.0: 1 / open_factor}.get(declared, declared) ** power
            # Where a β that holds the KL at the target could not bring it there, a higher target changes nothing.
            is_under_target = self.checked.keeps_kl_step and not self.end_kl * NEAR >= (self.checked.kl_target or 0.0)
            if name == "kl_target" and times > 1 and is_under_target:
                continue
            was = self._in_force(name)
            if was is None:
                continue
            value = self._moved(name, was, times)
            is_same_way = (value > was) is (times > 1)  # a value outside the study's range is clipped the other way
            if is_same_way and not math.isclose(value, was, rel_tol=0.05) and self._is_allowed(name, value):
                return Diagnosis(limit.label, finding, name, was, value)
        return None

    def _in_force(self, name: str) -> float | None:
        """Return a number, with the default filled in; None if it is unset or has no effect."""
        value = self.config.get(name)
        if inert(name, self.config):
            return None
        if name == "kl_step":
            value = self.checked.wanted_kl_step() / float(self.checked.kl_target or 1.0)
        elif name == "mini_batch_size":
            value = self.checked.batch_sizes(1).mini_batch_size
        return value if is_number(value) else None

    def _is_allowed(self, name: str, value: float) -> bool:
        try:
            PPOConfig.from_dict({**self.config, name: value})
        except ConfigError:
            return False
        return True

    def _moved(self, name: str, was: float, factor: float) -> int | float:
        value, span = was * factor, self.spec.search.get(name)
        if isinstance(span, Choices):
            numbers = [choice for choice in span.values if isinstance(choice, int | float)]
            return min(numbers, key=lambda number: abs(number - value), default=was)
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
    share = course.over_limit_at
    if share is not None and share <= course.window(rules.EARLY) / course.checked.num_iterations():
        limit = nats(course.spec.kl_limit)
        when = f"after {share:.0%} of the episodes, before β could respond"
        text = f"{METRICS[KL].label} was over the limit of {limit} {when}."
        return course.change(SIGNS["kl_early"], text)
    readings = (kl, course.reason.value if blamed and course.reason else None)
    reading = max((one for one in readings if one is not None and not math.isnan(one)), default=math.nan)
    metric = "eval/kl" if reading == kl and hacking.eval_kls(course.steps) else KL
    text = f"{METRICS[metric].label} ended at {measured(reading)} {KL_UNIT}, over the budget of {budget:g}."
    return course.change(SIGNS["kl_end"], text, _to_the_goal(reading, budget))


def kl_stuck(course: Course) -> Diagnosis | None:
    """KL that stays far under the budget for half of the episodes or more, or for which the guard ended the trial."""
    sign, highest = SIGNS["kl_stuck"], course.highest_kl
    is_stuck = course.share >= 0.5 and sign.is_broken(highest, course.spec.kl_budget)
    if course.blame != "idle" and not is_stuck:
        return None
    used = highest / course.spec.kl_budget
    share = f"{used:.0%} of the budget of {course.spec.kl_budget:g}"
    how = share if used > rules.ROUNDING else "the policy hardly moved"
    text = f"KL never rose above {measured(highest)} {KL_UNIT} in {course.share:.0%} of the episodes: {how}."
    best, coef = study_file.beta_of_best(course.spread, course.spec.kl_budget), course.checked.kl_coef
    coef *= course.spread if course.checked.normalize_kl_coef else 1.0
    # β comes last where it adapts: it has come down by itself, and another target gains nothing.
    if course.checked.kl_target is None and coef > best:
        sign = replace(sign, moves=(("kl_coef", 0.0), ("learning_rate", 3.0)))
        text += f" β = {short(coef)} is too high: even the best possible policy at the budget needs only {short(best)}."
        return course.change(sign, text, coef / (study_file.BETA * best) if best > 0 else 8.0)
    return course.change(sign, text)


def kl_step_off(course: Course) -> Diagnosis | None:
    """KL step that stays far from the one that the run wants."""
    for sign in (SIGNS["kl_step_low"], SIGNS["kl_step_high"]):
        if sign.is_broken(course.kl_step):
            times = f"{course.kl_step:.2g} times {sign.relative_to}"
            return course.change(sign, f"{METRICS[KL_STEP].label} was {times} in the last third of the run.")
    return None


def out_of_range(label: str) -> Check:
    """Return the check of the signs of health with this label."""

    def check(course: Course) -> Diagnosis | None:
        out = [reading for reading in course.readings if reading.is_out and reading.sign.label == label]
        texts = [one.sign.reads(one.value) for one in out if one.value is not None and one.sign.is_broken(one.value)]
        if course.reason is not None and course.reason.metric in [reading.sign.metric for reading in out]:
            texts.append(course.reason.message)
        return course.change(out[0].sign, f"{'; '.join(texts)}.") if out else None

    return check


def broke(course: Course) -> Diagnosis | None:
    """A run that the guard ended as broken, for a metric outside the signs of health."""
    if course.reason is None or course.blame != "broken" or course.reason.metric in HEALTH_METRICS:
        return None
    return course.change(RULES[course.reason.rule], f"{course.reason.message}.")


def reward_hacked(course: Course) -> Diagnosis | None:
    """Reward that rises while texts repeat, shrink, grow or narrow (see `tuner.judge.hacking`), whatever its KL."""
    finding = hacked(course)
    if finding.verdict not in ("suspect", "repeated"):
        return None
    rise = fixed(finding.rise, decimals([finding.rise], [finding.rise_se]), signed=True)
    return course.change(SIGNS["repeats"], f"Reward rises ({rise}) while {', '.join(finding.worse)}.")


def hacked(course: Course) -> Finding:
    """Return whether a trial's reward is hacked, by its curves and those on fresh seeds."""
    finding, *fresh = hacking_findings(course)
    return hacking.on_fresh_seeds(finding, fresh)


def hacking_findings(course: Course) -> list[Finding]:
    """Return the findings of a trial's own curves and of those on fresh seeds, whatever their KL."""
    return [hacking.check(0, steps, math.inf) for steps in (course.steps, *course.fresh)]


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
        f"Reward still rises at the end ({fixed(rise, decimals([rise], errors), signed=True)} in the last third), and "
        f"KL ended at {measured(kl)} {KL_UNIT} of a budget of {budget:g}."
    )
    return course.change(SIGNS["kl_unspent"], text, _to_the_goal(kl, budget))


def _to_the_goal(kl: float, budget: float) -> float:
    """Return the factor for β that brings a KL just within the budget: log KL falls by SLOPE in log β."""
    return min(max(math.exp(abs(math.log(kl / (GOAL * budget))) / SLOPE), 1.5), 8.0)


RULES_OF_DIAGNOSIS: tuple[Check, ...] = (
    kl_too_high,
    kl_step_off,
    kl_stuck,
    *(out_of_range(label) for label in dict.fromkeys(SIGNS[name].label for name in rules.HEALTH)),
    broke,
    reward_hacked,
    stable_but_slow,
)
"""In the order in which to try their advice."""


def diagnose(course: Course) -> list[Diagnosis]:
    """Return a trial's findings, first to try in front; if several change one hyperparameter, the first sets it."""
    if not course.share:
        return []
    diagnoses = [diagnosis for rule in RULES_OF_DIAGNOSIS if (diagnosis := rule(course)) is not None]
    values = {diagnosis.name: diagnosis.value for diagnosis in reversed(diagnoses)}
    return [replace(diagnosis, value=values[diagnosis.name]) for diagnosis in diagnoses]


def with_repeats(diagnoses: Sequence[Diagnosis]) -> list[tuple[Diagnosis, bool]]:
    """Return each diagnosis with True if an earlier one advises the same change."""
    changes = [diagnosis.advice for diagnosis in diagnoses]
    return [(diagnosis, diagnosis.advice in changes[:index]) for index, diagnosis in enumerate(diagnoses)]


def tried(trials: Sequence[TrialRow], trial: TrialRow, diagnosis: Diagnosis, spec: StudySpec) -> TrialRow | None:
    """Return a trial of the study that has the change already, or a greater one, or None."""
    others, advised = {*spec.search, "kl_target"} - {diagnosis.name}, diagnosis.value
    candidates = []
    for row in trials:
        value = row.config.get(diagnosis.name)
        is_other = row.role is Role.SEARCH and row.number != trial.number
        is_alike = is_other and all(row.config.get(name) == trial.config.get(name) for name in others)
        if not is_alike or not isinstance(value, int | float) or min(value, advised) <= 0:
            continue
        if value * NEAR > advised if diagnosis.is_up else value < advised * NEAR:
            candidates.append((abs(math.log(value / advised)), row.number, row))
    return min(candidates)[2] if candidates else None


def why_nothing(trial: TrialRow) -> str:
    """Return the line for a trial in which no rule finds anything to change."""
    if trial.status is Status.FAILED:
        return "The trial failed; its log says why."
    if trial.reason is not None and blame_of(trial.reason):
        return f"The guard ended it: {trial.reason.message}. No change of a hyperparameter is known to help."
    return "No rule finds anything to change."


def enqueued(trial: TrialRow, diagnosis: Diagnosis) -> dict[str, HyperValue]:
    """Return the values of a trial that tries the change."""
    others = {name: value for name, value in trial.params.items() if value is not None}
    return {**others, diagnosis.name: diagnosis.value}


def try_it(spec: StudySpec, trial: TrialRow, diagnosis: Diagnosis) -> list[str]:
    """Return the command that enqueues a trial of the change."""
    changes = [f"{name}={short(value, 12)}" for name, value in enqueued(trial, diagnosis).items()]
    return ["enqueue", spec.name, "--set", *changes, "--label", label(trial, diagnosis)]


def label(trial: TrialRow, diagnosis: Diagnosis) -> str:
    """Return the label of the trial that tries a diagnosis's change."""
    return f"trial {trial.number}, {diagnosis.name} {'up' if diagnosis.is_up else 'down'}"


def course_of(store: Store, trial: TrialRow, view: StudyView) -> Course:
    fresh = tuple(fresh_curves(store, view, trial.number).values())
    return Course(store.steps([trial.id], NEEDED), trial.config, view.spec, trial.reason, fresh)


def fresh_curves(store: Store, view: StudyView, number: int) -> dict[int, list[Step]]:
    """Return the curves of a trial's configuration on fresh seeds, by the id of the run."""
    runs = [run.id for run in view.confirming if run.parent == number and run.status is Status.COMPLETED]
    steps: dict[int, list[Step]] = {run: [] for run in runs}
    for row in store.steps(runs, hacking.NEEDED):
        steps[row["trial_id"]].append(row)
    return steps

"""The guard: stops a trial whose policy blows up, collapses or stands still, and says why. Never imports torch.

A pure fold over step reports: `check_step` takes the state and a report, and returns the next state and, if a rule (see
`tuner.study.rules`) is broken, the reason. It runs in the trainer's process, and its state travels in the checkpoint. A
metric missing from a report neither breaks a rule nor resets its count of broken steps.

`watch` is such a fold, too: it says when a trial about to cross the KL budget is evaluated beside its regular
evaluations. A trial's value is its best evaluation within the budget, and the regular ones may all miss the last
policies within it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.metrics import CORE, METRICS
from ppo_core.report import KL_GAP, KL_GAP_NOISE, MISMATCH, StepReport, first_not_finite, not_finite
from tuner.study import rules
from tuner.study.rules import KL, RETURN_STD, RULES, SIGNS, GuardSettings, Rule
from tuner.study.status import Reason

GUARD, WATCH = "guard", "extra_evaluations"
"""Keys in a checkpoint's `extra` of the guard's state and the watch's."""
WINDOW = 8
"""Iterations of evidence in a reason: what a person reads at a glance."""

_COLLAPSES = (rules.ENTROPY, rules.VALUE_LOSS, rules.REPETITION)
EVIDENCE = (KL, "eval/kl", "eval/reward", "objective/scores", *_COLLAPSES, MISMATCH, KL_GAP)
"""Metrics kept as evidence."""

READ = tuple(dict.fromkeys((*CORE, *EVIDENCE, RETURN_STD, KL_GAP_NOISE)))
"""Every metric that the guard reads; a report of these alone gives the same verdict."""


@dataclass(frozen=True)
class GuardState:
    """The guard's memory between two steps."""

    first: Mapping[str, float] = field(default_factory=dict)
    """First finite reading of each watched metric."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """Consecutive steps that each rule has been broken."""
    value_scale: float = 0.0
    """Scale to compare the value loss with (see the rule value_divergence)."""
    highest_kl: float = 0.0
    """Highest KL so far, for the rule nothing_learned."""
    lowest_kl: float | None = None
    """Lowest KL since the first update, for that rule, too; None before any."""
    kl_readings: int = 0
    window: tuple[dict[str, float], ...] = ()
    """Evidence of the last steps; readings that are not finite are left out."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "GuardState":
        return cls(**{**values, "window": tuple(values["window"])})

    def with_new_patience(self) -> "GuardState":
        """Reset the counts of broken steps, so that changed values get steps to recover."""
        return replace(self, broken={})


def check_step(
    settings: GuardSettings, state: GuardState, report: StepReport, total_episodes: int, kl_budget: float
) -> tuple[GuardState, Reason | None]:
    """Return the state after `report`, and the reason to end the trial of `total_episodes` there, or None."""
    progress = report.episode / total_episodes
    in_grace = progress <= settings.grace
    state = _remember(state, report, in_grace, settings.limits["nothing_learned"] * kl_budget)
    bad = first_not_finite(report)
    if bad is not None and "nonfinite" not in settings.off:
        return state, Reason("nonfinite", not_finite(report, bad), bad, None, None, 1, report.step, state.window)
    reason = None
    for name, rule in RULES.items():
        if name in settings.off or rule.metric not in report.metrics or (rule.has_grace and in_grace):
            continue
        value, setting = float(report.metrics[str(rule.metric)]), settings.limits[name]
        reading = _READINGS[name](_Now(value, setting, settings.kl_limit, kl_budget, progress, state, report))
        count = state.broken.get(name, 0) + 1 if reading and reading.breaks(rule) else 0
        state = replace(state, broken={**state.broken, name: count})
        if reading and reason is None and count >= (settings.patience if rule.is_patient else 1):
            reason = _reason(rule, setting, reading, count, state, report)
    return state, reason


class Guard:
    """Guard and watch of one run in progress, as `ppo_core.drive` wants them."""

    def __init__(self, settings: GuardSettings, kl_budget: float, extra: Mapping[str, Any]) -> None:
        """Begin, or continue by the `extra` of the checkpoint that the run resumes from."""
        self._settings, self._kl_budget = settings, kl_budget
        self._state = GuardState.from_dict(extra[GUARD]) if GUARD in extra else GuardState()
        self._watched = WatchState(**extra.get(WATCH, {}))
        self.is_near_budget = False  # true if the policy of the step that was checked last is to be evaluated now

    def check(self, report: StepReport, config: PPOConfig) -> Reason | None:
        """Return the reason to end the run after a step of the stage with this config, or None."""
        total, interval = config.whole_episodes(), config.eval_interval
        self._state, reason = check_step(self._settings, self._state, report, total, self._kl_budget)
        self._watched, self.is_near_budget = watch(self._watched, report, self._kl_budget, interval)
        return reason

    def extra(self, *, ends_stage: bool) -> dict[str, Any]:
        """Return the state for a checkpoint; at the end of a stage with new patience."""
        if ends_stage:
            self._state = self._state.with_new_patience()
        return {GUARD: self._state.to_dict(), WATCH: asdict(self._watched)}


def _remember(state: GuardState, report: StepReport, in_grace: bool, idle: float) -> GuardState:
    finite = {name: float(value) for name, value in report.metrics.items() if math.isfinite(value)}
    watched = {name: finite[name] for name in EVIDENCE if name in finite}
    row = {"step": report.step, "episode": report.episode, **watched}
    first = {**watched, **state.first}
    readings = ("eval/kl",) if _kl_starts_high(first, idle) else (KL, "eval/kl")
    kls = [finite[name] for name in readings if name in finite]
    first_updated = {KL: 2, "eval/kl": 1}  # a rollout is read before its update, an evaluation after
    updated = [finite[name] for name in readings if name in finite and report.step >= first_updated[name]]
    lowest = [*updated, *([] if state.lowest_kl is None else [state.lowest_kl])]
    scale, loss, variance = state.value_scale, finite.get(rules.VALUE_LOSS, 0.0), finite.get(RETURN_STD, 0.0) ** 2
    if not SIGNS["value_loss"].is_broken(loss, variance):  # a diverging critic's values are part of the returns
        scale = max(scale, variance)
    if in_grace or rules.VALUE_LOSS not in state.first:
        scale = max(scale, loss)
    return replace(
        state,
        first=first,
        value_scale=scale,
        highest_kl=max(state.highest_kl, *kls, 0.0),
        lowest_kl=min(lowest, default=None),
        kl_readings=state.kl_readings + int(KL in finite),
        window=(*state.window, row)[-WINDOW:],
    )


def _kl_starts_high(first: Mapping[str, float], idle: float) -> bool:
    """Return True if the training KL says nothing of learning: with top-k or top-p it is high before any update."""
    return first.get(KL, 0.0) >= idle


class _Now(NamedTuple):
    """What a rule is read from: a report of its metric, and what came before."""

    value: float
    """The metric's."""
    setting: float
    """The rule's limit as the study sets it."""
    kl_limit: float
    kl_budget: float
    progress: float
    """Share of the trial's episodes."""
    state: GuardState
    report: StepReport


class _Reading(NamedTuple):
    value: float
    limit: float

    def breaks(self, rule: Rule) -> bool:
        return self.value < self.limit if rule.breaks_below else self.value > self.limit


def _repetition(now: _Now) -> _Reading:
    first = now.state.first.get(rules.REPETITION, 0.0)
    return _Reading(now.value, first + now.setting * (1 - first))


def _learned(now: _Now) -> _Reading | None:
    state, limit = now.state, now.setting * now.kl_budget
    # A trial that has run all its episodes is left to its value: stopping it would save nothing.
    is_due = 0.5 <= now.progress < 1 and state.kl_readings >= rules.IDLE_STEPS
    is_known = "eval/kl" in now.report.metrics or not _kl_starts_high(state.first, limit)
    if not is_due or not is_known or state.highest_kl >= rules.ROUNDING * now.kl_budget:
        return None
    return _Reading(state.highest_kl - (state.lowest_kl or 0.0), limit)


_READINGS: Mapping[str, Callable[[_Now], _Reading | None]] = {
    "kl_hard": lambda now: _Reading(now.value, now.setting * now.kl_limit),
    "kl_limit": lambda now: _Reading(now.value, now.setting * now.kl_limit),
    "entropy_collapse": lambda now: _Reading(now.value, now.setting * now.state.first.get(rules.ENTROPY, 0.0)),
    "repetition_collapse": _repetition,
    "value_divergence": lambda now: _Reading(now.value, now.setting * now.state.value_scale),
    "sampler_mismatch": lambda now: _Reading(now.value, now.setting),
    "sampled_kl": lambda now: _Reading(abs(now.value), now.setting * now.report.metrics.get(KL_GAP_NOISE, math.inf)),
    "nothing_learned": _learned,
}
"""The reading and limit of each rule with a metric; None: nothing is due."""


def _reason(rule: Rule, setting: float, reading: _Reading, count: int, state: GuardState, report: StepReport) -> Reason:
    assert rule.metric is not None
    metric = METRICS[rule.metric]
    limit = metric.with_unit(f"{reading.limit:.3g}")
    if rule.relative_to and setting != 1:
        limit += f" ({setting:g} of {rule.relative_to})" if setting < 1 else f" ({setting:g} times {rule.relative_to})"
    if rule.blame == "idle":
        count = state.kl_readings
        most = f"{reading.value:.3g} at most by step {report.step}"
        message = f"{metric.label} never rose by {limit} in {count} steps: {most}"
    else:
        side = "under" if rule.breaks_below else "over"
        steps = f" for {count} steps" if rule.is_patient and count > 1 else ""
        message = f"{metric.label} was {side} {limit}{steps}: {reading.value:.3g} at step {report.step}"
    return Reason(rule.name, message, rule.metric, reading.value, reading.limit, count, report.step, state.window)


MOST_EXTRA = 4  # extra evaluations allowed a trial
AHEAD = 5 / 3  # evaluation intervals ahead for which a rise of the KL is extrapolated
SMOOTHING = 1 / 3
"""Share of an evaluation interval whose mean KL is a reading, and in which a change of it loses half its weight."""


@dataclass(frozen=True)
class WatchState:
    """The watch's memory between two steps."""

    kl: float | None = None
    """The last reading: mean rollout KL of a part of an evaluation interval, in nats per response; None before any."""
    change: float = 0.0
    """Its smoothed change per evaluation interval."""
    extra: int = 0
    """Extra evaluations so far."""
    episode: int = 0
    """Episode at which the reading under way began."""
    total: float = 0.0
    """Sum of its rollout KLs."""
    count: int = 0
    """Number of its rollout KLs."""


def watch(state: WatchState, report: StepReport, kl_budget: float, eval_interval: int) -> tuple[WatchState, bool]:
    """Return the state after `report`, and True if its policy is to be evaluated now, before the next update.

    With k_1 the first rollout KL, k_n the mean one of the n-th part of a run, s_n its length in evaluation intervals
    (SMOOTHING, rounded up to whole iterations), B the budget, and

        d_n = d_{n-1} + (1 - 2^(-s_n / SMOOTHING)) · ((k_n - k_{n-1}) / s_n - d_{n-1}),  d_1 = 0,

    that is at the end of a part when

        k_n <= B and k_n + AHEAD · d_n > B    (about to cross), or
        k_n > B  and k_n + s_n · d_n <= B     (about to return),

    unless the report is an evaluation already, which counts as no extra one, or MOST_EXTRA were made. k_n is of the
    policies before their updates; what is evaluated is the policy after the last one. A KL that is missing or not
    finite changes nothing. So a run of many iterations is read as smoothly as one of few.

    Chosen and judged on 33 configurations of `reviews` (20 drawn at random, 13 that learn fast) of 30 iterations, three
    to an evaluation interval, that were evaluated at every step and read under ten budgets from 2.5 to 12 nats, in the
    176 cases where the KL came near the budget. Loss in reward of the best evaluation within the budget against the
    best of all steps: 0.088 with ten regular evaluations alone, 0.030 with 1.8 extra ones by this rule, 0.059 with 1.2
    by one step ahead without smoothing.
    """
    kl = report.metrics.get(KL)
    if kl is None or not math.isfinite(kl):
        return state, False
    total, count, share = state.total + kl, state.count + 1, (report.episode - state.episode) / eval_interval
    if state.kl is not None and share < SMOOTHING:
        return replace(state, total=float(total), count=count), False
    mean = total / count
    weight = 1 - 0.5 ** (share / SMOOTHING)
    change = 0.0 if state.kl is None else state.change + weight * ((mean - state.kl) / share - state.change)
    will_cross = mean <= kl_budget < mean + AHEAD * change
    will_return = mean + share * change <= kl_budget < mean
    is_due = (will_cross or will_return) and not report.is_evaluation and state.extra < MOST_EXTRA
    return WatchState(float(mean), change, state.extra + is_due, report.episode), is_due

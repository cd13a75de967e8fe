"""The gauntlet: which gate stopped each configuration on its way to the answer, and by how much. Never imports torch.

The gates, in order, and what stops a trial at one:

    training KL    the guard or an error ended it, or it ended without an evaluation
    eval KL        no trained checkpoint is within the KL budget
    reward         its best checkpoint is below those of the configurations that go on to fresh seeds
    hacking        nothing: it is read, and drawn as close where it is a caution
    fresh seeds    it is not better than the reference (without one: than all others)

Which go on and which one wins is decided elsewhere (`tuner.confirm.plan`, `tuner.confirm.answer`). One that goes on has
passed the gates before, whatever its later steps did. The answer, once confirmed, has passed all of them.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from ppo_core.config.kl_budget import bound
from ppo_core.errors import ConfigError
from ppo_core.output import KL_UNIT, decimals, fixed, measured, plus_minus, short
from tuner.confirm.answer import Answer, decided
from tuner.confirm.intervals import Interval, places_of
from tuner.confirm.plan import chosen, label_of
from tuner.confirm.result import beats, confirmations, longest_read
from tuner.judge.best import best_rank, is_reread, standing, twice_text
from tuner.judge.diagnose import course_of, hacking_findings
from tuner.judge.hacking import Finding, Symptom, on_fresh_seeds
from tuner.judge.paired import ERRORS
from tuner.judge.results import StudyView
from tuner.judge.scoring import evaluations_by_trial, is_finite, trial_value
from tuner.store import Store, TrialRow
from tuner.study.rules import KL, RULES, blame_of
from tuner.study.status import Origin, Status


class Gate(StrEnum):
    """A gate, by its name for people."""

    TRAINING = "training KL"
    KL = "eval KL"
    REWARD = "reward"
    HACKING = "length / hacking"
    FRESH = "fresh seeds"


GATES = tuple(Gate)


class State(StrEnum):
    """The outcome of a configuration at a gate, and so in the end."""

    PASSED = "passed"
    STOPPED = "stopped"
    OPEN = "open"
    """Not decided: it still runs, or was not run on fresh seeds."""


@dataclass(frozen=True)
class Reading:
    """A configuration's reading at a gate."""

    value: float | None
    text: str
    """The number in few characters, or why there is none."""
    detail: str
    """The same with its error and unit."""
    low: float | None = None
    high: float | None = None
    seeds: tuple[float, ...] = ()
    is_close: bool = False
    """True if it is within two standard errors of the limit, or over it and went on all the same."""


@dataclass(frozen=True)
class Way:
    """A configuration's way through the gates."""

    trial: TrialRow
    readings: tuple[Reading, ...]
    """One reading a gate, up to the last one that it came to."""
    passed: int
    state: State
    """At the end of its way."""
    is_answer: bool

    @property
    def number(self) -> int:
        return self.trial.number

    @property
    def label(self) -> str:
        return label_of(self.trial)

    @property
    def stopped_at(self) -> Gate | None:
        return GATES[self.passed] if self.state is State.STOPPED else None


@dataclass(frozen=True)
class Gauntlet:
    """A study's configurations at the gates."""

    rows: tuple[Way, ...]
    """Sorted by gates passed, then the answer first and those not run on fresh seeds last, then by reward."""
    limits: Mapping[Gate, float | None]
    """None: there is none yet, or the rule is off."""
    limit_texts: Mapping[Gate, str]
    title: str = "the answer"
    """Name of the answer (see `Answer.title`)."""

    @property
    def left(self) -> list[int]:
        """Number of configurations before the first gate and after each one, up to the last that any came to."""
        reached = max((len(row.readings) for row in self.rows), default=0)
        return [len(self.rows), *(sum(row.passed > gate for row in self.rows) for gate in range(reached))]

    @property
    def line(self) -> str:
        """`32 → 31 → 15 → 6 → 6 → 2`."""
        return " → ".join(map(str, self.left))


def study_gauntlet(store: Store, view: StudyView, answer: Answer | None) -> Gauntlet:
    """Return the gauntlet of a study whose answer under the view's KL budget is `answer`."""
    judge = _Judge(store, view, answer)
    rows = [judge.row(trial) for trial in view.trials if trial.episodes or trial.status.is_final]
    values = {row.number: judge.reward(row.trial) for row in rows}

    def rank(row: Way) -> tuple[int, bool, int, float, int]:
        value = values[row.number]
        way, reward = (-row.passed, not row.is_answer, -len(row.readings)), math.inf if value is None else -value
        return *way, reward, row.number

    return Gauntlet(tuple(sorted(rows, key=rank)), judge.limits, judge.limit_texts, answer.title if answer else "")


class _Judge:
    def __init__(self, store: Store, view: StudyView, answer: Answer | None) -> None:
        self.store, self.view, self.spec = store, view, view.spec
        self.answer = None if answer is None else answer.number
        evaluations = evaluations_by_trial(store, view.trials)
        self.trained = {number: [row for row in rows if row["step"] > 0] for number, rows in evaluations.items()}
        self.best = {number: trial_value(rows, self.spec.kl_budget) for number, rows in self.trained.items()}
        self.highest_kl = store.highest([row.id for row in view.trials], KL)
        runs = confirmations(store, view) if view.is_own_budget else []
        self.confirmation = decided(runs) or longest_read(runs)
        self.confirmed = {} if self.confirmation is None else {
            one.trial.number: one for one in self.confirmation.configurations
        }  # fmt: skip
        self.finalists = set(self.confirmed)
        if not self.finalists:
            with suppress(ConfigError):
                self.finalists = {row.number for row in chosen(view.trials, view.spec, None)}
        references = {row.number for row in view.trials if row.origin is Origin.REFERENCE}
        values = {row.number: value for row in view.trials if (value := self.reward(row)) is not None}
        cut = min((value for number, value in values.items() if number in self.finalists - references), default=None)
        beside = (value for number, value in values.items() if number not in self.finalists)
        self.below = max((value for value in beside if cut is not None and value < cut), default=-math.inf)
        """The highest reward under the cut."""
        ends = [(best.value, best.value_se) for best in self.best.values()]
        self.places = decimals([value for value, _ in ends], [se for _, se in ends])
        self.limits: dict[Gate, float | None] = {
            Gate.TRAINING: None if "kl_limit" in self.spec.guard.off else self.spec.kl_limit,
            Gate.KL: self.spec.kl_budget,
            Gate.REWARD: cut,
            Gate.HACKING: 1.0,
            Gate.FRESH: 0.0,
        }
        against = "best" if self.confirmation is not None and self.confirmation.reference is None else "reference"
        self.limit_texts = {
            Gate.TRAINING: "" if self.limits[Gate.TRAINING] is None else f"limit {short(self.spec.kl_limit)}",
            Gate.KL: f"budget {short(self.spec.kl_budget)}",
            Gate.REWARD: "" if cut is None else f"cut {fixed(cut, self.places)}",
            Gate.HACKING: "limit",
            Gate.FRESH: against,
        }

    def reward(self, trial: TrialRow) -> float | None:
        """Return the reward of a trial's best checkpoint: of both readings where it was read twice."""
        stands = standing(trial) if is_reread(trial) else None
        return self.best[trial.number].value if stands is None else stands.reward

    def row(self, trial: TrialRow) -> Way:
        readings: list[Reading] = []
        for passed, gate in enumerate((self._training, self._kl, self._reward, self._hacking, self._fresh)):
            reading, state = gate(trial)
            if reading is not None:
                readings.append(reading)
            if state is not State.PASSED:
                return Way(trial, tuple(readings), passed, state, trial.number == self.answer)
        return Way(trial, tuple(readings), len(GATES), State.PASSED, trial.number == self.answer)

    def _training(self, trial: TrialRow) -> tuple[Reading, State]:
        kl, limit = self.highest_kl.get(trial.id), self.limits[Gate.TRAINING]
        why = "" if trial.number in self.finalists else self._why_ended(trial)
        is_over = kl is not None and limit is not None and kl > limit
        highest = "not read" if kl is None else f"at most {measured(kl)} {KL_UNIT}"
        highest += " for too few steps to be stopped" if is_over and not why else ""
        detail = f"{highest}{why and f', {why}'}"
        text = measured(kl) if blame_of(trial.reason) == "kl" or not why else why
        return Reading(kl, text, detail, is_close=is_over and not why), State.STOPPED if why else State.PASSED

    def _why_ended(self, trial: TrialRow) -> str:
        """Return why a trial has nothing to show for its training, in a few words; empty: it may have."""
        if trial.status is Status.FAILED:
            return trial.status.value
        if trial.reason is not None and blame_of(trial.reason) is not None:
            return RULES[trial.reason.rule].label
        return trial.status.value if trial.status.is_final and not self.trained[trial.number] else ""

    def _kl(self, trial: TrialRow) -> tuple[Reading | None, State]:
        best, rows, budget = self.best[trial.number], self.trained[trial.number], self.spec.kl_budget
        state = State.PASSED
        if best.step is not None:
            at = next(row for row in rows if row["step"] == best.step)
        else:
            known = [row for row in rows if is_finite(row["eval/kl"])]
            if trial.number not in self.finalists:
                state = State.STOPPED if trial.status.is_final else State.OPEN
            if not known:
                return (Reading(None, "not read", "not read") if state is not State.OPEN else None), state
            at = min(known, key=lambda row: bound(row["eval/kl"], row["eval/kl_se"]))
        kl, se = at["eval/kl"], at["eval/kl_se"] or 0.0
        detail = f"{plus_minus(kl, se)} {KL_UNIT}"
        is_close = abs(kl - budget) <= ERRORS * se or (best.step is None and state is State.PASSED)
        return Reading(kl, measured(kl), detail, kl - se, kl + se, is_close=is_close), state

    def _reward(self, trial: TrialRow) -> tuple[Reading, State]:
        best, value, cut = self.best[trial.number], self.reward(trial), self.limits[Gate.REWARD]
        state = State.PASSED
        if trial.number not in self.finalists:
            is_ranked = best_rank(trial, self.spec.kl_budget) is not None
            is_above = value is not None and cut is not None and value >= cut
            state = State.PASSED if is_ranked and is_above else State.STOPPED
            if not trial.status.is_final:
                state = State.OPEN
        if value is None:
            return Reading(None, "none", "none within the KL budget"), state
        se = best.value_se or 0.0
        gap = value - self.below if trial.number in self.finalists else math.inf if cut is None else cut - value
        is_close = trial.origin is not Origin.REFERENCE and abs(gap) <= ERRORS * se
        detail = f"{plus_minus(value, best.value_se, self.places)} in the search{twice_text(trial)}"
        if trial.origin is Origin.REFERENCE and cut is not None and value < cut:
            detail += ", and the reference always goes on"
        return Reading(value, fixed(value, self.places), detail, value - se, value + se, is_close=is_close), state

    def _hacking(self, trial: TrialRow) -> tuple[Reading, State]:
        own, *fresh = hacking_findings(course_of(self.store, trial, self.view))
        is_close = on_fresh_seeds(own, fresh).verdict in ("suspect", "borderline", "repeated")
        # At least half of the seeds decide (see `on_fresh_seeds`), so of two in the middle the higher.
        worst = sorted(map(_worst, fresh or [own]), key=lambda sign: sign.way)
        middle = worst[len(worst) // 2]
        seeds = tuple(sign.way for sign in worst) if fresh else ()
        text = f"{middle.name} {middle.numbers}"
        return Reading(middle.way, text, middle.text, seeds=seeds, is_close=is_close), State.PASSED

    def _fresh(self, trial: TrialRow) -> tuple[Reading | None, State]:
        one, done = self.confirmed.get(trial.number), self.confirmation
        if done is None or one is None or one.reward is None:
            return None, State.OPEN
        reference = done.reference
        lead = one.over_reference
        if reference is None and (under := one.under_best) is not None:
            low, high = (None if end is None else -end for end in (under.high, under.low))
            lead = Interval(-under.mean, low, high, under.n)
        leads = [each.under_best if reference is None else each.over_reference for each in done.read]
        state = State.OPEN
        if done.choice is not None:
            is_better = reference is not None and beats(one, reference, lead)
            state = State.PASSED if one is done.choice or is_better else State.STOPPED
        if lead is None:
            text = {State.PASSED: "kept" if one is reference else "best", State.STOPPED: "beaten"}.get(state, "0")
            return Reading(0.0, text, f"reward {one.reward.text}"), state
        is_close = lead.low is not None and lead.high is not None and lead.low <= 0 <= lead.high
        text, detail = fixed(lead.mean, places_of(leads), signed=True), lead.signed
        if state is State.STOPPED and is_close:
            detail += ", no more than noise"
        return Reading(lead.mean, text, detail, lead.low, lead.high, is_close=is_close), state


def _worst(finding: Finding) -> Symptom:
    signs = (sign for sign in finding.readings if sign.is_worse is not None and sign.name != "KL")
    return max(signs, key=lambda sign: sign.way, default=Symptom("nothing", None, "read", "nothing read"))

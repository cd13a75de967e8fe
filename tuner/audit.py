"""What a study's rules cost: audited trials ran on after a rule spoke, so it is known what it would have thrown away.

A verdict was wrong if the trial later reached more than the study's answer would have been without it: the
best of the other trials, and of this one up to the verdict. Rules whose word is final even in an audited trial are
exempt: a run that is not finite comes to nothing. A trial whose rung score is as high as that of one that was promoted
would have been promoted, so the strategy's verdict on it does not count.

Of n verdicts with k wrong ones the share of wrong ones is at most the p with P(K <= k | n, p) = 5% (Clopper and
Pearson 1934): 0 of 10 still allows 26%.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_core.kl_budget import is_within
from tuner.best import best_trial
from tuner.confirmed import rank_correlation
from tuner.guard import RULES
from tuner.results import StudyView
from tuner.scoring import Evaluations, evaluations_of, rung_score, trial_value
from tuner.spec import STRATEGIES, StudySpec
from tuner.status import Status, Verdict
from tuner.store import Store, TrialRow

STRATEGY = "strategy"


@dataclass(frozen=True)
class Audited:
    """One verdict on an audited trial, and what the trial reached after it."""

    study: str
    trial: int
    rule: str
    """The guard's, or the strategy's name."""
    step: int
    later: float | None
    """What the trial reached, in reward; None: nothing within the KL budget."""
    answer: float | None
    """The study's without that."""

    @property
    def was_wrong(self) -> bool:
        """Whether the verdict would have thrown away the study's best."""
        return self.later is not None and (self.answer is None or self.later > self.answer)

    @property
    def by(self) -> str:
        """Who spoke: a rule of the guard by its name, or the strategy."""
        return STRATEGY if self.rule in STRATEGIES else self.rule


@dataclass(frozen=True)
class Count:
    """How many verdicts of a kind were wrong."""

    by: str
    verdicts: int
    wrong: int

    @property
    def at_most(self) -> float:
        """The highest share of wrong ones that so few verdicts allow, at 95%."""
        return upper_bound(self.wrong, self.verdicts)


def upper_bound(count: int, of: int) -> float:
    """Return the one-sided 95% upper bound of a share, of which `count` of `of` were seen."""
    if count >= of:
        return 1.0
    from scipy import stats  # loads for half a second

    return float(stats.beta.ppf(0.95, count + 1, of - count))


def audited(store: Store, view: StudyView) -> list[Audited]:
    """Return the verdicts on a study's audited trials that have ended, the first one of each rule and trial."""
    chosen = {trial.id: trial for trial in view.trials if trial.is_audited and trial.status.is_final}
    found = []
    for trial_id, verdicts in store.verdicts(chosen).items():
        trial, evaluations = chosen[trial_id], evaluations_of(store, chosen[trial_id])
        first: dict[str, Verdict] = {}
        for verdict in verdicts:
            if not verdict.is_enforced:
                first.setdefault(verdict.reason.rule, verdict)
        for rule, verdict in first.items():
            before = [row for row in evaluations if row["step"] <= verdict.step]
            if rule in STRATEGIES and _would_be_promoted(view, before):
                continue
            others = [other for other in view.trials if other.number != trial.number]
            best = best_trial(others, view.spec.kl_budget, view.spec.objective)
            values = (None if best is None else best.value, worth(before, view.spec))
            known = [value for value in values if value is not None]
            later = worth(evaluations, view.spec) if trial.status is not Status.FAILED else None
            found.append(Audited(view.row.name, trial.number, rule, verdict.step, later, max(known, default=None)))
    return sorted(found, key=lambda one: (one.trial, one.step))


def worth(evaluations: Evaluations, spec: StudySpec) -> float | None:
    """Return what a trial with these evaluations is worth as a study's answer; None: it is not within the budget."""
    value, _, kl, step = trial_value(evaluations, spec.objective, spec.kl_budget)
    if spec.objective == "end" and not is_within(kl, None, spec.kl_budget):
        return None
    return value if step else None


def _would_be_promoted(view: StudyView, before: Evaluations) -> bool:
    """Return whether the strategy would have promoted a trial that has these evaluations at its rung."""
    score = rung_score(before, view.spec.kl_budget, view.spec.total_episodes)
    promoted = [trial.rung_scores[0] for trial in view.trials if trial.rung > 0 and trial.rung_scores]
    known = [one for one in promoted if one is not None]
    return score is not None and bool(known) and score >= min(known)


def counts(verdicts: Iterable[Audited]) -> list[Count]:
    """Return how many verdicts were wrong: of each rule of the guard, of all of them, and of the strategy."""
    every = list(verdicts)
    groups = {rule: [one for one in every if one.by == rule] for rule in RULES}
    groups = {rule: own for rule, own in groups.items() if own}
    guard = [one for own in groups.values() for one in own]
    groups |= {"the guard": guard} if guard else {}
    own = [one for one in every if one.by == STRATEGY]
    groups |= {"the strategy": own} if own else {}
    return [Count(by, len(own), sum(one.was_wrong for one in own)) for by, own in groups.items()]


@dataclass(frozen=True)
class Course:
    """What one audited trial reached on its way: at its rung, half-way and in the end. In reward."""

    rung: float | None
    half: float | None
    end: float | None


def courses(store: Store, view: StudyView) -> list[Course]:
    """Return the courses of a study's audited trials that ran to their end: none was chosen for what it promised."""
    spec, found = view.spec, []
    for trial in view.trials:
        if not trial.is_audited or trial.status is not Status.COMPLETED:
            continue
        rows, share = evaluations_of(store, trial), spec.total_episodes
        rung = [row for row in rows if row["episode"] <= max(0.1 * share, _first(rows))]
        half = [row for row in rows if row["episode"] <= 0.5 * share]
        found.append(
            Course(rung_score(rung, spec.kl_budget, share), trial_value(half, spec.objective, spec.kl_budget).value,
                   trial_value(rows, spec.objective, spec.kl_budget).value)
        )  # fmt: skip
    return found


def _first(rows: Evaluations) -> float:
    """Return the episode of the first evaluation after step 0."""
    return min((row["episode"] for row in rows if row["step"] > 0), default=0)


def correlations(found: Sequence[Course]) -> dict[str, tuple[int, float | None]]:
    """Return how many courses there are, and Spearman's correlation of earlier readings with the final value."""
    result = {}
    for name in ("rung", "half"):
        pairs = [(getattr(one, name), one.end) for one in found]
        known = [(early, end) for early, end in pairs if early is not None and end is not None]
        result[name] = (len(known), rank_correlation(known))
    return result


def saved(trials: Iterable[TrialRow]) -> dict[str, float]:
    """Return the device-seconds that rules saved, by who ended or paused the trials: at each trial's own pace."""
    found: dict[str, float] = {}
    for trial in trials:
        rule = None if trial.reason is None or trial.reason.rule not in RULES else trial.reason.rule
        by = STRATEGY if trial.is_resting else rule
        total = trial.config.get("total_episodes")
        if by is None or not isinstance(total, int) or not 0 < trial.episodes < total:
            continue
        found[by] = found.get(by, 0.0) + trial.seconds / trial.episodes * (total - trial.episodes)
    return found


@dataclass(frozen=True)
class Audit:
    """What the audited trials of studies tell, taken together."""

    studies: tuple[str, ...]
    trials: int
    """Audited trials that have ended."""
    verdicts: tuple[Audited, ...]
    courses: tuple[Course, ...]
    seconds_saved: Mapping[str, float]
    """Device-seconds, by the rule that ended trials, or STRATEGY."""


def audit(store: Store, views: Sequence[StudyView]) -> Audit:
    """Return what the audited trials of some studies tell."""
    spared: dict[str, float] = {}
    for view in views:
        for by, seconds in saved(view.trials).items():
            spared[by] = spared.get(by, 0.0) + seconds
    return Audit(
        tuple(view.row.name for view in views),
        sum(trial.is_audited and trial.status.is_final for view in views for trial in view.trials),
        tuple(one for view in views for one in audited(store, view)),
        tuple(one for view in views for one in courses(store, view)),
        spared,
    )


def audit_data(one: Audit) -> dict[str, Any]:
    """Return the object of `audit` for JSON."""
    names = ("study", "trial", "rule", "step", "later", "answer", "was_wrong")
    groups = ("by", "verdicts", "wrong", "at_most")
    return {
        "studies": list(one.studies),
        "trials": one.trials,
        "verdicts": [{name: getattr(verdict, name) for name in names} for verdict in one.verdicts],
        "counts": [{name: getattr(count, name) for name in groups} for count in counts(one.verdicts)],
        "correlations": {name: {"n": n, "spearman": rho} for name, (n, rho) in correlations(one.courses).items()},
        "seconds_saved": dict(one.seconds_saved),
    }

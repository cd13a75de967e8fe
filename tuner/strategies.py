"""How a search spends its budget: which trial runs next, which are paused at a rung, and which of those are finished.

| strategy  | a new trial runs                                   | and continues past its rung                        |
|-----------|----------------------------------------------------|----------------------------------------------------|
| full      | to its end                                         |                                                    |
| early_cut | to the first rung, 1/10 of its episodes            | if it is the best that rests there, 1 in 6         |
| asha      | to the rungs 1/10 and 3/10                         | if it is among the best third of a rung            |
| staged    | to its end, with β or the target, then rates and   |                                                    |
|           | batch sizes, then all the rest searched            |                                                    |

Schedules (learning rate, β) are those of the whole length from the first step on, so a trial that is promoted continues
as if it had never rested. asha: Li et al. 2020 (arXiv 1810.05934), algorithm 2. early_cut: a constant cut is hard to
beat (arXiv 2404.04111); how the two compare here is in docs/searching.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ppo_core.declare import HyperValue
from ppo_core.hyperparameters import PPOConfig
from tuner.best import best_rank
from tuner.protocol import Stepped
from tuner.scheduler import Action, Decision, guarded, is_audited, is_evaluated
from tuner.scoring import Changes, Evaluations, Follower, TrialList, ends_within, rung_score
from tuner.search.matching import Match, Matching, alike, label
from tuner.search.sampler import Projection
from tuner.spec import Strategy, StudySpec
from tuner.standings import Ordered, Rules, Standings
from tuner.status import Origin, Reason, Role, Verdict
from tuner.store import NewTrial, TrialRow

FINISH_SHARE = 0.2
"""Share of the budget that is kept for finishing trials: when no more is left, no trial starts."""


class FullRuns:
    """Every trial runs to its end, unless the guard or a person ends it."""

    def __init__(self, spec: StudySpec, threads: int) -> None:
        """Decide for a study of `spec`, whose new trials get `threads` CPU threads."""
        self._spec, self._threads = spec, threads
        self._projection = Projection(spec)
        self._matching = Matching(spec)
        self._lengths: dict[int, tuple[TrialRow, _Length]] = {}
        self._standings = Standings(Rules(self._promised, self._missing, lambda row: alike(row, spec)))
        self._whole_episodes = spec.total_episodes
        self._episodes = math.inf if spec.budget is None else spec.budget * self._whole_episodes

    def next(self, trials: TrialList, busy: Container[int]) -> int | NewTrial | None:
        """Return what was interrupted, then what waits, then a trial to promote or a new one, while there is budget."""
        for row in trials.open(self._spec.trials):
            if row.number not in busy:
                return row.number
        match = self._match(trials)
        if match is not None:
            return self._matched(trials, match)
        promoted = self._promoted(trials)
        if promoted is None:
            return self._new(trials) if self._may_start(trials) else None
        match = self._from_start(trials, promoted)
        return promoted if match is None else self._matched(trials, match)

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        """Return what the guard's word means: the trial is evaluated once more and ended, or the word is only noted."""
        return guarded(trial, stepped)

    def rests(self, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
        """Return None: this strategy pauses nothing."""
        return None

    def score(self, evaluations: Evaluations) -> float | None:
        """Return the rung score (see `tuner.scoring.rung_score`)."""
        return rung_score(evaluations, self._spec.kl_budget, self._spec.total_episodes)

    def promotable(self, trials: TrialList) -> Sequence[int]:
        """Return the trials that the strategy paused and may promote, the best first."""
        return [row.number for row in self._standing(trials).best_first(self._usual(trials))]

    def _standing(self, trials: TrialList) -> Standings:
        return self._standings.follow(trials)

    def _usual(self, trials: TrialList) -> float:
        """Return the score above which all count the same: the median value of the trials that ran to their end.

        Where reward saturates, looking further ahead says nothing, and the value so far says more.
        """
        return self._standing(trials).usual

    def is_finished(self, trials: TrialList) -> bool:
        """Return whether all trials have ended or rest, and there is neither budget nor need for more."""
        if trials.unended(self._spec.trials):
            return False
        return self._match(trials) is None and self._promoted(trials) is None and not self._may_start(trials)

    def _match(self, trials: TrialList) -> Match | None:
        """Return a finished trial's configuration to run to its end at another β, where there is room."""
        left = self._left(trials) / self._whole_episodes
        return self._matching.next(trials, is_last=left < 2) if self._is_room(trials) and left >= 1 else None

    def _from_start(self, trials: TrialList, promoted: int) -> Match | None:
        """Return at which β a trial that is to be finished is run from the start; None: it continues as it is."""
        is_room = self._is_room(trials) and self._left(trials) >= self._whole_episodes
        return self._matching.from_the_start(trials, trials[promoted]) if is_room else None

    def _is_room(self, trials: TrialList) -> bool:
        """Return whether the study may have another trial, as far as their number goes."""
        return self._spec.trials is None or trials.count < self._spec.trials

    def _promoted(self, trials: TrialList) -> int | None:
        return None

    def _may_start(self, trials: TrialList) -> bool:
        return self._is_room(trials) and self._left(trials) >= self._whole_episodes

    def _left(self, trials: TrialList) -> float:
        """Return the episodes of the budget that no trial has spent or was promised."""
        return self._episodes - self._standing(trials).promised

    def _promised(self, row: TrialRow) -> int:
        """Return the episodes that a trial has spent, or will have when it next ends or rests."""
        return row.episodes if row.is_done else self._length(row).until(row.rung)

    def _missing(self, row: TrialRow) -> int:
        """Return the episodes from where a trial rests to its end."""
        return self._length(row).whole - row.episodes

    def _length(self, row: TrialRow) -> "_Length":
        known = self._lengths.get(row.number)
        if known is None or known[0].config != row.config or known[0].origin is not row.origin:
            known = self._lengths[row.number] = (row, self._measured(row))
        return known[1]

    def _measured(self, row: TrialRow) -> "_Length":
        return _Length.of(row.config, ())

    # New trials

    def _matched(self, trials: TrialList, match: Match) -> NewTrial:
        return self._trial(len(trials), Origin.MATCHED, match.params, label=label(match.trial))

    def _new(self, trials: TrialList) -> NewTrial:
        spec, number, counted = self._spec, len(trials), trials.count
        started = self._standing(trials).listed
        if spec.listed:
            return self._trial(number, Origin.LISTED, spec.listed[counted].params, label=spec.listed[counted].label)
        if counted == 0:
            return self._trial(number, Origin.REFERENCE, spec.reference_params())
        if started < len(spec.starts):
            start = spec.starts[started]
            return self._trial(number, Origin.LISTED, spec.params_with(start.params), label=start.title)
        params, config = self._proposed(number, trials)
        return self._trial(number, Origin.SAMPLED, params, config)

    def _trial(
        self,
        number: int,
        origin: Origin,
        params: Mapping[str, HyperValue],
        config: PPOConfig | None = None,
        label: str = "",
    ) -> NewTrial:
        """Return a trial with these searched values, and the configuration that follows from them unless given."""
        values = (config or self._spec.config(params)).to_dict()
        audited = is_audited(self._spec, number)
        return NewTrial(number, origin, values, dict(params), self._threads, label=label, is_audited=audited)

    def _proposed(self, number: int, trials: TrialList) -> tuple[dict[str, HyperValue], PPOConfig]:
        """Return the searched values of a trial that the sampler proposes, and its configuration."""
        self._projection.follow(trials)
        params = self._projection.propose(number)
        return params, self._spec.config(params)


@dataclass(frozen=True)
class _Length:
    """A trial's length, and where it rests. All in episodes."""

    whole: int
    rungs: tuple[int, ...]

    @classmethod
    def of(cls, config: Mapping[str, HyperValue], shares: Iterable[float]) -> "_Length":
        """Return the length of a trial, with a rung at each share of it that its rollout batches allow."""
        trial = PPOConfig.from_dict(config)
        rungs = (rung_episodes(trial, share) for share in shares)
        return cls(trial.whole_episodes(), tuple(dict.fromkeys(rung for rung in rungs if rung is not None)))

    def until(self, rung: int) -> int:
        """Return where a trial that was promoted past `rung` rungs rests next, or ends."""
        return self.rungs[rung] if rung < len(self.rungs) else self.whole


def rung_episodes(config: PPOConfig, share: float) -> int | None:
    """Return the episodes at a rung: the first iteration's end at or after `share` of all, and two iterations at least.

    None: the trial has ended by then.
    """
    batch = config.batch_sizes(world_size=1).batch_size
    iterations = max(2, math.ceil(share * config.total_episodes / batch - 1e-9))
    return iterations * batch if iterations < config.num_iterations() else None


class Rungs(FullRuns):
    """Trials rest at rungs with their exact state, and the best of each rung are promoted past it.

    What people ask for (forks, enqueued trials) runs to its end, and so do audited trials, what is run again at another
    β, and the reference: it is what the others are compared with.
    """

    name: Strategy
    shares: tuple[float, ...]
    """Of a trial's episodes, one a rung."""
    one_in: int
    """Of so many trials at a rung one is promoted."""

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        """Return the guard's word, or that the trial rests here."""
        decision, report = guarded(trial, stepped), stepped.report
        if decision.action is not Action.GO_ON or not self._is_at_rung(trial, report.episode):
            return decision
        verdict = Verdict(report.step, self._reason(report.episode), is_enforced=not trial.is_audited)
        if trial.is_audited:
            is_first = report.episode in self._length(trial).rungs
            return replace(decision, verdict=decision.verdict or verdict) if is_first else decision
        return Decision(Action.PAUSE, verdict) if is_evaluated(stepped) else Decision(Action.EVALUATE)

    def rests(self, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
        """Return why it rests, if the last thing that the trial did was to be evaluated at its next rung."""
        is_evaluated = bool(evaluations) and evaluations[-1]["episode"] == trial.episodes
        rests = is_evaluated and not trial.is_audited and self._is_at_rung(trial, trial.episodes)
        return self._reason(trial.episodes) if rests else None

    def _reason(self, episode: int) -> Reason:
        return Reason(self.name, f"paused at episode {episode}")

    def _is_at_rung(self, trial: TrialRow, episode: int) -> bool:
        """Return whether a trial that started with as many promotions as `trial` has come to its next rung."""
        rungs = self._length(trial).rungs
        return trial.rung < len(rungs) and episode >= rungs[trial.rung]

    def _measured(self, row: TrialRow) -> _Length:
        is_whole = not row.counts or row.origin in (Origin.REFERENCE, Origin.MATCHED)
        return _Length.of(row.config, () if is_whole else self.shares)

    def _promoted(self, trials: TrialList) -> int | None:
        """Return the trial to promote now, if there is one: of the furthest rung where one is due, the best."""
        for rung in reversed(range(len(self.shares))):
            number = self._due_at(rung, trials)
            if number is not None and self._cost(trials[number]) <= self._left(trials):
                return number
        return None if self._may_start(trials) or not self._is_open_ended(trials) else self._last_finish(trials)

    def _is_open_ended(self, trials: TrialList) -> bool:
        """Return whether budget that is left over finishes more than one in `one_in`."""
        return self._spec.budget is not None or not self._standing(trials).past[0]

    def _last_finish(self, trials: TrialList) -> int | None:
        """Return the best trial that rests and that there is budget to finish: no other trial will start."""
        standing, left = self._standing(trials), self._left(trials)
        if standing.least_missing > left:
            return None
        ranked = standing.best_first(self._usual(trials))
        return next((row.number for row in ranked if self._missing(row) <= left), None)

    def _due_at(self, rung: int, trials: TrialList) -> int | None:
        """Return the best trial that rests at a rung, where promotions are due there."""
        standing = self._standing(trials)
        waiting, came = standing.waiting[rung], len(standing.came[rung])
        promoted = standing.past[rung] + standing.resting[rung] - len(waiting)
        return next(waiting.best_first(self._usual(trials)), None) if came // self.one_in > promoted else None

    def _may_start(self, trials: TrialList) -> bool:
        """Return whether to begin a trial: there is budget for it beside what is kept to finish some."""
        whole = self._whole_episodes
        if not self._is_room(trials):
            return False
        if self._spec.budget is None:
            return True
        rung = self.shares[0] * whole
        finishes = max(1, math.floor(FINISH_SHARE * self._episodes / (whole - rung)))
        is_first = not trials.count
        return is_first or self._left(trials) - rung >= finishes * (whole - rung) - 1e-9

    def _cost(self, row: TrialRow) -> int:
        """Return the episodes from where a trial rests to its next rung or its end."""
        return self._length(row).until(row.rung + 1) - row.episodes


class EarlyCut(Rungs):
    """One rung at a tenth; a free worker finishes the best that rests there when 1 in 6 is due, else begins another."""

    name: Strategy = "early_cut"
    shares = (0.1,)
    one_in = 6


class Asha(Rungs):
    """Asynchronous successive halving with pausing: rungs at 1/10 and 3/10, the best third of each is promoted."""

    name: Strategy = "asha"
    shares = (0.1, 0.3)
    one_in = 3

    def _due_at(self, rung: int, trials: TrialList) -> int | None:
        """Return the best trial that rests at a rung and is among the best 1/η of all that came to it."""
        standing, usual = self._standing(trials), self._usual(trials)
        came, best = standing.came[rung], next(standing.waiting[rung].best_first(usual), None)
        return best if best is not None and came.place(best, usual) < len(came) // self.one_in else None


# Stages

CONTROL = ("kl_coef", "kl_target", "kl_horizon")
RATES = ("learning_rate", "value_learning_rate", "batch_size", "mini_batch_size")
STAGE_SHARES = (0.3, 0.65)
"""Shares of the budget after which the first stage is over at the latest, and the second."""
_LAST = 3
_NEEDED = 2


class Staged(FullRuns):
    """Searches in three stages: β or the KL target, then rates and batches, then the rest.

    Each stage has the best values of those before. The first is over when two of the last three trials that ended are
    within the KL budget at their end, or 30% of the budget is spent; the second at 65%. A stage without a searched
    value is passed over. A trial's params say which stage made it: they are that stage's values alone.
    """

    def __init__(self, spec: StudySpec, threads: int) -> None:
        """Decide for a study of `spec`, whose new trials get `threads` CPU threads."""
        super().__init__(spec, threads)
        tests: tuple[Callable[[str], bool], ...] = (
            lambda name: name in CONTROL,
            lambda name: name in RATES,
            lambda name: name not in CONTROL and name not in RATES,
        )
        found = (frozenset(filter(test, spec.search)) for test in tests)
        self._stages = [names for names in found if names]
        parts = ({name: span for name, span in spec.search.items() if name in names} for names in self._stages)
        self._parts = [Projection(replace(spec, search=part)) for part in parts]
        """What the sampler knows in each stage."""
        self._taught = [Changes() for _ in self._stages]
        self._ends = _Ends(spec)

    def _proposed(self, number: int, trials: TrialList) -> tuple[dict[str, HyperValue], PPOConfig]:
        """Return this stage's values as the sampler proposes them, and a configuration with the best trial's others."""
        stage, spec = self._stage(trials), self._spec
        names, part = self._stages[stage], self._parts[stage]
        part.update(self._as_taught(row, stage) for row in self._taught[stage].take(trials))
        params = part.propose(number)
        best = self._ends.follow(trials).best
        others = {} if best is None else {name: trials[best].config[name] for name in spec.search if name not in names}
        return params, PPOConfig.from_dict({**spec.config(params).to_dict(), **others})

    def _as_taught(self, row: TrialRow, stage: int) -> TrialRow:
        """Return a trial as it is when it teaches a stage's sampler, or as one that keeps its number alone."""
        teaches = _is_of(row, self._stages[stage]) or (stage == 0 and row.origin is Origin.REFERENCE)
        return row if teaches else replace(row, role=Role.REPEAT)

    def _match(self, trials: TrialList) -> Match | None:
        return None  # the first stage searches β

    def _stage(self, trials: TrialList) -> int:
        """Return the index of the stage that the next trial is made in; a stage that is over does not come back."""
        made = self._ends.follow(trials).made
        begun = [index for index, names in enumerate(self._stages) if any(made[name] for name in names)]
        current = max(begun, default=0)
        last = len(self._stages) - 1
        share = self._share(trials)
        if self._stages[current] & set(CONTROL) and (share >= STAGE_SHARES[0] or self._is_settled(trials)):
            return min(current + 1, last)
        if self._stages[current] & set(RATES) and share >= STAGE_SHARES[1]:
            return min(current + 1, last)
        return current

    def _share(self, trials: TrialList) -> float:
        """Return the share of the study's budget, or of its trials, that is promised."""
        if self._spec.budget is not None:
            return 1 - self._left(trials) / self._episodes
        return trials.count / (self._spec.trials or 1)

    def _is_settled(self, trials: TrialList) -> bool:
        latest = self._ends.follow(trials).latest
        return sum(ends_within(trials[number], self._spec) is True for number in latest) >= _NEEDED


class _Ends(Follower):
    """What the stages ask of the trials that have ended, kept up as trials change."""

    def __init__(self, spec: StudySpec) -> None:
        super().__init__()
        self._spec = spec

    def _clear(self) -> None:
        self.made: Counter[str] = Counter()
        """How many proposed trials that count have each searched value."""
        self._by_time = Ordered[tuple[float, int]]()
        self._by_rank = Ordered[tuple[float, float, int]]()

    @property
    def latest(self) -> list[int]:
        """The trials that count and ended last."""
        return [number for _, number in self._by_time.tail(_LAST)]

    @property
    def best(self) -> int | None:
        """The best trial (see `tuner.best`)."""
        return None if self._by_rank.first is None else self._by_rank.first[-1]

    def _count(self, row: TrialRow, sign: int) -> None:
        if row.counts and row.origin is Origin.SAMPLED:
            self.made.update(dict.fromkeys(row.params, sign))
        if row.counts and row.status.is_final:
            self._by_time.change((row.ended_at or 0.0, row.number), sign)
        rank = best_rank(row, self._spec.kl_budget, self._spec.objective)
        if rank is not None:
            self._by_rank.change(rank, sign)


def _is_of(row: TrialRow, names: frozenset[str]) -> bool:
    """Return whether a trial was made in the stage that searches `names`."""
    return row.origin is Origin.SAMPLED and bool(names & row.params.keys())


MAKERS: Mapping[Strategy, Callable[[StudySpec, int], FullRuns]] = {
    "early_cut": EarlyCut,
    "full": FullRuns,
    "asha": Asha,
    "staged": Staged,
}


def make_scheduler(spec: StudySpec, threads: int) -> FullRuns:
    """Return the scheduler of a study, by its strategy."""
    return MAKERS[spec.strategy](spec, threads)

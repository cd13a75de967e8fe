"""How a search spends its budget: which trial runs next, which are paused at a rung, and which of those are finished.

| strategy  | a new trial runs                                   | and continues past its rung                        |
|-----------|----------------------------------------------------|----------------------------------------------------|
| full      | to its end                                         |                                                    |
| early_cut | to its rung, 1/10 of its episodes                  | if it is the best that rests there, 1 in 6         |

Schedules (learning rate, β) are those of the whole length from the first step on, so a trial that is promoted continues
as if it had never rested. A constant cut is hard to beat (arXiv 2404.04111); what was measured is in docs/searching.md.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from ppo_core.declare import HyperValue
from ppo_core.hyperparameters import PPOConfig
from tuner.protocol import Stepped
from tuner.scheduler import Action, Decision, guarded, is_evaluated
from tuner.scoring import Evaluations, TrialList, rung_score
from tuner.search.matching import Match, Matching, alike, label
from tuner.search.sampler import Projection
from tuner.spec import StudySpec
from tuner.standings import Rules, Standings
from tuner.status import Origin, Reason
from tuner.store import NewTrial, TrialRow
from tuner.study_file import Strategy

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
        """Return what the guard's word means: the trial is evaluated once more and ended."""
        return guarded(stepped)

    def rests(self, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
        """Return None: this strategy pauses nothing."""
        return None

    def score(self, evaluations: Evaluations) -> float | None:
        """Return the rung score (see `tuner.scoring.rung_score`)."""
        return rung_score(evaluations, self._spec.kl_budget, self._spec.total_episodes)

    def promotable(self, trials: TrialList) -> Sequence[int]:
        """Return the trials that the strategy paused and may promote, the best first."""
        return [row.number for row in self._standing(trials).best_first(self._usual(trials))]

    def promotions(self, trials: TrialList) -> int:
        """Return 0: this strategy promotes nothing."""
        return 0

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
        return row.episodes if row.is_done else self._length(row).next_stop(is_promoted=row.rung > 0)

    def _missing(self, row: TrialRow) -> int:
        """Return the episodes from where a trial rests to its end."""
        return self._length(row).whole - row.episodes

    def _length(self, row: TrialRow) -> "_Length":
        known = self._lengths.get(row.number)
        if known is None or known[0].config != row.config or known[0].origin is not row.origin:
            known = self._lengths[row.number] = (row, self._measured(row))
        return known[1]

    def _measured(self, row: TrialRow) -> "_Length":
        return _Length.of(row.config, None)

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
        self._projection.follow(trials)
        return self._trial(number, Origin.SAMPLED, self._projection.propose(number))

    def _trial(self, number: int, origin: Origin, params: Mapping[str, HyperValue], label: str = "") -> NewTrial:
        """Return a trial with these searched values, and the configuration that follows from them."""
        values = self._spec.config(params).to_dict()
        return NewTrial(number, origin, values, dict(params), self._threads, label=label)


@dataclass(frozen=True)
class _Length:
    """A trial's length, and where it rests. In episodes."""

    whole: int
    rung: int | None

    @classmethod
    def of(cls, config: Mapping[str, HyperValue], share: float | None) -> "_Length":
        """Return the length of a trial with its rung at a share of it; None: it has none."""
        trial = PPOConfig.from_dict(config)
        return cls(trial.whole_episodes(), None if share is None else rung_episodes(trial, share))

    def next_stop(self, *, is_promoted: bool) -> int:
        """Return where the trial rests next, or ends."""
        return self.whole if is_promoted or self.rung is None else self.rung


def rung_episodes(config: PPOConfig, share: float) -> int | None:
    """Return the episodes at a rung: the first iteration's end at or after `share` of all, and two iterations at least.

    None: the trial has ended by then.
    """
    batch = config.batch_sizes(world_size=1).batch_size
    iterations = max(2, math.ceil(share * config.total_episodes / batch - 1e-9))
    return iterations * batch if iterations < config.num_iterations() else None


class EarlyCut(FullRuns):
    """Trials rest at a rung with their exact state; of so many that came to it the best is finished.

    A free worker finishes the best that rests there when one is due, else begins another. What people ask for (forks,
    enqueued trials) runs to its end, and so do what is run again at another β, and the reference: it is what the others
    are compared with.
    """

    share = 0.1
    """Of a trial's episodes, where its rung is."""
    one_in = 6
    """Of so many trials at the rung one is finished."""

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        """Return the guard's word, or that the trial rests here."""
        decision, episode = guarded(stepped), stepped.report.episode
        if decision.action is not Action.GO_ON or not self._is_at_rung(trial, episode):
            return decision
        return Decision(Action.PAUSE, _paused_at(episode)) if is_evaluated(stepped) else Decision(Action.EVALUATE)

    def rests(self, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
        """Return why it rests, if the last thing that the trial did was to be evaluated at its rung."""
        is_evaluated = bool(evaluations) and evaluations[-1]["episode"] == trial.episodes
        return _paused_at(trial.episodes) if is_evaluated and self._is_at_rung(trial, trial.episodes) else None

    def promotions(self, trials: TrialList) -> int:
        """Return how many trials that rest can be finished with what is left of the budget.

        Without a budget: how many more are to be finished of the trials that the study is to have.
        """
        standing = self._standing(trials)
        if self._spec.budget is None:
            return max(1, (self._spec.trials or 0) // self.one_in) - standing.promoted
        return 0 if self._left(trials) <= 0 else int(self._left(trials) // standing.least_missing)

    def _is_at_rung(self, trial: TrialRow, episode: int) -> bool:
        """Return whether a trial that was not promoted has come to its rung."""
        rung = self._length(trial).rung
        return rung is not None and not trial.rung and episode >= rung

    def _measured(self, row: TrialRow) -> _Length:
        is_whole = not row.counts or row.origin in (Origin.REFERENCE, Origin.MATCHED)
        return _Length.of(row.config, None if is_whole else self.share)

    def _promoted(self, trials: TrialList) -> int | None:
        """Return the trial to finish now: the best that rests, where one is due or nothing else will start."""
        number = self._due(trials)
        if number is not None and self._missing(trials[number]) <= self._left(trials):
            return number
        return None if self._may_start(trials) or not self._is_open_ended(trials) else self._last_finish(trials)

    def _is_open_ended(self, trials: TrialList) -> bool:
        """Return whether budget that is left over finishes more than one in `one_in`."""
        return self._spec.budget is not None or not self._standing(trials).promoted

    def _last_finish(self, trials: TrialList) -> int | None:
        """Return the best trial that rests and that there is budget to finish: no other trial will start."""
        standing, left = self._standing(trials), self._left(trials)
        if standing.least_missing > left:
            return None
        ranked = standing.best_first(self._usual(trials))
        return next((row.number for row in ranked if self._missing(row) <= left), None)

    def _due(self, trials: TrialList) -> int | None:
        """Return the best trial that rests, where another one of those that came to the rung is to be finished."""
        standing = self._standing(trials)
        finished = standing.promoted + standing.resting - len(standing.waiting)
        ranked = standing.best_first(self._usual(trials))
        return next((row.number for row in ranked), None) if standing.came // self.one_in > finished else None

    def _may_start(self, trials: TrialList) -> bool:
        """Return whether to begin a trial: there is budget for it beside what is kept to finish some."""
        whole = self._whole_episodes
        if not self._is_room(trials):
            return False
        if self._spec.budget is None:
            return True
        rung = self.share * whole
        finishes = max(1, math.floor(FINISH_SHARE * self._episodes / (whole - rung)))
        is_first = not trials.count
        return is_first or self._left(trials) - rung >= finishes * (whole - rung) - 1e-9


def _paused_at(episode: int) -> Reason:
    return Reason("early_cut", f"paused at episode {episode}")


MAKERS: Mapping[Strategy, Callable[[StudySpec, int], FullRuns]] = {"early_cut": EarlyCut, "full": FullRuns}


def make_scheduler(spec: StudySpec, threads: int) -> FullRuns:
    """Return the scheduler of a study, by its strategy."""
    return MAKERS[spec.strategy](spec, threads)

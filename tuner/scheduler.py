"""What a study runs next, and what a trial's report means: pure decisions, which the controller carries out.

A scheduler reads the study's trials and a report, and returns what is to be done. It writes nothing, and the same
trials give the same decisions, so that a study which was killed goes on as it would have. `tuner.testing` holds what
every scheduler must do, as a suite to run on one's own.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from ppo_core.declare import HyperValue
from tuner.guard import RULES
from tuner.protocol import Answer, Stepped
from tuner.scoring import TrialList
from tuner.search.sampler import Projection
from tuner.spec import StudySpec
from tuner.status import ENDINGS, Origin, Reason, Verdict, Wanted
from tuner.store import NewTrial, TrialRow


class Action(Enum):
    """What is done with a trial after a report."""

    GO_ON = "go on"
    EVALUATE = "evaluate"
    """The same step is reported again, with an evaluation where one was possible."""
    SAVE = "save"
    """It saves a checkpoint and goes on."""
    PAUSE = "pause"
    """It saves a checkpoint, leaves its worker, and is promoted later or never."""
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """What is done with a trial after a report, and what a rule said of it."""

    action: Action = Action.GO_ON
    verdict: Verdict | None = None
    """The rule that pauses or stops the trial; or one that is only noted, since the trial is audited."""

    @property
    def reason(self) -> Reason | None:
        """Why the trial is paused or stopped, where a rule did it."""
        return self.verdict.reason if self.verdict is not None and self.verdict.is_enforced else None


NOTHING_DECIDED = Decision()


class Scheduler(Protocol):
    """Decides over the trials of one study under one spec. Pure: nothing but its arguments counts."""

    def next(self, trials: TrialList, busy: Container[int]) -> int | NewTrial | None:
        """Return the trial to run now: the number of one that there is, or a new one; None: there is none now.

        A number is of a trial that waits, was interrupted, or was paused by the strategy and is promoted; never one of
        `busy`, which a worker has. A new trial gets the next number.
        """
        ...

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        """Return what is done with a trial after its report; `trial` is as it was when it was started."""
        ...

    def promotable(self, trials: TrialList) -> Sequence[int]:
        """Return the trials paused by the strategy that may run again, the best first. Their checkpoints are kept."""
        ...

    def is_finished(self, trials: TrialList) -> bool:
        """Return whether the study has all its trials, and nothing is left to run or to be resumed by a person."""
        ...


MakeScheduler = Callable[[StudySpec, int], Scheduler]
"""Given a study's spec, and the CPU threads of its new trials."""


class FullRuns:
    """Every trial runs to its end, unless the guard or a person ends it: the scheduler of all studies so far."""

    def __init__(self, spec: StudySpec, threads: int) -> None:
        """Decide for a study of `spec`, whose new trials get `threads` CPU threads."""
        self._spec, self._threads = spec, threads
        self._projection = Projection(spec)

    def next(self, trials: TrialList, busy: Container[int]) -> int | NewTrial | None:
        """Return what was interrupted, then what waits, then a new trial, up to the study's total."""
        for row in trials.open(self._spec.trials):
            if row.number not in busy:
                return row.number
        return self._new(trials) if len(trials.counted()) < self._spec.trials else None

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        """Return what the guard's word means: the trial is evaluated once more and ended, or only goes on noted."""
        return guarded(trial, stepped)

    def promotable(self, trials: TrialList) -> Sequence[int]:
        """Return none: this scheduler pauses nothing."""
        return ()

    def is_finished(self, trials: TrialList) -> bool:
        """Return whether all trials have ended, up to the study's total and with what people added."""
        return trials.is_finished(self._spec.trials)

    def _new(self, trials: TrialList) -> NewTrial:
        spec, number, counted = self._spec, len(trials), len(trials.counted())
        label = ""
        if spec.listed:
            params, origin, label = dict(spec.listed[counted].params), Origin.LISTED, spec.listed[counted].label
        elif counted == 0:
            params, origin = spec.reference_params(), Origin.REFERENCE
        else:
            params, origin = self._proposed(number, trials), Origin.SAMPLED
        config = spec.config(params).to_dict()
        audited = is_audited(spec, number)
        return NewTrial(number, origin, config, params, self._threads, label=label, is_audited=audited)

    def _proposed(self, number: int, trials: TrialList) -> dict[str, HyperValue]:
        self._projection.update(trials)
        return self._projection.propose(number)


def guarded(trial: TrialRow, stepped: Stepped) -> Decision:
    """Return what the guard's word on a step means, which every scheduler obeys.

    A trial that is ended is evaluated first, where its policy allows it, so that it is known what it came to. Of an
    audited one the word is only noted, unless the run is broken for good.
    """
    reason = stepped.reason
    if reason is None:
        return NOTHING_DECIDED
    if trial.is_audited and not RULES[reason.rule].is_fatal:
        return Decision(Action.GO_ON, Verdict(stepped.report.step, reason, is_enforced=False))
    if not stepped.report.is_evaluation and not stepped.is_again:
        return Decision(Action.EVALUATE)
    return Decision(Action.STOP, Verdict(stepped.report.step, reason, is_enforced=True))


def is_audited(spec: StudySpec, number: int) -> bool:
    """Return whether a new trial is audited: drawn by the study's seed and the trial's number."""
    return spec.audit > 0 and np.random.default_rng([spec.seed, number]).random() < spec.audit


def answer(decision: Decision, wanted: Wanted | None, *, has_to_rest: bool) -> Answer:
    """Return a worker's answer to a report. A rule's word comes first, then a person's, then the strategy's own.

    Args:
        decision: The scheduler's.
        wanted: What an order wants of the trial.
        has_to_rest: Whether no trial is to run now.
    """
    if decision.action is Action.EVALUATE:
        return Answer.EVALUATE
    if decision.action is Action.STOP or wanted in ENDINGS:
        return Answer.STOP
    if decision.action is Action.PAUSE or wanted is Wanted.PAUSE or has_to_rest:
        return Answer.LEAVE
    return Answer.SAVE if decision.action is Action.SAVE else Answer.GO_ON

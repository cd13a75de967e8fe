"""What a study runs next, and what a trial's report means: pure decisions, which the controller carries out.

A scheduler reads the study's trials and a report, and returns what is to be done. It writes nothing, and the same
trials give the same decisions, so that a study that was killed resumes as it would have.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tuner.protocol import Answer, Stepped
from tuner.scoring import Evaluations, TrialList
from tuner.spec import StudySpec
from tuner.status import Reason, Wanted
from tuner.store import NewTrial, TrialRow


class Action(Enum):
    """What is done with a trial after a report."""

    GO_ON = "go on"
    EVALUATE = "evaluate"
    """The same step is reported again, with an evaluation where one was possible."""
    PAUSE = "pause"
    """It saves a checkpoint, leaves its worker, and is promoted later or never."""
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """What is done with a trial after a report, and why."""

    action: Action = Action.GO_ON
    reason: Reason | None = None
    """The rule that pauses or stops the trial."""


NOTHING_DECIDED = Decision()


class Scheduler(Protocol):
    """Decides over the trials of one study under one spec. Pure: nothing but its arguments counts."""

    def next(self, trials: TrialList, busy: Container[int]) -> int | NewTrial | None:
        """Return the trial to run now: the number of one that there is, or a new one; None if there is none now.

        A number is of a trial that waits, was interrupted, or was paused by the strategy and is promoted; never one of
        `busy`, which a worker has. A new trial gets the next number.
        """
        ...

    def decide(self, trial: TrialRow, stepped: Stepped) -> Decision:
        """Return what is done with a trial after its report; `trial` is as it was when it was started."""
        ...

    def rests(self, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
        """Return why the strategy pauses a trial that a kill left running; None: it had not come to where it does."""
        ...

    def score(self, evaluations: Evaluations) -> float | None:
        """Return what a trial with these evaluations is ranked by where the strategy pauses it, higher is better."""
        ...

    def promotable(self, trials: TrialList) -> Sequence[int]:
        """Return the trials paused by the strategy that may run again, the best first."""
        ...

    def promotions(self, trials: TrialList) -> int:
        """Return how many of those the budget can pay at most: by this more or fewer keep their checkpoints."""
        ...

    def is_finished(self, trials: TrialList) -> bool:
        """Return whether the study has all its trials, and nothing is left to run or to be resumed by a person."""
        ...


MakeScheduler = Callable[[StudySpec, int], Scheduler]
"""Given a study's spec, and the CPU threads of its new trials."""


def guarded(stepped: Stepped) -> Decision:
    """Return what the guard's word on a step means, which every scheduler obeys.

    A trial that is ended is evaluated first, where its policy allows it, so that it is known what it came to. A trial
    that is about to cross the KL budget is evaluated, too, since its best checkpoint may be this one.
    """
    reason = stepped.reason
    if reason is None:
        return Decision(Action.EVALUATE) if stepped.is_near_budget and not is_evaluated(stepped) else NOTHING_DECIDED
    if not is_evaluated(stepped):
        return Decision(Action.EVALUATE)
    return Decision(Action.STOP, reason)


def is_evaluated(stepped: Stepped) -> bool:
    """Return whether a report has its evaluation, or can have none."""
    return stepped.report.is_evaluation or stepped.is_again


def answer(decision: Decision, wanted: Wanted | None, *, has_to_rest: bool) -> Answer:
    """Return a worker's answer to a report. A rule's word comes first, then a person's, then the strategy's own.

    Args:
        decision: The scheduler's.
        wanted: What an order wants of the trial.
        has_to_rest: Whether no trial is to run now.
    """
    if decision.action is Action.EVALUATE:
        return Answer.EVALUATE
    if decision.action is Action.STOP or wanted is Wanted.STOP:
        return Answer.STOP
    if decision.action is Action.PAUSE or wanted is Wanted.PAUSE or has_to_rest:
        return Answer.LEAVE
    return Answer.GO_ON

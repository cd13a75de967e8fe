"""Decide what to do with a trial after a report; the controller carries it out."""

from dataclasses import dataclass

from ppo_core.report import NextMove
from tuner.engine.protocol import Stepped
from tuner.study.status import Reason, Wanted


@dataclass(frozen=True)
class Decision:
    """The next move for a trial after a report, with its reason."""

    action: NextMove = NextMove.GO_ON
    reason: Reason | None = None
    """The rule that stops the trial."""


NOTHING_DECIDED = Decision()


def guarded(stepped: Stepped) -> Decision:
    """Turn the guard's verdict into an action.

    A trial to be ended is evaluated first if possible, so that its result is known; so is one about to cross the KL
    budget, since its best checkpoint may be this one.
    """
    reason = stepped.reason
    if reason is None:
        return Decision(NextMove.EVALUATE) if stepped.is_near_budget and not _is_evaluated(stepped) else NOTHING_DECIDED
    if not _is_evaluated(stepped):
        return Decision(NextMove.EVALUATE)
    return Decision(NextMove.STOP, reason)


def _is_evaluated(stepped: Stepped) -> bool:
    """Return True if a report has its evaluation, or cannot have one."""
    return stepped.report.is_evaluation or stepped.is_again


def answer(decision: Decision, wanted: Wanted | None, *, must_leave: bool) -> NextMove:
    """Return a worker's answer to a report: rules come first, then orders; `must_leave`: no trial is to run now."""
    if decision.action is NextMove.EVALUATE:
        return NextMove.EVALUATE
    if decision.action is NextMove.STOP or wanted is Wanted.STOP:
        return NextMove.STOP
    if wanted is Wanted.PAUSE or must_leave:
        return NextMove.LEAVE
    return NextMove.GO_ON

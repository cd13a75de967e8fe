"""Decide what to do with a trial after a report; the controller carries it out."""

from dataclasses import dataclass

from ppo_core.report import NextMove
from tuner.engine.protocol import Stepped
from tuner.judge.scoring import Evaluations
from tuner.search.choose import own_rung
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Reason, Wanted


@dataclass(frozen=True)
class Decision:
    """The next move for a trial after a report, with its reason."""

    action: NextMove = NextMove.GO_ON
    reason: Reason | None = None
    """The rule that pauses or stops the trial."""


NOTHING_DECIDED = Decision()


def judge(spec: StudySpec, trial: TrialRow, stepped: Stepped) -> Decision:
    """Return the next move for a trial after its report; `trial` is its row.

    The guard comes first. A trial that reached its rung is evaluated, and paused there.
    """
    decision, rung = guarded(stepped), own_rung(spec, trial)
    if decision.action is not NextMove.GO_ON or rung is None or stepped.report.episode < rung:
        return decision
    if not _is_evaluated(stepped):
        return Decision(NextMove.EVALUATE)
    return Decision(NextMove.LEAVE, paused_at(stepped.report.episode))


def why_paused(spec: StudySpec, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
    """Return why the strategy pauses a trial that a kill left running, or None if it was not at its rung.

    Its last report was then its evaluation at the rung.
    """
    rung = own_rung(spec, trial)
    is_there = rung is not None and trial.episodes >= rung
    is_evaluated = bool(evaluations) and evaluations[-1]["episode"] == trial.episodes
    return paused_at(trial.episodes) if is_there and is_evaluated else None


def paused_at(episode: int) -> Reason:
    """Return the reason of a trial that is paused at its rung."""
    return Reason("early_cut", f"paused at episode {episode}")


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
    """Return a worker's answer to a report: rules come first, then orders, then the strategy.

    Args:
        decision: Of `judge`.
        wanted: What an order wants of the trial.
        must_leave: True if no trial is to run now.
    """
    if decision.action is NextMove.EVALUATE:
        return NextMove.EVALUATE
    if decision.action is NextMove.STOP or wanted is Wanted.STOP:
        return NextMove.STOP
    if decision.action is NextMove.LEAVE or wanted is Wanted.PAUSE or must_leave:
        return NextMove.LEAVE
    return NextMove.GO_ON

"""What is done with a trial after a report: decisions over a row and a report, which the controller carries out."""

from dataclasses import dataclass
from enum import Enum

from tuner.protocol import Answer, Stepped
from tuner.scoring import Evaluations
from tuner.search.choose import own_rung
from tuner.spec import StudySpec
from tuner.status import Reason, Wanted
from tuner.store import TrialRow


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


def judge(spec: StudySpec, trial: TrialRow, stepped: Stepped) -> Decision:
    """Return what is done with a trial after its report; `trial` is as it was when it was started.

    The guard comes first. A trial that has come to its rung is evaluated, and paused there.
    """
    decision, rung = guarded(stepped), own_rung(spec, trial)
    if decision.action is not Action.GO_ON or rung is None or stepped.report.episode < rung:
        return decision
    if not _is_evaluated(stepped):
        return Decision(Action.EVALUATE)
    return Decision(Action.PAUSE, paused_at(stepped.report.episode))


def why_paused(spec: StudySpec, trial: TrialRow, evaluations: Evaluations) -> Reason | None:
    """Return why the strategy pauses a trial that a kill left running; None: it had not come to where it does.

    The last thing that it did was then to be evaluated at its rung.
    """
    rung = own_rung(spec, trial)
    is_there = rung is not None and trial.episodes >= rung
    is_evaluated = bool(evaluations) and evaluations[-1]["episode"] == trial.episodes
    return paused_at(trial.episodes) if is_there and is_evaluated else None


def paused_at(episode: int) -> Reason:
    """Return the reason of a trial that is paused at its rung."""
    return Reason("early_cut", f"paused at episode {episode}")


def guarded(stepped: Stepped) -> Decision:
    """Return what follows from the guard's verdict on a step.

    A trial that is ended is evaluated first, where its policy allows it, so that it is known what it came to. A trial
    that is about to cross the KL budget is evaluated, too, since its best checkpoint may be this one.
    """
    reason = stepped.reason
    if reason is None:
        return Decision(Action.EVALUATE) if stepped.is_near_budget and not _is_evaluated(stepped) else NOTHING_DECIDED
    if not _is_evaluated(stepped):
        return Decision(Action.EVALUATE)
    return Decision(Action.STOP, reason)


def _is_evaluated(stepped: Stepped) -> bool:
    """Return whether a report has its evaluation, or can have none."""
    return stepped.report.is_evaluation or stepped.is_again


def answer(decision: Decision, wanted: Wanted | None, *, has_to_rest: bool) -> Answer:
    """Return a worker's answer to a report: a rule comes first, then what a person ordered, then the strategy.

    Args:
        decision: Of `judge`.
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

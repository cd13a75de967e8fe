"""Answers to a trial's report, and ends and pauses of trials: in the store, in its log and as an event."""

from dataclasses import replace
from typing import NamedTuple

from ppo_core.report import NextMove
from tuner.control.events import Emit, TrialEnded, TrialSetAside
from tuner.control.session import OpenStudy
from tuner.control.trial_files import TrialFiles
from tuner.engine.protocol import Stepped
from tuner.files import trial_log
from tuner.judge.scoring import so_far, tally
from tuner.search.choose import runnable
from tuner.store import Outcome, TrialRow
from tuner.study.status import STOPPED_BY_PERSON, Reason, Status, Wanted


class TrialEnds:
    """Records ends and pauses of the trials of a study that this process holds."""

    def __init__(self, study: OpenStudy, files: TrialFiles, emit: Emit) -> None:
        self._study, self._files, self._emit = study, files, emit

    def settle_interrupted(self) -> None:
        """Queue the trials that the last run left unfinished, or apply their pending orders."""
        study = self._study
        for row in runnable(study.spec, study.rows):
            if row.wanted is not None:
                self.apply_orders(row)
            elif row.status is Status.RUNNING:
                study.store.set_aside(study.lease, row.id, so_far(study.store, row, study.spec))
                study.refresh(row.number)

    def apply_orders(self, row: TrialRow) -> None:
        """Apply pending orders to a trial without a worker: it ends, is paused, or waits for another worker."""
        study = self._study
        standing = so_far(study.store, row, study.spec)
        if not study.store.set_aside(study.lease, row.id, standing):
            self.finish(row, replace(standing, status=Status.STOPPED, reason=STOPPED_BY_PERSON))
            return
        row = study.refresh(row.number)
        self.note(row.number, f"left its worker; the trial is {row.status}")
        self._emit(TrialSetAside(row, tally(study.rows, study.spec)))

    def finish(self, row: TrialRow, outcome: Outcome) -> None:
        study = self._study
        study.store.finish_trial(study.lease, row.id, outcome)
        why = "" if outcome.reason is None else f": {outcome.reason.message}"
        self.note(row.number, f"the trial is {outcome.status}{why}")
        row = study.refresh(row.number)
        self._files.tidy()
        self.emit_end(row)

    def emit_end(self, row: TrialRow) -> None:
        """Report a trial that has reached a final status."""
        self._emit(TrialEnded(row, tally(self._study.rows, self._study.spec)))

    def note(self, number: int, line: str) -> None:
        trial_log.note(self._study.trial_folder(number), line)


class Decision(NamedTuple):
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

"""The controller's loop: start trials, record steps, carry out orders, until the study is finished or stopped.

`tuner.control.run` opens the study around it.
"""

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import assert_never

from ppo_core.cli.stop_request import StopRequest
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.rank_zero import NextMove
from ppo_core.errors import PPOTunerError, StudyError, TaskError, is_outage
from ppo_core.output import report_line
from tuner.confirm.held_out_readings import due_readings, reading
from tuner.confirm.plan import Plan, missing
from tuner.control import forks, retry
from tuner.control.events import (
    ONLY_PAUSED,
    ORDERED,
    TIME_LIMIT,
    Emit,
    Limits,
    OrderDecided,
    Preparing,
    ReadingOnTest,
    StudyPaused,
    StudyStopping,
    StudyWarned,
    TrialEnded,
    TrialSetAside,
    TrialStarted,
    TrialStepped,
)
from tuner.control.orders import OrderDesk
from tuner.control.retry import FIRST_OUTAGE_WAIT, LONGEST_OUTAGE_WAIT, TrialWatch
from tuner.control.session import OpenStudy
from tuner.engine.base import Engine, JobId
from tuner.engine.protocol import (
    Ended,
    Entered,
    Failed,
    Left,
    Lost,
    Message,
    NoRoom,
    Phase,
    Prepared,
    PrepareTask,
    Progress,
    Read,
    ReadTest,
    Stepped,
    TrialSpec,
)
from tuner.files import trial_log
from tuner.files.disk import most_kept
from tuner.files.trial_files import TrialFiles, kept_at_rung
from tuner.judge.next_move import NOTHING_DECIDED, Decision, answer, judge, why_paused
from tuner.judge.scoring import (
    EVALUATION_METRICS,
    Evaluations,
    evaluations_of,
    extent,
    judged,
    outcome,
    rung_score,
    so_far,
)
from tuner.search.choose import (
    New,
    Promote,
    Resume,
    choose,
    is_finished,
    left_out,
    paused,
    promotable,
    promotions,
    runnable,
)
from tuner.search.propose import new_trial
from tuner.search.prune import why_pruned
from tuner.store import Order, OrderState, Outcome, TrialRow
from tuner.study import folder as study_folder
from tuner.study.spec import PPO_TRAINER
from tuner.study.status import OUTAGE, STOPPED_BY_PERSON, Reason, Status, Wanted

NO_PLACE = "no place is left for a trial: the workers' processes cannot be killed"
RENEW_SECONDS = 5.0
"""Interval between renewals of the lease."""
ORDER_SECONDS = 1.0
"""Longest wait for a worker, so that orders are answered in time."""
LOOK_SECONDS = 0.25
"""Shortest interval between looks for orders while workers report."""


@dataclass
class _Running:
    """A trial on a worker."""

    row: TrialRow
    total_episodes: int
    iterations: int
    """Iterations of the whole trial."""
    decision: Decision = NOTHING_DECIDED
    """On its last report."""
    wanted: Wanted | None = None
    """The order that its worker has received."""
    has_saved: bool = False
    """True once this attempt has saved a checkpoint."""


class TrialLoop:
    """One run of a study on an engine."""

    def __init__(
        self,
        study: OpenStudy,
        files: TrialFiles,
        engine: Engine,
        stop: StopRequest,
        limits: Limits,
        emit: Emit,
        plan: Plan | None = None,
    ) -> None:
        self._plan = plan
        self._study, self._files, self._engine = study, files, engine
        self._stop, self._limits, self._emit = stop, limits, emit
        self._desk = OrderDesk(study, files, limits, lambda number: number in self._taken(), self._after)
        self._running: dict[int, _Running] = {}
        self._starting: set[int] = set()
        self._room = TrialWatch(self._warn, "there is disk space again")
        self._outages = TrialWatch(
            self._warn, "it goes on", first_wait=FIRST_OUTAGE_WAIT, longest_wait=LONGEST_OUTAGE_WAIT
        )
        self._reached: dict[int, int] = {}
        """Episode of each trial at its last outage."""
        self._reading: dict[int, ReadTest] = {}
        self._tried: set[tuple[int, int]] = set()
        """(trial, step) of readings on the test prompts tried in this run."""
        self._verdict: str | None = None
        self._stopping: str | None = None
        self._renewed_at = time.monotonic()
        self._looked_at = time.monotonic()
        self._is_idle = False
        self._told = 0
        """Number of the engine's notices already reported."""

    @property
    def is_finished(self) -> bool:
        return is_finished(self._study.spec, self._study.rows)

    def run(self) -> str | None:
        """Run the study; return None if it finished, or why it stopped.

        Raises:
            StudyError: trial after trial failed for the same cause.
            TaskError: the task could not be prepared.
        """
        self._set_interrupted_aside()
        self._obey()
        if self._prepare_task():
            while self._start_due() or self._obey():
                for job, message in self._messages():
                    assert job is not None
                    self._handle(job, message)
                self._answer_without_room()
        self._finish_files()
        if self._verdict is not None:
            name = self._study.row.name
            raise StudyError(
                f"{self._verdict}; fix the cause, then run: ppo-tuner retry {name}, and run the study again"
            )
        return self._stopping

    def _warn(self, line: str) -> None:
        self._emit(StudyWarned(line))

    def _note(self, number: int, line: str) -> None:
        """Write a line to a trial's log."""
        trial_log.note(self._study.trial_folder(number), line)

    # Waiting

    def _messages(self) -> Iterator[tuple[JobId, Message]]:
        """Yield the workers' messages of one wait; then do other due work, such as orders."""
        for job, message in self._engine.events(self._longest_wait()):
            yield job, message
            self._stay_alive()  # the end of a worker that hardly dies takes a while
        self._files.work.collect()
        self._stay_alive()
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._obey()

    def _longest_wait(self) -> float:
        deadline = self._limits.deadline
        if deadline is None or self._stopping is not None:
            return ORDER_SECONDS
        return min(ORDER_SECONDS, max(0.0, deadline - time.monotonic()))

    def _finish_files(self) -> None:
        """Finish all file work, which ends with deleting checkpoints that are no longer kept."""
        self._files.tidy(self._at_rung())
        while self._files.work.is_busy:
            list(self._engine.events(ORDER_SECONDS))  # no worker is busy; it ends when a piece of work is done
            self._files.work.collect()
            self._stay_alive()

    def tell_notices(self) -> None:
        """Report each of the engine's notices once."""
        for line in self._engine.notices[self._told :]:
            self._told += 1
            self._warn(line)

    def _stay_alive(self) -> None:
        self.tell_notices()
        if time.monotonic() - self._renewed_at >= RENEW_SECONDS:
            self._study.store.renew(self._study.lease)
            self._renewed_at = time.monotonic()

    def _is_stopping(self) -> bool:
        """Return True if the study is stopping: no new trials, running ones leave. Reported once."""
        if self._stopping is None:
            self._stopping = self._why_stop()
            if self._stopping is not None and self._running and not self._engine.is_exhausted:
                self._study.store.show_stopping(self._study.lease)
                self._emit(StudyStopping(len(self._running), self._stopping))
        return self._stopping is not None

    def _why_stop(self) -> str | None:
        limits = self._limits
        if limits.deadline is not None and time.monotonic() >= limits.deadline:
            return self._verdict or self._stop.why or f"{TIME_LIMIT} of {limits.timeout:g} s has passed"
        exhausted = NO_PLACE if self._engine.is_exhausted else None
        waited = self._room.why_give_up or self._outages.why_give_up
        return self._verdict or self._stop.why or waited or exhausted

    # The task

    def _prepare_task(self) -> bool:
        """Have a worker prepare the task; return False if a stop was asked for meanwhile."""
        spec = self._study.spec
        is_known = spec.trainer == PPO_TRAINER and not spec.shards_weights  # else nobody can tell what it takes
        configs = tuple(config.to_dict() for config in spec.configs_of_one_process().values()) if is_known else ()
        self._engine.start(PrepareTask(spec.task, self._study.folder, configs, spec.device, most_kept(spec)))
        while not self._is_stopping():
            for _, message in self._messages():
                if isinstance(message, Prepared):
                    return True
                if isinstance(message, Progress):
                    self._emit(Preparing(message.what, message.share))
                else:
                    raise self._preparation_error(message)
        return False

    def _preparation_error(self, message: Message) -> PPOTunerError:
        what = f'task "{self._study.spec.task}" could not be prepared'
        if not isinstance(message, Failed):
            assert isinstance(message, Lost)
            return TaskError(f"{what}: worker lost, {message.how}")
        if message.is_for_user:
            return TaskError(message.message)
        where = study_folder.write_error(self._study.folder, message.traceback)
        return TaskError(f"{what}: {retry.with_traceback(message.message, where)}")

    # Orders

    def _obey(self) -> bool:
        """Decide pending orders and apply them; return True if there were any."""
        self._looked_at = time.monotonic()
        waiting = self._study.store.orders(self._study.row, OrderState.WAITING)
        orders = [order for order in waiting if not self._desk.is_under_way(order)]
        for order in orders:
            self._after(self._desk.decide(order))
        return bool(orders)

    def _after(self, order: Order) -> None:
        """Apply what an order changed and report it, once it is decided."""
        if order.state is OrderState.DONE:
            self._act_on(order)
        if order.state is not OrderState.WAITING:
            self._emit(OrderDecided(order))

    def _act_on(self, order: Order) -> None:
        for row in self._desk.take_changed():
            if row.status.is_final:
                self._emit_end(row)
        if order.kind == "set":
            self._engine.resize(self._study.row.workers or 1)
        if order.kind == "stop" and order.trial is None and self._stop.why is None:
            self._stop.why = ORDERED

    # Starting

    def _set_interrupted_aside(self) -> None:
        """Queue the trials that the last run left unfinished, or apply their pending orders."""
        study = self._study
        for row in runnable(study.spec, study.rows):
            evaluations = evaluations_of(study.store, row)
            if row.wanted is not None:
                self._reconcile(row)
            elif (reason := why_paused(study.spec, row, evaluations)) is not None:
                self._pause_at_rung(row, evaluations, reason)
            elif row.status is Status.RUNNING:
                study.store.set_aside(study.lease, row.id, so_far(study.store, row, study.spec))
                study.refresh(row.number)
        left = left_out(study.spec, study.rows)
        if left:
            numbers = ", ".join(str(row.number) for row in left)
            self._warn(f"trial {numbers} is left as it is: the total is now {study.spec.trials}")

    def _start_due(self) -> bool:
        """Start due trials on free workers; return True if there is anything to wait for."""
        is_paused = self._study.row.paused_at is not None
        if not self._is_stopping():
            self._add_confirming()
        is_held = self._has_outage() and not is_paused
        if not (is_paused or is_held):
            self._start_trials()
            self._start_readings()
        if self._running or (self._reading and not self._is_stopping()):
            self._is_idle = False
            return True
        if self._starting or self._files.work.is_busy:  # a fork's checkpoint may be copied, and add a trial
            return True
        if is_held and not self._is_stopping():
            return True
        if self._is_stopping() or not is_paused or (self.is_finished and not self._due_readings()):
            self._note_paused_trials()
            return False
        if not self._is_idle:
            self._is_idle = True
            self._emit(StudyPaused(self._study.row.name))
        return True

    def _start_trials(self) -> None:
        while self._engine.free > len(self._starting) and not self._is_stopping():
            chosen = choose(self._study.spec, self._study.rows, self._taken())
            if chosen is None:
                break
            row = self._row_of(chosen)
            if row.wanted is None:
                self._start(row)
            else:
                self._reconcile(row)

    def _row_of(self, chosen: Resume | Promote | New) -> TrialRow:
        """Return the chosen trial's row, recording a new one or promoting one paused at its rung."""
        study = self._study
        match chosen:
            case New():
                trial = new_trial(study.spec, study.rows, chosen, self._limits.threads)
                return study.put(study.store.add_trial(study.lease, trial))
            case Promote(number):
                study.store.promote(study.lease, study.rows[number].id)
                return study.refresh(number)
            case Resume(number):
                return study.rows[number]

    def _at_rung(self) -> Collection[int]:
        """Return the numbers of the screened trials that keep their checkpoints."""
        spec, rows = self._study.spec, self._study.rows
        return kept_at_rung([row.number for row in promotable(spec, rows)], promotions(spec, rows))

    def _note_paused_trials(self) -> None:
        """If only paused trials remain, stop with that as the reason."""
        found = paused(self._study.spec, self._study.rows)
        if found and self._stopping is None:
            numbers = ", ".join(str(row.number) for row in found)
            self._stopping = f"{ONLY_PAUSED} ({numbers})"

    def _emit_end(self, row: TrialRow) -> None:
        self._emit(TrialEnded(row, extent(self._study.rows, self._study.spec)))

    def _reconcile(self, row: TrialRow) -> None:
        """Apply pending orders to a trial without a worker: it ends, is paused, or waits for another one."""
        study = self._study
        standing = so_far(study.store, row, study.spec)
        if not study.store.set_aside(study.lease, row.id, standing):
            self._conclude(row, replace(standing, status=Status.STOPPED, reason=STOPPED_BY_PERSON))
            return
        row = study.refresh(row.number)
        self._note(row.number, f"left its worker; the trial is {row.status}")
        self._emit(TrialSetAside(row, extent(study.rows, study.spec)))

    def _taken(self) -> Collection[int]:
        """Return the numbers of trials that are running, being read, or about to start."""
        return self._running.keys() | self._reading.keys() | self._starting

    def _start(self, row: TrialRow) -> None:
        """Look up a trial's last checkpoint in the background; the trial starts when that is done."""
        self._starting.add(row.number)
        self._files.prepare_resume(row, partial(self._begin, row.number))

    def _begin(self, number: int, found: Future[tuple[Path, int] | None]) -> None:
        """Start a trial from its last checkpoint, if any, unless an order or a stop forbids it."""
        self._starting.discard(number)
        error = found.exception()
        if error is not None and is_outage(error):
            self._wait_out(number, str(error))
            return
        resume_from, step = found.result() or (None, None)
        study, row = self._study, self._study.refresh(number)
        if row.wanted is not None or study.row.paused_at is not None:
            self._reconcile(row)
        elif not self._is_stopping():
            self._run_from(row, resume_from, step)

    def _run_from(self, row: TrialRow, resume_from: Path | None, step: int | None) -> None:
        """Give a trial to a worker, from the checkpoint `resume_from` of `step`, or from the beginning if None."""
        study = self._study
        if step is None and row.episodes > 0:
            text = f"trial {row.number} restarts: it has no checkpoint left, and {row.episodes} episodes are lost"
            self._note(row.number, text)
            self._warn(text)
        self._outages.answered(row.number)
        row = study.put(study.store.begin_attempt(study.lease, row, step))
        config = PPOConfig.from_dict(row.config)
        self._running[row.number] = _Running(row, config.whole_episodes(), config.num_iterations())
        self._engine.start(
            TrialSpec(
                number=row.number,
                config=row.config,
                task=study.spec.task,
                trainer=study.spec.trainer,
                device=study.spec.device,
                threads=row.threads,
                folder=study.trial_folder(row.number),
                guard=study.spec.guard,
                kl_budget=study.spec.kl_budget,
                resume_from=resume_from,
                checkpoint_seconds=study.spec.workers.checkpoint_seconds,
                fork_step=row.fork_step,
                stages=forks.stages(study.rows, row),
                ranks=study.spec.gpus_per_trial,
            )
        )
        self._emit(TrialStarted(row, step))

    # Test prompts

    def _start_readings(self) -> None:
        for job in [] if self._is_stopping() else self._due_readings():
            if self._engine.free > len(self._starting) and job.number not in self._taken():
                self._tried.add((job.number, job.step))
                self._reading[job.number] = job
                self._emit(ReadingOnTest(job.number, job.step))
                self._engine.start(job)

    def _due_readings(self) -> list[ReadTest]:
        """Return the due readings on the test prompts, each tried once in a run."""
        study = self._study
        jobs = []
        if self._plan is not None:  # what the SFT policy comes to is the baseline of all runs that confirm
            jobs = [reading(study, study.rows[0], 0)]
        elif self.is_finished and not self._files.work.is_busy:
            jobs = due_readings(study)
        return [job for job in jobs if (job.number, job.step) not in self._tried]

    def _add_confirming(self) -> None:
        """Add the confirming runs that the study lacks, once the SFT policy was evaluated.

        Raises:
            StudyError: the task has no test prompts, or they could not be evaluated.
        """
        study = self._study
        if self._plan is None:
            return
        first = study.rows[0]
        found = study.store.on_test(first.id, 0)
        if found is None and (first.number in self._reading or (first.number, 0) not in self._tried):
            return
        why_not = "the SFT policy could not be evaluated on the test prompts" if found is None else found.why_not
        if why_not is not None:
            raise StudyError(f'study "{study.spec.name}" cannot be confirmed: {why_not}')
        for trial in missing(study.rows, study.spec, self._plan):
            study.put(study.store.add_trial(study.lease, trial))
        self._plan = None

    def _note_reading(self, job: ReadTest, message: Message) -> None:
        study = self._study
        if isinstance(message, Read):
            row = study.rows[job.number]
            study.store.add_test_reading(study.lease, row.id, job.step, message.reading, message.why_not)
            return
        why = message.message if isinstance(message, Failed) else str(message)
        self._warn(f"trial {job.number} could not be evaluated on the test prompts: {why}")

    # What workers say

    def _handle(self, number: int, message: Message) -> None:
        if number in self._reading:
            self._note_reading(self._reading.pop(number), message)
            return
        if isinstance(message, Stepped | Ended):
            self._room.found(number)
        elif not isinstance(message, NoRoom | Entered):
            self._room.forget(number)
        is_beyond = isinstance(message, Stepped) and message.report.episode > self._reached.get(number, -1)
        if is_beyond or isinstance(message, Ended | Left):
            self._outages.found(number)
        elif isinstance(message, Lost) or (isinstance(message, Failed) and not message.is_outage):
            self._outages.forget(number)
        match message:
            case Entered():  # for the engine's watch over the worker, too
                self._running[number].has_saved |= message.phase is Phase.STEPPING
            case Stepped():
                self._record(number, message)
            case NoRoom():
                self._note(number, message.message)
                self._room.lacks(number, message.message)
            case Ended():
                self._end(number)
            case Left():
                self._leave(number)
            case Failed():
                where = study_folder.write_error(self._study.trial_folder(number), message.traceback)
                if message.is_outage:
                    self._wait_out(number, message.message)
                elif message.is_for_user:
                    self._fail(number, partial(retry.error_reason, message, where))
                else:
                    self._running[number].has_saved &= not message.out_of_memory  # the next attempt has no more of it
                    self._retry(number, message.message, partial(retry.error_reason, message, where))
            case Lost():
                reason = partial(retry.lost_reason, message.how, self._running[number].row.retries)
                self._retry(number, f"worker lost: {message.how}", reason)
            case Progress() | Prepared() | Read():
                raise AssertionError(message)
            case _:
                assert_never(message)

    def _record(self, number: int, message: Stepped) -> None:
        """Store a step, then answer: a worker saves only steps that the store holds."""
        running, study = self._running[number], self._study
        decision = judge(study.spec, running.row, message)
        wanted = study.store.add_step(study.lease, running.row.id, message.report, message.seconds)
        if decision.action is NextMove.GO_ON and message.report.is_evaluation:
            decision = self._pruned(number, message.report.episode) or decision
        running.decision = decision
        running.wanted = None if decision.action in (NextMove.STOP, NextMove.EVALUATE) else wanted
        if decision.reason is not None:
            self._note(number, f"{decision.reason.rule}: {decision.reason.message}")
        if message.report.is_evaluation:
            self._note(number, report_line(message.report, running.iterations))
        self._engine.answer(number, answer(decision, running.wanted, must_leave=self._must_leave()))
        if decision.action is not NextMove.EVALUATE:  # it is reported with its evaluation
            self._emit(TrialStepped(number, message.report, running.iterations, decision.reason))

    def _pruned(self, number: int, episode: int) -> Decision | None:
        """Return the pruner's decision to end a trial after its evaluation, or None."""
        study = self._study
        if study.spec.pruner is None or episode >= self._running[number].total_episodes:
            return None
        ids = [row.id for row in study.rows if row.teaches]
        evaluations = study.store.steps(ids, EVALUATION_METRICS, evaluations_only=True)
        reason = why_pruned(study.spec, study.rows, evaluations, number)
        return None if reason is None else Decision(NextMove.STOP, reason)

    def _must_leave(self) -> bool:
        """Return True if all trials must leave their workers."""
        return self._study.row.paused_at is not None or self._is_stopping()

    def _answer_without_room(self) -> None:
        """Let trials that found no disk space for a checkpoint retry when due, or leave if they must."""
        for number in self._room.waiting:
            if self._must_leave() or self._study.rows[number].wanted is not None:
                self._room.answered(number)
                self._engine.answer(number, NextMove.STOP)
            elif self._room.is_due(number):
                self._room.answered(number)
                self._engine.answer(number, NextMove.GO_ON)

    def _leave(self, number: int) -> None:
        """Apply pending orders to a trial whose worker left it; they may have changed meanwhile.

        Without an order, and unless the study is paused, it resumes from its last checkpoint in this run or the next.
        """
        decision = self._running.pop(number).decision
        row, study = self._study.refresh(number), self._study
        if decision.action is NextMove.LEAVE and row.wanted is None:
            self._pause_at_rung(row, evaluations_of(study.store, row), decision.reason)
        elif row.wanted is not None or study.row.paused_at is not None:
            self._reconcile(row)

    def _pause_at_rung(self, row: TrialRow, evaluations: Evaluations, reason: Reason | None) -> None:
        """Record that the strategy paused a trial, and its screening score."""
        study = self._study
        standing = outcome(evaluations, study.spec, Status.PAUSED, reason)
        score = rung_score(evaluations, study.spec.kl_budget, study.spec.total_episodes)
        study.store.pause_at_rung(study.lease, row, standing, score)
        self._note(row.number, "the strategy paused the trial")
        row = study.refresh(row.number)
        self._files.settle(row, self._at_rung())
        self._emit(TrialSetAside(row, extent(study.rows, study.spec)))

    def _end(self, number: int) -> None:
        """Judge a trial that completed or was pruned; one that an order ended leaves instead."""
        running, study = self._running[number], self._study
        is_stopped = running.decision.action is NextMove.STOP
        if not is_stopped and running.wanted is Wanted.STOP:
            self._leave(number)
            return
        status, reason = (Status.PRUNED, running.decision.reason) if is_stopped else (Status.COMPLETED, None)
        self._finish(number, judged(study.store, running.row, study.spec, status, reason))

    def _wait_out(self, number: int, what: str) -> None:
        """Queue a trial that an outage ended, to resume later; until then no trial starts."""
        study = self._study
        self._running.pop(number, None)
        if self._is_left_to_next_run(number, what):
            return
        row = study.refresh(number)
        self._reached[number] = row.episodes
        study.store.set_aside(study.lease, row.id, so_far(study.store, row, study.spec), Reason(OUTAGE, what))
        if study.refresh(number).status is Status.WAITING:  # no order wants something else of it
            self._outages.lacks(number, what)

    def _is_left_to_next_run(self, number: int, what: str) -> bool:
        """Note what interrupted a trial, and return True if this run is stopping, so that the next one resumes it."""
        self._note(number, what)
        if self._is_stopping():
            self._warn(f"trial {number}: {what}; the next run of the study resumes it")
            return True
        return False

    def _has_outage(self) -> bool:
        """Return True if a trial waits for an outage to end."""
        for number in self._outages.waiting:
            if self._study.rows[number].status is not Status.WAITING:  # by an order
                self._outages.forget(number)
        return not all(map(self._outages.is_due, self._outages.waiting))

    def _retry(self, number: int, what: str, reason: Callable[[str], Reason]) -> None:
        """Resume a trial from its checkpoint in another worker; after too many attempts it fails."""
        if self._is_left_to_next_run(number, what):
            del self._running[number]
            return
        running = self._running[number]
        row, retries = running.row, 0 if running.has_saved else running.row.retries
        if retries >= retry.RETRIES:
            self._fail(number, reason)
            return
        self._study.store.set_retries(self._study.lease, row.id, retries + 1)
        which = f"retry {retries + 1} of {retry.RETRIES}"
        self._warn(f"trial {number}: {what}; resuming from its last checkpoint ({which})")
        del self._running[number]
        self._study.refresh(number)

    def _fail(self, number: int, reason: Callable[[str], Reason]) -> None:
        """Record that a trial failed, with the reason derived from the end of its log."""
        log = trial_log.tail(self._study.trial_folder(number))
        self._finish(number, Outcome(Status.FAILED, reason(log)))

    def _finish(self, number: int, outcome: Outcome) -> None:
        self._conclude(self._running.pop(number).row, outcome)

    def _conclude(self, trial: TrialRow, outcome: Outcome) -> None:
        study = self._study
        study.store.finish_trial(study.lease, trial.id, outcome)
        why = "" if outcome.reason is None else f": {outcome.reason.message}"
        self._note(trial.number, f"the trial is {outcome.status}{why}")
        row = study.refresh(trial.number)
        self._files.settle(row, self._at_rung())
        if row.status is Status.FAILED:
            rows = study.store.trials(study.row)  # how far the others are by now
            self._verdict = self._verdict or retry.failing(rows, row.number)
        self._emit_end(row)

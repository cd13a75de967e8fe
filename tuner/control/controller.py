"""The controller's loop: start trials, record steps, carry out orders, until the study is finished or stopped.

`tuner.control.run` opens the study around it.
"""

import math
import time
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ppo_core.cli.command_line import StopRequest
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import StudyError, TaskError, is_outage
from ppo_core.output import has_much_rounding, report_line, rounding_line
from ppo_core.report import NextMove
from tuner.confirm.plan import Plan
from tuner.control import events, retry
from tuner.control.held_out_readings import HeldOutReadings
from tuner.control.needs import configs_of_one_process, extreme_configs, most_kept, shards_weights
from tuner.control.orders import OrderDesk
from tuner.control.retry import OutageWatch
from tuner.control.session import OpenStudy, accept
from tuner.control.trial_ends import NOTHING_DECIDED, Decision, TrialEnds, answer, guarded
from tuner.control.trial_files import TrialFiles
from tuner.engine import protocol
from tuner.engine.base import Engine, JobId
from tuner.files import trial_log
from tuner.judge import forks
from tuner.judge.scoring import EVALUATION_METRICS, judged, so_far, tally
from tuner.search.choose import choose, is_finished, left_out, paused
from tuner.search.propose import new_trial
from tuner.search.prune import Replay, why_pruned
from tuner.store import Order, OrderState, Outcome, TrialRow, command
from tuner.study.spec import PPO_TRAINER
from tuner.study.status import OUTAGE, Reason, Status, Wanted

ORDERED = "stopped by an order"
NO_PLACE = "no place is left for a trial: the workers' processes cannot be killed"
RENEW_SECONDS = 5.0  # interval between renewals of the lease
ORDER_SECONDS = 1.0  # longest wait for a worker, so that orders are answered in time


@dataclass
class _Running:
    config: PPOConfig
    decision: Decision = NOTHING_DECIDED  # on its last report
    wanted: Wanted | None = None  # the order that its worker has received
    has_saved: bool = False


class TrialLoop:
    """One run of a study on an engine."""

    def __init__(
        self,
        study: OpenStudy,
        files: TrialFiles,
        engine: Engine,
        stop: StopRequest,
        limits: events.Limits,
        emit: events.Emit,
        plan: Plan | None = None,
    ) -> None:
        self._study, self._files, self._engine = study, files, engine
        self._stop, self._limits, self._emit = stop, limits, emit
        self._desk = OrderDesk(study, files, limits, lambda number: number in self._training(), self._on_decided)
        self._ends = TrialEnds(study, files, emit)
        self._readings = HeldOutReadings(study, plan)
        self._replay = Replay()
        self._running: dict[int, _Running] = {}
        self._starting: set[int] = set()  # trials whose checkpoint is being looked up
        self._outages = OutageWatch(self._warn)
        self._verdict: str | None = None
        self._stopping: events.Stop | None = None
        self._renewed_at = time.monotonic()
        self._is_idle = False
        self._has_told_rounding = False

    def run(self) -> events.Stop | None:
        """Run the study; return None if it finished, or why it stopped.

        Raises:
            StudyError: trial after trial failed for the same cause.
            TaskError: the task could not be prepared.
        """
        self._ends.settle_interrupted()
        if left := left_out(self._study.spec, self._study.rows):
            numbers = ", ".join(str(row.number) for row in left)
            self._warn(f"not resumed: trial {numbers}; the study's total is now {self._study.spec.trials}")
        self._obey()
        if self._prepare_task():
            while self._start_due() or self._obey():
                for job, message in self._messages():
                    assert job is not None
                    self._handle(job, message)
        self._files.tidy()
        while self._files.work.is_busy:
            list(self._engine.events(ORDER_SECONDS))  # yields nothing; returns when a piece of work is done
            self._files.work.collect()
            self._stay_alive()
        if self._verdict is not None:
            has_failed = any(row.status is Status.FAILED for row in self._study.rows)
            first = f", then run: {command(['retry', self._study.row.name], self._study.store)}," if has_failed else ""
            raise StudyError(f"{self._verdict}; fix the cause{first} and run the study again")
        return self._stopping

    def _warn(self, line: str) -> None:
        self._emit(events.StudyWarned(line))

    # Waiting

    def _messages(self) -> Iterator[tuple[JobId, protocol.Message]]:
        """Yield the workers' messages of one wait; then do other due work, such as orders."""
        left = math.inf if self._stopping is not None else max(0.0, self._limits.deadline - time.monotonic())
        for job, message in self._engine.events(min(ORDER_SECONDS, left)):
            yield job, message
            self._stay_alive()  # ending a worker may take a while
        self._files.work.collect()
        self._stay_alive()
        self._obey()

    def _stay_alive(self) -> None:
        if time.monotonic() - self._renewed_at >= RENEW_SECONDS:
            self._study.store.renew(self._study.lease)
            self._renewed_at = time.monotonic()

    def _is_stopping(self) -> bool:
        """Return True if the study is stopping: no trial starts, running ones leave. Report that once."""
        if self._stopping is None:
            self._stopping = self._why_stop()
            if self._stopping is not None and self._running and not self._engine.is_exhausted:
                self._study.store.update_study(self._study.lease, stopping_at=time.time())
                self._emit(events.StudyStopping(len(self._running), self._stopping.why))
        return self._stopping is not None

    def _why_stop(self) -> events.Stop | None:
        if self._verdict is None and self._stop.why is not None:
            return events.Stop(self._stop.why, is_deliberate=self._stop.why == ORDERED)
        if self._verdict is None and time.monotonic() >= self._limits.deadline:
            return events.Stop(f"the time limit of {self._limits.timeout:g} s has passed", is_deliberate=True)
        why = self._verdict or self._outages.why_give_up or (NO_PLACE if self._engine.is_exhausted else None)
        return None if why is None else events.Stop(why)

    # The task

    def _prepare_task(self) -> bool:
        """Have a worker prepare the task; return False if a stop was asked for meanwhile."""
        spec = self._study.spec
        is_known = spec.trainer == PPO_TRAINER and not shards_weights(spec)  # else its memory is not known
        configs = tuple(config.to_dict() for config in configs_of_one_process(spec).values()) if is_known else ()
        most = most_kept(spec, max(1, self._engine.free))
        to_come = [config.to_dict() for config in extreme_configs(spec).values()]
        trials = [*(row.config for row in self._study.rows), *to_come]
        value_models = tuple(dict.fromkeys(config.get("value_model_path") for config in trials))
        alone = spec.gpus_per_trial == 1  # a trial's other processes would find its GPU filled
        self._engine.start(
            protocol.PrepareTask(spec.task, self._study.folder, configs, spec.device, most, value_models, alone)
        )
        unprepared = f'task "{spec.task}" could not be prepared'
        while not self._is_stopping():
            for _, message in self._messages():
                match message:
                    case protocol.Prepared(digests):
                        accept(self._study, digests, finished_at=None, workers=self._limits.workers)
                        self._obey()
                        return True
                    case protocol.Progress(what, share):
                        self._emit(events.Preparing(what, share))
                    case protocol.Failed(is_for_user=True):
                        raise TaskError(message.message)
                    case protocol.Failed():
                        log = self._study.folder / trial_log.PREPARATION_NAME
                        raise TaskError(f"{unprepared}: {retry.with_traceback(message.message, log)}")
                    case protocol.Lost(how):
                        raise TaskError(f"{unprepared}: worker lost, {how}")
        return False

    # Orders

    def _obey(self) -> bool:
        orders = self._desk.pending()
        for order in orders:
            self._desk.decide(order)
        return bool(orders)

    def _on_decided(self, order: Order, changed: Sequence[TrialRow]) -> None:
        for row in changed:
            if row.status.is_final:
                self._ends.emit_end(row)
        if order.state is OrderState.DONE:
            if order.kind == "set":
                self._limits.workers = self._study.row.workers or 1
                self._engine.resize(self._limits.workers)
            if order.kind == "stop" and order.trial is None and self._stop.why is None:
                self._stop.why = ORDERED
        self._emit(events.OrderDecided(order, self._study.spec, tally(self._study.rows, self._study.spec)))

    # Starting

    def _start_due(self) -> bool:
        """Start due trials on free workers; return True if there is anything to wait for."""
        is_paused = self._study.row.paused_at is not None
        if not self._is_stopping():
            self._readings.add_confirming_runs()
        has_outage = not is_paused and self._outages.is_waiting(self._study.rows)
        if not (is_paused or has_outage):
            self._start_trials()
            self._start_readings()
        if self._running or (self._readings.running and not self._is_stopping()):
            self._is_idle = False
            return True
        if self._starting or self._files.work.is_busy:  # a fork's checkpoint may be copied, and add a trial
            return True
        if has_outage and not self._is_stopping():
            return True
        if self._is_stopping() or not is_paused or (self._is_finished() and not self._due_readings()):
            left = tuple(row.number for row in paused(self._study.spec, self._study.rows))
            if left and self._stopping is None:
                numbers = ", ".join(map(str, left))
                self._stopping = events.Stop(
                    f"only paused trials are left ({numbers})", is_deliberate=True, paused=left
                )
            return False
        if not self._is_idle:
            self._is_idle = True
            self._emit(events.StudyPaused(command(["resume", self._study.row.name], self._study.store)))
        return True

    def _start_trials(self) -> None:
        study = self._study
        while self._engine.free > len(self._starting) and not self._is_stopping():
            chosen = choose(study.spec, study.rows, self._taken())
            if chosen is None:
                break
            if isinstance(chosen, int):
                row = study.rows[chosen]
            else:
                trial = new_trial(study.spec, study.rows, chosen, self._limits.threads)
                row = study.put(study.store.add_trial(study.lease, trial))
            if row.wanted is not None:
                self._ends.apply_orders(row)
                continue
            self._starting.add(row.number)
            self._files.prepare_resume(row, partial(self._begin, row.number))

    def _taken(self) -> Set[int]:
        """Return the numbers of trials that are running, being read, or about to start."""
        return self._training() | self._readings.running.keys()

    def _training(self) -> Set[int]:
        """Return the numbers of trials that are running, or about to start, and so obey orders at their next report."""
        return self._running.keys() | self._starting

    def _begin(self, number: int, resume_point: Future[tuple[Path, int] | None]) -> None:
        self._starting.discard(number)
        error = resume_point.exception()
        if error is not None and is_outage(error):
            self._wait_out(number, str(error))
            return
        resume_from, step = resume_point.result() or (None, None)
        study, row = self._study, self._study.refresh(number)
        if row.wanted is not None or study.row.paused_at is not None:
            self._ends.apply_orders(row)
        elif not self._is_stopping():
            self._run_from(row, resume_from, step)

    def _run_from(self, row: TrialRow, resume_from: Path | None, step: int | None) -> None:
        study = self._study
        if step is None and row.episodes > 0:
            text = f"trial {row.number} restarts: it has no checkpoint left, and {row.episodes} episodes are lost"
            self._ends.note(row.number, text)
            self._warn(text)
        if resume_from is not None and step is not None and (note := self._files.restore_step(row, resume_from, step)):
            self._warn(note)
        self._outages.retrying(row.number)
        row = study.put(study.store.begin_attempt(study.lease, row, step))
        self._running[row.number] = _Running(PPOConfig.from_dict(row.config))
        self._engine.start(
            protocol.TrialSpec(
                **study.job(row),
                guard=study.spec.guard,
                kl_budget=study.spec.kl_budget,
                first_budget=study.spec.first_budget,
                resume_from=resume_from,
                checkpoint_seconds=study.spec.workers.checkpoint_seconds,
                fork_step=row.fork_step,
                stages=forks.stages(study.rows, row),
            )
        )
        self._emit(events.TrialStarted(row, step))

    def _is_finished(self) -> bool:
        return is_finished(self._study.spec, self._study.rows)

    def _due_readings(self) -> list[protocol.ReadCheckpoint]:
        return self._readings.due(is_searched=self._is_finished() and not self._files.work.is_busy)

    def _start_readings(self) -> None:
        for job in [] if self._is_stopping() else self._due_readings():
            if self._engine.free > len(self._starting) and job.number not in self._taken():
                self._readings.begin(job)
                event = events.ReadingOnTest if job.split == "test" else events.ReadingAgain
                self._emit(event(job.number, job.step))
                self._engine.start(job)

    # What workers report

    def _handle(self, number: int, message: protocol.Message) -> None:
        if number in self._readings.running:
            problem = self._readings.end(number, message)
            if problem is not None:
                self._warn(problem)
            return
        match message:
            case protocol.Entered():
                self._running[number].has_saved |= message.phase is protocol.Phase.STEPPING
            case protocol.Stepped():
                self._outages.stepped(number, message.report.episode)
                self._record(number, message)
            case protocol.Ended():
                self._outages.end(number)
                self._end(number)
            case protocol.Checkpointed():
                self._outages.end(number)
                self._leave(number)
            case protocol.Failed(is_outage=True):
                self._wait_out(number, message.message)
            case protocol.Failed():
                self._outages.end(number, is_well=False)
                folder = self._study.trial_folder(number)
                reason = retry.error_reason(message, trial_log.path_of(folder), trial_log.tail(folder))
                if message.is_for_user:
                    self._finish(number, Outcome(Status.FAILED, reason))
                else:
                    self._running[number].has_saved &= not message.out_of_memory  # the next attempt has no more of it
                    self._retry(number, message.message, reason)
            case protocol.Lost():
                self._outages.end(number, is_well=False)
                log = trial_log.tail(self._study.trial_folder(number))
                reason = retry.lost_reason(message.how, self._study.rows[number].retries, log)
                self._retry(number, f"worker lost: {message.how}", reason)
            case _:
                raise AssertionError(message)

    def _record(self, number: int, message: protocol.Stepped) -> None:
        """Store a step, then answer: a worker saves only steps that the store holds."""
        running, study = self._running[number], self._study
        row, last_step = study.rows[number], running.config.num_iterations()
        decision = guarded(message)
        wanted = study.store.add_step(study.lease, row.id, message.report, message.seconds)
        is_whole = message.report.episode >= running.config.whole_episodes()  # it ends anyway, whatever is ordered
        may_prune = study.spec.pruner is not None and message.report.is_evaluation and not is_whole
        if may_prune and decision.action is NextMove.GO_ON:
            ids = [each.id for each in study.rows if each.informs_sampler]
            evaluations = study.store.steps(ids, EVALUATION_METRICS, evaluations_only=True)
            reason = why_pruned(study.spec, study.rows, evaluations, number, self._replay)
            decision = decision if reason is None else Decision(NextMove.STOP, reason)
        running.decision = decision
        running.wanted = None if is_whole or decision.action in (NextMove.STOP, NextMove.EVALUATE) else wanted
        if decision.reason is not None:
            self._ends.note(number, f"{decision.reason.rule}: {decision.reason.message}")
        if message.report.is_evaluation:
            self._ends.note(number, report_line(message.report, last_step))
        if has_much_rounding(message.report, study.spec.kl_budget):
            line = str(rounding_line(message.report, study.spec.kl_budget))
            self._ends.note(number, line)
            if not self._has_told_rounding:
                self._has_told_rounding = True
                self._warn(f"trial {number}: {line.removeprefix('warning: ')}")
        must_leave = not is_whole and (study.row.paused_at is not None or self._is_stopping())
        self._engine.answer(number, answer(decision, running.wanted, must_leave=must_leave))
        if decision.action is not NextMove.EVALUATE:  # it is reported with its evaluation
            self._emit(events.TrialStepped(number, message.report, last_step, decision.reason))

    def _leave(self, number: int) -> None:
        """Apply orders to a trial whose worker left it; without any it resumes, in this run or the next."""
        self._running.pop(number)
        row = self._study.refresh(number)
        if row.wanted is not None or self._study.row.paused_at is not None:
            self._ends.apply_orders(row)

    def _end(self, number: int) -> None:
        """Judge a trial that completed or was pruned; one that an order ended leaves instead."""
        running, study = self._running[number], self._study
        is_stopped = running.decision.action is NextMove.STOP
        if not is_stopped and running.wanted is Wanted.STOP:
            self._leave(number)
            return
        status, reason = (Status.PRUNED, running.decision.reason) if is_stopped else (Status.COMPLETED, None)
        self._finish(number, judged(study.store, study.rows[number], study.spec, status, reason))

    def _wait_out(self, number: int, what: str) -> None:
        """Queue a trial that an outage ended, to resume later; until then no trial starts."""
        study = self._study
        self._running.pop(number, None)
        if self._is_left_to_next_run(number, what):
            return
        row = study.refresh(number)
        study.store.set_aside(study.lease, row.id, so_far(study.store, row, study.spec), Reason(OUTAGE, what))
        if study.refresh(number).status is Status.WAITING:  # no pending order stopped or paused it
            self._outages.record(number, what, row.episodes)

    def _is_left_to_next_run(self, number: int, what: str) -> bool:
        """Note what interrupted a trial, and return True if this run is stopping, so that the next one resumes it."""
        self._ends.note(number, what)
        if self._is_stopping():
            self._warn(f"trial {number}: {what}; the next run of the study resumes it")
            return True
        return False

    def _retry(self, number: int, what: str, reason: Reason) -> None:
        """Resume a trial from its checkpoint in another worker; after too many attempts it fails for `reason`."""
        has_saved = self._running.pop(number).has_saved
        if self._is_left_to_next_run(number, what):
            return
        row = self._study.rows[number]
        retries = 0 if has_saved else row.retries
        if retries >= retry.RETRIES:
            self._finish(number, Outcome(Status.FAILED, reason))
            return
        self._study.store.set_retries(self._study.lease, row.id, retries + 1)
        which = f"retry {retries + 1} of {retry.RETRIES}"
        self._warn(f"trial {number}: {what}; resuming from its last checkpoint ({which})")
        self._study.refresh(number)

    def _finish(self, number: int, outcome: Outcome) -> None:
        study = self._study
        self._running.pop(number, None)
        self._ends.finish(study.rows[number], outcome)
        if study.rows[number].has_failed:
            rows = study.store.trials(study.row)  # how far the others are by now
            self._verdict = self._verdict or retry.failing(rows, number)

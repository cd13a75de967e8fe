"""The controller's loop: propose, start, record, judge, until the study has its trials or a stop is asked for."""

import time
from collections import deque
from dataclasses import dataclass
from typing import assert_never

from ppo_core import checkpoints_kept
from ppo_core.command.stop_signals import StopRequest
from ppo_core.declaration import HyperValue
from ppo_core.errors import PPOTunerError, StudyError, TaskError
from ppo_core.hyperparameters import PPOConfig
from tuner import failures, trial_folder
from tuner.engines.local import LocalEngine
from tuner.events import TIME_LIMIT, Preparing, StudyStopping, Tell, TrialEnded, TrialStarted, TrialStepped
from tuner.objective import trial_value, violation
from tuner.open_study import MirrorKeeper, OpenStudy
from tuner.projection import Projection
from tuner.protocol import Answer, Ended, Failed, Left, Lost, Message, Prepared, Progress, Stepped, TrialSpec
from tuner.status import Reason, Status
from tuner.store import Outcome, TrialRow
from tuner.trial import whole_episodes

RENEW_SECONDS = 5.0
"""The longest wait for a worker, and how often the study's lease is renewed."""
EVALUATION_METRICS = ("eval/reward", "eval/reward_se", "eval/kl")


@dataclass(frozen=True)
class Limits:
    """How a run of the study is bounded."""

    threads: int
    """CPU threads of a new trial."""
    checkpoint_seconds: float
    deadline: float | None
    """On the monotonic clock."""
    timeout: float | None
    """The seconds that led to the deadline."""


@dataclass
class _Running:
    """A trial that a worker runs."""

    row: TrialRow
    total_episodes: int
    reason: Reason | None = None
    """Why the guard ended it."""


class TrialLoop:
    """One run of a study on an engine."""

    def __init__(
        self,
        study: OpenStudy,
        mirror: MirrorKeeper,
        engine: LocalEngine,
        stop: StopRequest,
        limits: Limits,
        tell: Tell,
    ) -> None:
        self._study, self._mirror, self._engine = study, mirror, engine
        self._stop, self._limits, self._tell = stop, limits, tell
        rows = study.trials()
        self._interrupted = deque(row for row in rows if not row.status.is_final and row.number < study.spec.trials)
        self._next_number = len(rows)
        self._running: dict[int, _Running] = {}
        self._losses: dict[int, int] = {}
        self._streak = failures.FailureStreak()
        self._verdict: str | None = None
        self._stopping: str | None = None
        self._projection = Projection(study.spec, rows)
        self._renewed_at = time.monotonic()

    def run(self) -> str | None:
        """Run the study; return None when it has its trials, or why it stopped before.

        Raises:
            StudyError: trial after trial failed for the same cause.
            TaskError: the task could not be prepared.
        """
        if self._prepare_task():
            while self._start_trials():
                for job, message in self._engine.events(self._patience()):
                    assert job is not None
                    self._handle(job, message)
                self._stay_alive()
        if self._verdict is not None:
            raise StudyError(self._verdict)
        return self._stopping

    # Waiting

    def _patience(self) -> float:
        deadline = self._limits.deadline
        if deadline is None or self._stopping is not None:
            return RENEW_SECONDS
        return min(RENEW_SECONDS, max(0.0, deadline - time.monotonic()))

    def _stay_alive(self) -> None:
        if time.monotonic() - self._renewed_at >= RENEW_SECONDS:
            self._study.store.renew(self._study.lease)
            self._renewed_at = time.monotonic()

    def _is_stopping(self) -> bool:
        """Return whether no trial shall start and those that run shall be left; tell of it when that begins."""
        if self._stopping is None:
            self._stopping = self._why_stop()
            if self._stopping is not None and self._running:
                self._tell(StudyStopping(len(self._running), self._stopping))
        return self._stopping is not None

    def _why_stop(self) -> str | None:
        limits = self._limits
        if limits.deadline is not None and time.monotonic() >= limits.deadline:
            return self._verdict or self._stop.why or f"{TIME_LIMIT} of {limits.timeout:g} s has passed"
        return self._verdict or self._stop.why

    # The task

    def _prepare_task(self) -> bool:
        """Have the task prepared by a worker; return False if a stop was asked for meanwhile."""
        self._engine.prepare(self._study.spec.task)
        while not self._is_stopping():
            for _, message in self._engine.events(self._patience()):
                if isinstance(message, Prepared):
                    return True
                if isinstance(message, Progress):
                    self._tell(Preparing(message.what, message.share))
                else:
                    raise self._preparation_error(message)
            self._stay_alive()
        return False

    def _preparation_error(self, message: Message) -> PPOTunerError:
        what = f'task "{self._study.spec.task}" could not be prepared'
        if not isinstance(message, Failed):
            assert isinstance(message, Lost)
            return TaskError(f"{what}: worker lost, {message.how}")
        if message.is_for_user:
            return TaskError(message.message)
        where = trial_folder.write_error(self._study.folder, message.traceback)
        return TaskError(f"{what}: {message.message} (traceback in {where})")

    # Starting

    def _start_trials(self) -> bool:
        """Start as many trials as there are workers free; return whether any runs."""
        while not self._is_stopping() and self._engine.free:
            if self._interrupted:
                self._start(self._interrupted.popleft())
            elif self._next_number < self._study.spec.trials:
                self._start(self._add_trial())
            else:
                break
        return bool(self._running)

    def _add_trial(self) -> TrialRow:
        study, number = self._study, self._next_number
        params, origin = self._choose(number)
        row = study.store.add_trial(
            study.lease,
            number,
            origin=origin,
            config=study.spec.config(params).to_dict(),
            params=params,
            threads=self._limits.threads,
        )
        self._projection.note_running(number, params)
        self._next_number += 1
        return row

    def _choose(self, number: int) -> tuple[dict[str, HyperValue], str]:
        """Return the params of the next trial and where they come from."""
        spec = self._study.spec
        if spec.listed:
            return dict(spec.listed[number].params), "listed"
        if number == 0:
            return spec.reference_params(), "reference"
        return self._projection.propose(number), "sampled"

    def _start(self, row: TrialRow) -> None:
        """Start a trial from its last checkpoint, or from the beginning where it has none."""
        study = self._study
        folder = study.trial_folder(row.number)
        point = trial_folder.resume_point(folder, study.store.last_step(row.id))
        resume_from, step = point or (None, None)
        study.store.begin_attempt(study.lease, row.id, step)
        row = study.store.trial(study.row, row.number)
        self._running[row.number] = _Running(row, whole_episodes(PPOConfig.from_dict(row.config)))
        self._engine.start(
            TrialSpec(
                study=study.spec.name,
                number=row.number,
                config=row.config,
                task=study.spec.task,
                trainer=study.spec.trainer,
                device=study.spec.device,
                threads=row.threads,
                folder=folder,
                guard=study.spec.guard,
                kl_budget=study.spec.kl_budget,
                resume_from=resume_from,
                checkpoint_seconds=self._limits.checkpoint_seconds,
            )
        )
        self._tell(TrialStarted(row, step))

    # What workers say

    def _handle(self, number: int, message: Message) -> None:
        match message:
            case Stepped():
                self._record(number, message)
            case Ended():
                self._end(number)
            case Left():
                del self._running[number]
            case Failed():
                where = trial_folder.write_error(self._study.trial_folder(number), message.traceback)
                self._finish(number, Outcome(Status.FAILED, failures.error_reason(message, where)))
            case Lost():
                self._retry(number, message)
            case Progress() | Prepared():
                raise AssertionError(message)
            case _:
                assert_never(message)

    def _record(self, number: int, message: Stepped) -> None:
        """Store a step, then answer: a worker saves only what the store holds."""
        running = self._running[number]
        self._study.store.add_step(self._study.lease, running.row.id, message.report, message.seconds)
        running.reason = message.reason
        go_on = Answer.SAVE if self._is_stopping() else Answer.GO_ON
        self._engine.answer(number, go_on if message.reason is None else Answer.STOP)
        self._tell(TrialStepped(number, message.report, running.total_episodes))

    def _end(self, number: int) -> None:
        """Judge a trial that ran to its end or was ended by the guard."""
        running, study = self._running[number], self._study
        evaluations = study.store.steps([running.row.id], EVALUATION_METRICS, evaluations_only=True)
        value, value_se, kl = trial_value(evaluations)
        status = Status.COMPLETED if running.reason is None else Status.PRUNED
        constraint = violation(kl, study.spec.kl_budget, running.reason)
        self._finish(number, Outcome(status, running.reason, value, value_se, kl, constraint))

    def _retry(self, number: int, lost: Lost) -> None:
        if self._is_stopping():  # the next run of the study takes it up
            del self._running[number]
            return
        losses = self._losses[number] = self._losses.get(number, 0) + 1
        if losses > failures.RETRIES:
            self._finish(number, Outcome(Status.FAILED, failures.lost_reason(lost.how, losses)))
        else:
            self._start(self._running.pop(number).row)

    def _finish(self, number: int, outcome: Outcome) -> None:
        study, running = self._study, self._running.pop(number)
        study.store.finish_trial(study.lease, running.row.id, outcome)
        checkpoints_kept.prune(study.trial_folder(number), kl_budget=study.spec.kl_budget, newest=1)
        rows = study.trials()
        row = rows[number]
        self._projection.tell(row)
        self._mirror.update(rows)
        self._verdict = self._verdict or self._streak.add(row)
        self._tell(TrialEnded(row))

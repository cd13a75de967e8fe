"""Readings after the search: its best few again on the eval prompts, answer and confirming runs on the test prompts.

The highest of many readings is high by luck, so the best few are read once more with fresh draws before one of them is
chosen (`tuner.judge.best`). What is chosen is read once on prompts that played no part in any choice.
"""

from collections.abc import Iterable

from ppo_core import checkpoint
from ppo_core.errors import StudyError
from tuner.confirm.plan import Plan, due_step, missing
from tuner.control.session import OpenStudy
from tuner.engine.protocol import CheckpointResult, Failed, Message, ReadCheckpoint, Split
from tuner.judge.best import best_trial, unread
from tuner.store import TrialRow
from tuner.study.status import Role


class HeldOutReadings:
    """The readings of one run of a study, each tried once, and the confirming runs that follow the first of them."""

    def __init__(self, study: OpenStudy, plan: Plan | None) -> None:
        self._study, self._plan = study, plan
        self._tried: set[tuple[int, int, Split]] = set()  # readings that were started, as (trial, step, split)
        self.running: dict[int, ReadCheckpoint] = {}  # readings under way, keyed by trial

    def due(self, *, is_searched: bool) -> list[ReadCheckpoint]:
        """Return the readings to start; `is_searched`: the study is finished, and its files are settled."""
        jobs = self._untried(due_readings(self._study)) if is_searched else []
        if again := [job for job in (*jobs, *self.running.values()) if job.split == "eval"]:
            return again  # what they come to decides which others are due
        if self._plan is not None:  # the SFT policy's reading is that of all confirming runs
            return self._untried([_reading(self._study, self._study.rows[0], 0)])
        return jobs

    def _untried(self, jobs: Iterable[ReadCheckpoint]) -> list[ReadCheckpoint]:
        return [job for job in jobs if (job.number, job.step, job.split) not in self._tried]

    def begin(self, job: ReadCheckpoint) -> None:
        """Note that a worker runs the job."""
        self._tried.add((job.number, job.step, job.split))
        self.running[job.number] = job

    def end(self, number: int, message: Message) -> str | None:
        """Record a reading from its job's last message; return a warning if it failed, else None."""
        job, study = self.running.pop(number), self._study
        if isinstance(message, CheckpointResult):
            trial_id = study.rows[number].id
            if job.split == "test":
                study.store.add_test_reading(study.lease, trial_id, job.step, message.reading, message.why_not)
            else:
                study.store.add_rereading(study.lease, trial_id, job.step, message.reading, message.seconds)
                study.refresh(number)
            return None
        why = message.message if isinstance(message, Failed) else getattr(message, "how", "it was interrupted")
        return f"trial {number} could not be evaluated on the {job.split} prompts: {why}"

    def add_confirming_runs(self) -> None:
        """Add the confirming runs that the study lacks, once the SFT policy has been evaluated.

        Raises:
            StudyError: the task has no test prompts, or they could not be evaluated.
        """
        study = self._study
        if self._plan is None or any(job.split == "eval" for job in self.due(is_searched=True)):
            return
        first = study.rows[0]
        sft = study.store.on_test(first.id, 0)
        if sft is None and (first.number in self.running or (first.number, 0, "test") not in self._tried):
            return
        why_not = "the SFT policy could not be evaluated on the test prompts" if sft is None else sft.why_not
        if why_not is not None:
            raise StudyError(f'study "{study.spec.name}" cannot be confirmed: {why_not}')
        for trial in missing(study.rows, study.spec, self._plan):
            study.put(study.store.add_trial(study.lease, trial))
        self._plan = None


def due_readings(study: OpenStudy) -> list[ReadCheckpoint]:
    """Return the jobs for readings that are missing and whose checkpoint is here: again, of the answer, of others."""
    steps = [(row, row.value_step) for row in unread(study.rows, study.spec.kl_budget)]
    jobs = [_reading(study, row, step, "eval") for row, step in steps if step is not None]
    best = best_trial(study.rows, study.spec.kl_budget)
    steps = [] if best is None else [(best, best.value_step)]
    steps += [(row, due_step(row, study.spec)) for row in study.rows if row.role is Role.CONFIRM]
    read = study.store.test_readings([row.id for row, _ in steps])
    jobs += [_reading(study, row, step) for row, step in steps if step is not None and (row.id, step) not in read]
    return [job for job in jobs if job.checkpoint is None or (job.checkpoint / checkpoint.MANIFEST).exists()]


def _reading(study: OpenStudy, row: TrialRow, step: int, split: Split = "test") -> ReadCheckpoint:
    path = checkpoint.step_folder(study.trial_folder(row.number), step) if step > 0 else None
    return ReadCheckpoint(**study.job(row), checkpoint=path, split=split)

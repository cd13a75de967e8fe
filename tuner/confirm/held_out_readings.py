"""Readings on the test prompts: of the study's answer and of its confirming runs, each once.

The highest of many readings is high by luck, even on prompts that no trial learned from. So the chosen ones are read
once more, on prompts that played no part in any choice.
"""

from ppo_core import checkpoint
from ppo_core.errors import StudyError
from tuner.confirm.plan import Plan, due_step, missing
from tuner.control.session import OpenStudy
from tuner.engine.protocol import Failed, Message, Read, ReadTest
from tuner.environment import to_copy
from tuner.judge.best import best_trial
from tuner.store import TrialRow
from tuner.study.status import Role


class HeldOutReadings:
    """The readings of one run of a study, each tried once, and the confirming runs that follow the first of them."""

    def __init__(self, study: OpenStudy, plan: Plan | None) -> None:
        self._study, self._plan = study, plan
        self._tried: set[tuple[int, int]] = set()
        """Checkpoints whose reading was started, as (trial, step)."""
        self.running: dict[int, ReadTest] = {}
        """Readings under way, keyed by trial."""

    def due(self, *, is_searched: bool) -> list[ReadTest]:
        """Return the readings to start; `is_searched`: the study is finished, and its files are settled."""
        if self._plan is not None:  # the SFT policy's reading is the baseline of all confirming runs
            jobs = [_reading(self._study, self._study.rows[0], 0)]
        else:
            jobs = due_readings(self._study) if is_searched else []
        return [job for job in jobs if (job.number, job.step) not in self._tried]

    def begin(self, job: ReadTest) -> None:
        """Note that a worker runs the job."""
        self._tried.add((job.number, job.step))
        self.running[job.number] = job

    def end(self, number: int, message: Message) -> str | None:
        """Record a reading from its job's last message; return a warning if it failed, else None."""
        job = self.running.pop(number)
        if isinstance(message, Read):
            trial_id = self._study.rows[number].id
            self._study.store.add_test_reading(self._study.lease, trial_id, job.step, message.reading, message.why_not)
            return None
        why = message.message if isinstance(message, Failed) else str(message)
        return f"trial {number} could not be evaluated on the test prompts: {why}"

    def add_confirming_runs(self) -> None:
        """Add the confirming runs that the study lacks, once the SFT policy has been evaluated.

        Raises:
            StudyError: the task has no test prompts, or they could not be evaluated.
        """
        study = self._study
        if self._plan is None:
            return
        first = study.rows[0]
        baseline = study.store.on_test(first.id, 0)
        if baseline is None and (first.number in self.running or (first.number, 0) not in self._tried):
            return
        why_not = "the SFT policy could not be evaluated on the test prompts" if baseline is None else baseline.why_not
        if why_not is not None:
            raise StudyError(f'study "{study.spec.name}" cannot be confirmed: {why_not}')
        for trial in missing(study.rows, study.spec, self._plan):
            study.put(study.store.add_trial(study.lease, trial))
        self._plan = None


def due_readings(study: OpenStudy) -> list[ReadTest]:
    """Return the jobs for readings that are missing and whose checkpoint is here, the answer's first."""
    return [job for job in _missing_readings(study) if _is_here(job)]


def why_unread(study: OpenStudy) -> str | None:
    """Return why confirming runs will never be read on the test prompts from here, or None."""
    runs = [row for row in study.rows if row.role is Role.CONFIRM]
    unread = {job.number for job in _missing_readings(study) if not _is_here(job)}
    lost = [row for row in runs if row.number in unread]
    if not lost:
        return None
    seeds = len({row.seed for row in runs}) + len({row.seed for row in lost})
    episodes = lost[0].config["total_episodes"]
    length = [] if episodes == study.spec.total_episodes else ["--total_episodes", str(episodes)]
    more_runs = to_copy(["confirm", study.spec.name, "--seeds", str(seeds), *length])
    return (
        f"trial {', '.join(str(row.number) for row in lost)}: not evaluated on the test prompts, "
        f"since the checkpoint is not in {study.folder}; run the study where it is, or add runs: {more_runs}"
    )


def _missing_readings(study: OpenStudy) -> list[ReadTest]:
    best = best_trial(study.rows, study.spec.kl_budget)
    steps = [] if best is None else [(best, best.value_step)]
    steps += [(row, due_step(row, study.spec)) for row in study.rows if row.role is Role.CONFIRM]
    read = study.store.test_readings([row.id for row, _ in steps])
    return [_reading(study, row, step) for row, step in steps if step is not None and (row.id, step) not in read]


def _is_here(job: ReadTest) -> bool:
    return job.checkpoint is None or (job.checkpoint / checkpoint.MANIFEST).exists()


def _reading(study: OpenStudy, row: TrialRow, step: int) -> ReadTest:
    """Return the job that reads a trial's checkpoint, or for step 0 the SFT policy."""
    spec, folder = study.spec, study.trial_folder(row.number)
    return ReadTest(
        number=row.number,
        config=row.config,
        task=spec.task,
        trainer=spec.trainer,
        device=spec.device,
        threads=row.threads,
        folder=folder,
        checkpoint=checkpoint.step_folder(folder, step) if step > 0 else None,
        ranks=spec.gpus_per_trial,
    )

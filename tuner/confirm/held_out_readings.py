"""Readings on the test prompts: the study's answer and its confirming runs, each once.

The highest of many readings is high by luck, even on prompts that no trial learned from. So the chosen ones are read
once more, on prompts that played no part in any choice.
"""

from collections.abc import Iterable, Iterator

from ppo_core import checkpoint
from tuner.confirm.plan import DEFAULT_SEEDS, due_step
from tuner.control import forks
from tuner.control.session import OpenStudy
from tuner.engine.protocol import ReadTest
from tuner.environment import to_copy
from tuner.judge.best import best_trial
from tuner.store import TrialRow
from tuner.study.status import Role


def due_readings(study: OpenStudy) -> list[ReadTest]:
    """Return the jobs for readings that are missing and whose checkpoint is here, the answer's first."""
    return [job for job in _unread(study, _wanted(study)) if _is_here(job)]


def why_unread(study: OpenStudy) -> str | None:
    """Return why confirming runs will never be read on the test prompts from here, or None."""
    runs = ((row, step) for row, step in _wanted(study) if row.role is Role.CONFIRM)
    lost = [str(job.number) for job in _unread(study, runs) if not _is_here(job)]
    if not lost:
        return None
    again = to_copy(["confirm", study.spec.name, "--seeds", str(DEFAULT_SEEDS + len(lost))])
    return (
        f"trial {', '.join(lost)}: not evaluated on the test prompts, since the checkpoint is not in {study.folder}; "
        f"run the study where it is, or add runs: {again}"
    )


def _unread(study: OpenStudy, wanted: Iterable[tuple[TrialRow, int]]) -> list[ReadTest]:
    wanted = list(wanted)
    read = study.store.test_readings([row.id for row, _ in wanted])
    return [reading(study, row, step) for row, step in wanted if (row.id, step) not in read]


def _is_here(job: ReadTest) -> bool:
    return job.checkpoint is None or (job.checkpoint / checkpoint.MANIFEST).exists()


def _wanted(study: OpenStudy) -> Iterator[tuple[TrialRow, int]]:
    spec = study.spec
    best = best_trial(study.rows, spec.kl_budget)
    found = None if best is None else forks.value_checkpoint(study.store, study.row, best)
    if best is not None and found is not None:
        yield best, found.step
    for row in study.rows:
        step = due_step(row, spec) if row.role is Role.CONFIRM else None
        if step is not None:
            yield row, step


def reading(study: OpenStudy, row: TrialRow, step: int) -> ReadTest:
    """Return the job that reads a trial's checkpoint, or for step 0 the SFT policy."""
    spec, folder = study.spec, study.trial_folder(row.number)
    path = checkpoint.step_folder(folder, step) if step > 0 else None
    return ReadTest(
        row.number,
        row.config,
        spec.task,
        spec.trainer,
        spec.device,
        row.threads,
        folder,
        path,
        spec.gpus_per_trial,
    )

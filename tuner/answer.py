"""A study's answer: whether its checkpoint is to be read on the test prompts, and the worker's job that does it.

The highest of many readings is high by luck, also on prompts that no trial learned from. So the answer alone is read
once more, on prompts that nothing was chosen by.
"""

from ppo_core import checkpoint
from tuner import forks
from tuner.best import best_trial
from tuner.held_study import OpenStudy
from tuner.protocol import ReadTest


def due_reading(study: OpenStudy) -> ReadTest | None:
    """Return the job that reads the study's answer; None: there is none, it was read, or its checkpoint is not here."""
    spec = study.spec
    best = best_trial(study.board.rows, spec.kl_budget, spec.objective)
    found = None if best is None else forks.answer(study.store, study.row, best)
    if best is None or found is None or study.store.on_test(best.id, found.step) is not None:
        return None
    path = checkpoint.step_folder(study.trial_folder(best.number), found.step)
    if not (path / checkpoint.MANIFEST).exists():
        return None
    return ReadTest(spec.name, best.number, best.config, spec.task, spec.trainer, spec.device, best.threads, path)

"""Where a trial's checkpoints are kept, and the commands that make one again. No torch.

The commands are words without the storage's flags, which whoever prints them adds.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from ppo_core import checkpoint
from tuner import forking, study_folder
from tuner.objective import is_finite
from tuner.store import Store, StudyRow, TrialRow


@dataclass(frozen=True)
class Kept:
    """Whether a checkpoint is still on this machine."""

    path: Path | None
    """Where it is; None: it is not."""
    why_not: str = ""


def find(study: StudyRow, trial: int, step: int) -> Kept:
    """Return where the checkpoint of a trial at a step is, in the study's folder of checkpoints."""
    if study.folder is None:
        return Kept(None, "the study never told where its checkpoints are")
    folder = Path(study.folder)
    if not folder.is_dir() or not study_folder.is_of(folder, study):
        return Kept(None, "the study's folder of checkpoints is not on this machine")
    path = checkpoint.step_folder(folder / str(trial), step)
    if (path / checkpoint.MANIFEST).exists():
        return Kept(path)
    return Kept(None, "of a trial only the newest checkpoints and its best within the study's KL budget are kept")


def by_episode(study: StudyRow, trial: int) -> dict[int, Path]:
    """Return the checkpoints of a trial that are on this machine, by episode in ascending order."""
    folder = None if study.folder is None else Path(study.folder)
    if folder is None or not study_folder.is_of(folder, study):
        return {}
    return dict(sorted(forking.by_episode(folder / str(trial)).items()))


@dataclass(frozen=True)
class Answer:
    """The checkpoint whose policy has a trial's value."""

    step: int
    episode: int
    kept: Kept
    again: list[str]
    """The command that makes it again."""


def answer(store: Store, study: StudyRow, trial: TrialRow) -> Answer | None:
    """Return the checkpoint of a trial's last evaluation, with which its value ends; None: it was never evaluated."""
    rows = store.steps([trial.id], ("eval/reward",), evaluations_only=True)
    last = next((row for row in reversed(rows) if is_finite(row["eval/reward"])), None)
    if last is None:
        return None
    step, episode = int(last["step"]), int(last["episode"])
    if trial.parent is None:
        again = train_again(study.name, trial, episode)
    else:
        begun = next((row for row in store.steps([trial.id], ()) if row["step"] == trial.fork_step), None)
        parent = store.trial(study, trial.parent)
        again = fork_again(study.name, trial, parent, None if begun is None else int(begun["episode"]))
    return Answer(step, episode, find(study, trial.number, step), again)


def train_again(study: str, trial: TrialRow, episode: int) -> list[str]:
    """Return the command that trains a trial anew, with a checkpoint at `episode`.

    The same seed and threads give the same run. A fork's own way began elsewhere: see `fork_again`.
    """
    return ["train", "--from", study, str(trial.number), "--save_every_episodes", str(episode)]


def fork_again(study: str, fork: TrialRow, parent: TrialRow, episode: int | None) -> list[str]:
    """Return the command that forks `parent` as `fork` was, at `episode`; None: at its newest checkpoint."""
    changed = [
        f"{name}={json.dumps(value) if isinstance(value, bool) else value}"
        for name, value in fork.config.items()
        if value is not None and value != parent.config.get(name)
    ]
    at = [] if episode is None else ["--at", str(episode)]
    return ["fork", study, str(parent.number), *at, "--set", *changed]

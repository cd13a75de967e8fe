"""Where an evaluated checkpoint is, and the commands that make it again or go on from it."""

import json
from dataclasses import dataclass
from pathlib import Path

from dashboard import data
from ppo_core import checkpoint
from tuner import study_folder
from tuner.commands.report import LONGER
from tuner.store import StudyRow, TrialRow


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


def train_again(study: str, trial: TrialRow, episode: int) -> str:
    """Return the command that trains a trial anew, with a checkpoint at `episode`.

    The same seed and threads give the same run. A fork's own way began elsewhere: see `fork_again`.
    """
    words = ["train", "--from", study, str(trial.number), "--save_every_episodes", str(episode)]
    return data.command(words)


def fork_again(study: str, fork: TrialRow, parent: TrialRow, episode: int | None) -> str:
    """Return the command that forks `parent` as `fork` was, at `episode`; None: at its newest checkpoint."""
    changed = [
        f"{name}={json.dumps(value) if isinstance(value, bool) else value}"
        for name, value in fork.config.items()
        if value is not None and value != parent.config.get(name)
    ]
    at = [] if episode is None else ["--at", str(episode)]
    return data.command(["fork", study, str(parent.number), *at, "--set", *changed])


def train_for_real(study: str, trial: TrialRow) -> str:
    """Return the command that trains a trial's configuration longer and keeps the model."""
    episodes = int(trial.config.get("total_episodes") or 0) * LONGER
    words = ["train", "--from", study, str(trial.number), "--total_episodes", str(episodes)]
    return data.command(words)


def go_on(study: str, trial: TrialRow, episode: int) -> str:
    """Return the command that forks a trial at a kept checkpoint: for as long again where that is its last episode.

    Elsewhere a changed value is left to be filled in.
    """
    total = int(trial.config.get("total_episodes") or 0)
    changed = f"total_episodes={2 * total}" if episode >= total else "NAME=VALUE"
    return data.command(["fork", study, str(trial.number), "--at", str(episode), "--set", changed])

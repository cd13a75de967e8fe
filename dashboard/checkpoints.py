"""The commands to show that make an evaluated checkpoint again or continue from it. See `tuner.control.forks`."""

from dashboard import data
from tuner.control import forks
from tuner.control.forks import find
from tuner.judge.results import LONGER
from tuner.store import TrialRow

__all__ = ["find", "go_on", "train_again", "train_for_real"]


def train_again(study: str, trial: TrialRow, episode: int) -> str:
    """Return the command that trains a trial again up to `episode`, and saves the model."""
    return data.command(forks.train_again(study, trial, episode))


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

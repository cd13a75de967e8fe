"""Every error a user's mistake can cause. Each message is one line: what, where, what is allowed."""

import difflib
import errno
from collections.abc import Iterable

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""What the system calls a full disk, and a user's full quota."""


class PPOTunerError(Exception):
    """Base of all errors whose message is meant for the user, not for a traceback."""


class ConfigError(PPOTunerError, ValueError):
    """A hyperparameter, a study file or a flag holds something that is not allowed."""


class TaskError(PPOTunerError, ValueError):
    """A task does not exist, or its models, reward or prompts cannot be used."""


class RewardError(PPOTunerError, RuntimeError):
    """A reward could not score: it raised, or answered with something else than one finite number a response."""


class OutOfMemory(PPOTunerError, MemoryError):
    """Not even one row at a time fits."""


class CheckpointError(PPOTunerError, OSError):
    """A checkpoint is missing, unfinished, damaged, or belongs to another run."""


class NoRoomError(CheckpointError):
    """A checkpoint cannot be written for lack of room: the disk, or the user's quota of it, is full for now."""


class StoreError(PPOTunerError, OSError):
    """The store cannot be reached, is not ours, or holds another schema version."""


class StudyError(PPOTunerError, LookupError):
    """A study or trial does not exist, or is in the wrong state for what was asked."""

    def __str__(self) -> str:  # LookupError subclasses would show the repr of the message
        return str(self.args[0]) if self.args else ""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `; did you mean "x"?` for the valid name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f'; did you mean "{match[0]}"?' if match else ""

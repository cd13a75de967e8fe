"""A study's settings for its workers: how often to save, and when a silent worker counts as hung. No torch.

A worker reports when it begins to step and to save. Each has a time limit, restarted with every such report; a worker
that stays silent beyond it is killed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ppo_core.config import declare
from ppo_core.config.declare import Bounds


def _setting(default: float, doc: str, valid: Bounds = declare.POSITIVE) -> float:
    declared: float = field(default=default, metadata={"doc": doc, "valid": valid})
    return declared


@dataclass(frozen=True)
class WorkerSettings:
    """The [workers] table of a study file; `doc` and `valid` of each setting are in its field's metadata."""

    checkpoint_seconds: float = _setting(30.0, "longest time between two checkpoints of a running trial", Bounds(0))
    step_factor: float = _setting(20.0, "a step may take this many times the trial's longest step so far")
    step_seconds: float = _setting(120.0, "a step may always take this long, however short the others were")
    first_step_seconds: float = _setting(
        900.0, "until an attempt's first report, in which models are loaded and compiled"
    )
    save_seconds: float = _setting(1800.0, "writing one checkpoint to the runs folder")
    prepare_seconds: float = _setting(3600.0, "preparing the task, from one sign of progress to the next")

    @classmethod
    def from_dict(cls, value: object, where: str) -> "WorkerSettings":
        """Return a study file's [workers] table over the defaults; `where` names the table in errors.

        Raises:
            ConfigError: it is not a table, an unknown key, or a value that is not allowed.
        """
        values = declare.table(value, where)
        declare.require_known(values, SETTINGS, f"{where}.")
        return cls(**{name: checked(name, given, f"{where}.{name}") for name, given in values.items()})

    def to_dict(self) -> dict[str, float]:
        """Return the [workers] table that `from_dict` reads."""
        return asdict(self)


SETTINGS: Mapping[str, Mapping[str, Any]] = {each.name: each.metadata for each in fields(WorkerSettings)}
"""The `doc` and the `valid` bounds of every setting by name."""


def checked(name: str, value: object, where: str) -> float:
    """Return the value of the setting `name`; ConfigError, which says `where`, if it is not allowed."""
    return declare.number(value, SETTINGS[name]["valid"], where)

"""The [workers] table of a study file: how long a worker may take for what."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ppo_core.config import checks
from ppo_core.config.checks import Bounds


def _setting(default: float, doc: str, valid: Bounds = checks.POSITIVE) -> float:
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
        values = checks.table(value, where)
        checks.require_known(values, WORKER_SETTINGS, f"{where}.")
        valid = {name: setting["valid"] for name, setting in WORKER_SETTINGS.items()}
        return cls(**{name: checks.number(given, valid[name], f"{where}.{name}") for name, given in values.items()})

    def to_dict(self) -> dict[str, float]:
        """Return the [workers] table that `from_dict` reads."""
        return asdict(self)


WORKER_SETTINGS: Mapping[str, Mapping[str, Any]] = {each.name: each.metadata for each in fields(WorkerSettings)}
"""The `doc` and the `valid` bounds of every setting by name."""

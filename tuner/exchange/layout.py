"""What an exported study's folder holds: `study.json` and three tables, in one of three formats.

Tables have the columns of the store's, in its order; trials are named by number, not by the database's ids. Times are
seconds since the epoch (UTC), durations seconds.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from sqlalchemy import JSON, Column, Float, Integer, Table

from ppo_core.errors import ConfigError
from ppo_core.metrics import METRICS
from tuner.exchange import SUFFIXES
from tuner.store import schema

FORMAT = "PPO Tuner study"
FORMAT_VERSION = 1
STUDY_FILE = "study.json"


class ExchangeError(ConfigError):
    """A folder is no export, is damaged, or cannot be written to."""


class Kind(Enum):
    """What a column holds."""

    WHOLE = "a whole number of at least 0"
    NUMBER = "a number"
    TEXT = "a text"
    JSON = "JSON"


@dataclass(frozen=True)
class Field:
    """One column of an exported table."""

    name: str
    kind: Kind
    is_required: bool
    """Whether every row has a value."""
    is_metric: bool = False
    """Whether an export may lack it: metrics were declared one after the other."""


@dataclass(frozen=True)
class TableLayout:
    """One exported table: the columns of one of the store's."""

    name: str
    source: Table
    fields: tuple[Field, ...]
    key: tuple[str, ...]
    """The fields that tell rows apart, by which they are in ascending order."""

    def file(self, fmt: str) -> str:
        """Return the name of its file in a format."""
        return self.name + SUFFIXES[fmt]


_METRIC_COLUMNS = frozenset(metric.column for metric in METRICS.values())
_KINDS: tuple[tuple[type[Any], Kind], ...] = ((Integer, Kind.WHOLE), (Float, Kind.NUMBER), (JSON, Kind.JSON))
_OF_TRIAL = Field("trial", Kind.WHOLE, True)


def _field(column: Column[Any]) -> Field:
    kind = next((kind for type_, kind in _KINDS if isinstance(column.type, type_)), Kind.TEXT)
    return Field(column.name, kind, not column.nullable, column.name in _METRIC_COLUMNS)


def _fields(table: Table, *without: str) -> tuple[Field, ...]:
    return tuple(_field(column) for column in table.c if column.name not in without)


TRIALS = TableLayout("trials", schema.trials, _fields(schema.trials, "id", "study_id"), ("number",))
STEPS = TableLayout("steps", schema.steps, (_OF_TRIAL, *_fields(schema.steps, "trial_id")), ("trial", "step"))
SAMPLES = TableLayout(
    "samples", schema.samples, (_OF_TRIAL, *_fields(schema.samples, "trial_id")), ("trial", "step", "prompt_index")
)
TABLES = (TRIALS, STEPS, SAMPLES)

ORDER_FIELDS = _fields(schema.orders, "id", "study_id", "key")
"""Of each order in `study.json`. Keys are made anew, since no two orders of a database may share one."""
STUDY_FIELDS = ("created_at", "finished_at", "archived_at", "paused_at", "workers")
"""Columns of the study itself that `study.json` holds beside its name and spec."""
OVERRIDES = "overrides"
"""One more, which an export may lack."""

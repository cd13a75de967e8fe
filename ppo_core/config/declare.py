"""Declarations of hyperparameters, and the ranges and choices in which they are searched.

A declaration is `name: type = hyper(default, label, doc, ...)` on a dataclass field.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal

from ppo_core.config.checks import Bounds, convert, integer, number, one_of, require_known
from ppo_core.errors import ConfigError, located, nearest

MOST_CHOICES = 32
"""Most values of a list that is searched: a study checks all pairs of two lists."""
Scale = Literal["linear", "log", "log2", "log_from_1"]
HyperValue = float | int | bool | str | None


@dataclass(frozen=True)
class Range:
    """A numeric search range, both ends included.

    `log2` proposes whole powers of two; `log_from_1` takes the logarithm of the distance from 1.
    """

    low: float
    high: float
    scale: Scale = "linear"

    @property
    def is_log(self) -> bool:
        """True if equal ratios of its values are equally far apart."""
        return self.scale in ("log", "log2")

    @property
    def text(self) -> str:
        """The range in words: `1e-05 to 0.003 (log)`."""
        return f"{self.low:g} to {self.high:g} ({self.scale})"


@dataclass(frozen=True)
class Choices:
    """Values for a search to try of a hyperparameter: at least two, no duplicates."""

    values: tuple[HyperValue, ...]

    @property
    def text(self) -> str:
        """The values in words, each as a study file writes it: `one of "linear", "cosine"`."""
        return f"one of {', '.join(map(json.dumps, self.values))}"


Dimension = Range | Choices
"""Search space of one hyperparameter."""


@dataclass(frozen=True)
class Hyperparameter:
    """A hyperparameter's declaration; those with `name` and after it follow from its field."""

    label: str
    doc: str
    source: str
    unit: str = ""
    valid: Bounds | None = None
    search: Range | None = None
    fixed_by_checkpoint: str = ""
    """Reason that a run resumed from a checkpoint cannot change it, or empty."""
    name: str = ""
    group: str = ""
    """Its heading in help and docs."""
    kind: type = float
    optional: bool = False
    choices: tuple[str, ...] = ()
    default: HyperValue = None

    @property
    def title(self) -> str:
        """The label with its unit, unless it ends with that, for axes and tables."""
        return self.label if self.label.endswith(self.unit) else f"{self.label} ({self.unit})"

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.kind is bool:
            text = "true or false"
        elif self.kind is str:
            text = "a string"
        else:
            noun = "a whole number" if self.kind is int else "a number"
            text = f"{noun} {self.valid}" if self.valid else noun
        return f"{text}, or unset" if self.optional else text

    def coerce(self, value: object) -> HyperValue:
        """Return `value` in the field's type (YAML gives `1e-5` as text), or raise ConfigError."""
        if value is None and self.optional:
            return None
        converted = convert(value, self.kind)
        if converted is not None:
            if self.choices and converted in self.choices:
                return converted
            if not self.choices and (self.valid is None or isinstance(converted, str) or converted in self.valid):
                return converted
        hint = nearest(str(value), self.choices)
        raise ConfigError(f"{self.name} = {value!r} is not allowed; expected {self.allowed}{hint}")


def hyper(default: HyperValue, label: str, doc: str, *, source: str, heading: str = "", **known: Any) -> Any:
    """Return a dataclass field that declares a hyperparameter; `known` are further fields of `Hyperparameter`.

    A `heading` starts a group of this field and those after it, up to the next heading.
    """
    declared = Hyperparameter(label, doc, source, **known)
    return dataclasses.field(default=default, metadata={"declared": declared, "heading": heading})


def read_declarations(cls: type) -> dict[str, Hyperparameter]:
    """Return the declarations of a dataclass by field name, in order."""
    hints = typing.get_type_hints(cls)
    table, group = {}, ""
    for item in dataclasses.fields(cls):
        group = item.metadata["heading"] or group
        annotated = hints[item.name]
        is_union = typing.get_origin(annotated) in (UnionType, typing.Union)
        members = typing.get_args(annotated) if is_union else (annotated,)
        base = next(m for m in members if m is not type(None))
        choices = typing.get_args(base) if typing.get_origin(base) is Literal else ()
        table[item.name] = dataclasses.replace(
            item.metadata["declared"],
            name=item.name,
            group=group,
            kind=str if choices else base,
            optional=type(None) in members,
            choices=choices,
            default=typing.cast(HyperValue, item.default),
        )
    return table


RUN_LENGTH = ("seed", "total_episodes", "eval_every_episodes")
"""Settings that all trials of a study share."""
_BATCH_SIZES = ("batch_size", "mini_batch_size", "num_mini_batches", "gradient_accumulation_steps")


def require_searchable(hyper: Hyperparameter, where: str) -> None:
    """Raise ConfigError for a hyperparameter that all trials of a study share."""
    if hyper.name in RUN_LENGTH:
        raise ConfigError(f"{where}: cannot be searched; trials are compared at the same length, cadence and seed")


def require_numeric(hyper: Hyperparameter, where: str) -> None:
    """Raise ConfigError for a hyperparameter without a range, as its values have no order."""
    if hyper.kind not in (int, float):
        raise ConfigError(
            f"{where}: has no range, since it is not a number; list the values to search, [A, B], or set it in [fixed] "
            f"({hyper.allowed})"
        )


def read_choices(hyper: Hyperparameter, values: Sequence[object], where: str) -> Choices:
    """Return the list `values` as choices of `hyper`, in the field's type and their order, or raise ConfigError."""
    with located(where.removesuffix(hyper.name)):
        read = tuple(hyper.coerce(value) for value in values)
    if len(read) < 2 or len(set(read)) < len(read):
        raise ConfigError(f"{where} = {values!r} is not allowed; expected at least two values, each once")
    if len(read) > MOST_CHOICES:
        instead = "; for more write a range" if hyper.kind in (int, float) else ""
        raise ConfigError(f"{where}: {len(read)} values are not allowed; expected at most {MOST_CHOICES}{instead}")
    return Choices(read)


def read_range(hyper: Hyperparameter, value: Mapping[str, Any], where: str) -> Range:
    """Return the table `value` as a range of `hyper`, or raise ConfigError; `where` names it there."""
    require_known(value, ("low", "high", "scale"), f"{where}.")
    for key in ("low", "high"):
        if key not in value:
            raise ConfigError(f"{where}.{key} is missing; a range has a low and a high")
    scale = value.get("scale", hyper.search.scale if hyper.search else "linear")
    one_of(scale, typing.get_args(Scale), f"{where}.scale")
    span = Range(_end(hyper, value["low"], f"{where}.low"), _end(hyper, value["high"], f"{where}.high"), scale)
    _check_range(hyper, span, where)
    return span


def _end(hyper: Hyperparameter, value: object, where: str) -> float:
    bounds = hyper.valid or Bounds()
    return integer(value, bounds, where) if hyper.kind is int else number(value, bounds, where)


def _check_range(hyper: Hyperparameter, span: Range, where: str) -> None:
    if span.low >= span.high:
        raise ConfigError(f"{where}: low = {span.low:g} must be below high = {span.high:g}")
    if span.scale == "log_from_1" and span.high >= 1:
        raise ConfigError(f"{where}: a log_from_1 scale needs a high below 1, not {span.high:g} (linear takes 1)")
    if span.is_log and span.low <= 0:
        raise ConfigError(f"{where}: a {span.scale} scale needs a low over 0, not {span.low:g}")
    if hyper.name in _BATCH_SIZES and span.scale != "log2":
        raise ConfigError(f'{where}: batch sizes must divide one another, so their scale is "log2", not "{span.scale}"')
    if span.scale != "log2":
        return
    if hyper.kind is not int:
        raise ConfigError(f'{where}: the scale log2 is for whole numbers; use "log"')
    for key, end in (("low", span.low), ("high", span.high)):
        if not math.log2(end).is_integer():
            power = 2 ** math.floor(math.log2(end))
            raise ConfigError(f"{where}.{key} = {end:g} is not a power of two; the nearest are {power} and {2 * power}")

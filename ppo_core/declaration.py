"""How a hyperparameter is declared: `Annotated[type, Hyper(...)] = default` on a dataclass field."""

import dataclasses
import inspect
import json
import math
import typing
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Literal

from ppo_core.errors import ConfigError, nearest

Scale = Literal["linear", "log", "log2"]
HyperValue = float | int | bool | str | None


@dataclass(frozen=True)
class Range:
    """A numeric search range, both ends included. `log2` proposes whole powers of two."""

    low: float
    high: float
    scale: Scale = "linear"


@dataclass(frozen=True)
class Bounds:
    """The values that make mathematical sense. An open end is itself not allowed."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'over' if self.low_open else 'at least'} {self.low:g}"
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"in {left}{self.low:g}, {self.high:g}{right}"


@dataclass(frozen=True)
class Hyper:
    """What is known of one hyperparameter, apart from its name, type and default."""

    label: str
    doc: str
    source: str
    unit: str = ""
    valid: Bounds | None = None
    search: Range | None = None
    fixed_by_checkpoint: str = ""
    """Why a run that goes on from a checkpoint cannot change it; empty where it can."""


@dataclass(frozen=True)
class Hyperparameter(Hyper):
    """A declaration with the field's name, type and default: the whole of what is known of it."""

    name: str = ""
    group: str = ""
    """The heading it stands under in help and docs."""
    kind: type = float
    optional: bool = False
    choices: tuple[str, ...] = ()
    default: HyperValue = None

    @property
    def title(self) -> str:
        """The label with its unit, for axes and tables."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def allowed(self) -> str:
        """What a value must be, in words."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.kind is bool:
            text = "true or false"
        elif self.kind is str:
            text = "a text"
        else:
            noun = "a whole number" if self.kind is int else "a number"
            text = f"{noun} {self.valid}" if self.valid else noun
        return f"{text}, or unset" if self.optional else text

    def coerce(self, value: object) -> HyperValue:
        """Return `value` in the field's type (YAML hands `1e-5` over as text), or raise ConfigError."""
        if value is None and self.optional:
            return None
        converted = _convert(value, self.kind)
        if converted is not None:
            if self.choices and converted in self.choices:
                return converted
            if not self.choices and (self.valid is None or isinstance(converted, str) or converted in self.valid):
                return converted
        hint = nearest(str(value), self.choices)
        raise ConfigError(f"{self.name} = {value!r} is not allowed: {self.allowed}{hint}")


def _convert(value: object, kind: type) -> HyperValue:
    """Return `value` as `kind`, or None where that would lose or invent something."""
    if kind is bool:
        truths = {"true": True, "false": False}
        return value if isinstance(value, bool) else truths.get(str(value).lower())
    if kind is str:
        return json.dumps(value) if isinstance(value, list) else value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if kind is int:
        return int(value) if isinstance(value, int) else int(number) if number.is_integer() else None
    return number


def read_declarations(cls: type) -> dict[str, Hyperparameter]:
    """Return the declarations of a dataclass by field name, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    table = {}
    for item in dataclasses.fields(cls):
        group = next(base for base in reversed(cls.__mro__) if item.name in inspect.get_annotations(base))
        annotated, *extras = typing.get_args(hints[item.name])
        hyper = next(extra for extra in extras if isinstance(extra, Hyper))
        is_union = typing.get_origin(annotated) in (UnionType, typing.Union)
        members = typing.get_args(annotated) if is_union else (annotated,)
        base = next(m for m in members if m is not type(None))
        choices = typing.get_args(base) if typing.get_origin(base) is Literal else ()
        table[item.name] = Hyperparameter(
            **{f.name: getattr(hyper, f.name) for f in dataclasses.fields(Hyper)},
            name=item.name,
            group=(group.__doc__ or "").strip().rstrip("."),
            kind=str if choices else base,
            optional=type(None) in members,
            choices=choices,
            default=typing.cast(HyperValue, item.default),
        )
    return table


def with_help(cls: type) -> type:
    """Class decorator: copy each declaration's doc to where `HfArgumentParser` looks for the help text."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for item in dataclasses.fields(cls):
        text = next(h for h in hints[item.name].__metadata__ if isinstance(h, Hyper)).doc
        item.metadata = MappingProxyType({"help": text.replace("%", "%%")})
    return cls

"""`study.json` of an exported study: what it is, its spec, its orders, and how many rows each table has."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core import declare
from ppo_core.errors import nearest
from tuner import overrides, study_file
from tuner.exchange import SUFFIXES, values
from tuner.exchange.layout import (
    FORMAT,
    FORMAT_VERSION,
    ORDER_FIELDS,
    OVERRIDES,
    STUDY_FIELDS,
    STUDY_FILE,
    TABLES,
    ExchangeError,
    Field,
    Kind,
)
from tuner.order_kinds import KINDS
from tuner.spec import StudySpec
from tuner.store import OrderState
from tuner.store.schema import SCHEMA_VERSION

_KEYS = (
    "format",
    "format_version",
    "schema_version",
    "tables",
    "name",
    *STUDY_FIELDS,
    OVERRIDES,
    "spec",
    "rows",
    "orders",
)
_STUDY_KINDS = {
    name: Field(name, Kind.WHOLE if name == "workers" else Kind.NUMBER, name == "created_at") for name in STUDY_FIELDS
}


@dataclass(frozen=True)
class Exported:
    """What a `study.json` says, checked."""

    name: str
    tables: str
    """The format of the tables: a key of `layout.SUFFIXES`."""
    study: Mapping[str, Any]
    """Columns of the study itself: those of `layout.STUDY_FIELDS`, and its overrides."""
    spec: dict[str, Any]
    rows: Mapping[str, int]
    """How many rows each table has, by its name."""
    orders: list[dict[str, Any]]


def text(study: Mapping[str, Any], fmt: str, rows: Mapping[str, int], orders: list[dict[str, Any]]) -> str:
    """Return the content of `study.json`; `study` is a row of the studies table."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "tables": fmt,
        "name": study["name"],
        **{name: study[name] for name in (*STUDY_FIELDS, OVERRIDES)},
        "spec": study["spec"],
        "rows": dict(rows),
        "orders": orders,
    }
    return json.dumps(content, indent=1) + "\n"


def is_export(folder: Path) -> bool:
    """Return whether a folder holds an exported study, whatever its version."""
    try:
        content = json.loads((folder / STUDY_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def read(folder: Path) -> Exported:
    """Return what a folder's `study.json` says.

    Raises:
        ExchangeError: the folder is no exported study, of another format, or something in the file is not allowed.
        ConfigError: the spec is not one that this program reads.
    """
    path = folder / STUDY_FILE
    content = _content(folder, path)
    declare.require_known(content, _KEYS, f"{path}: ")
    for key in _KEYS:
        if key not in content and key != OVERRIDES:
            raise ExchangeError(f"{path}: {key} is missing")
    fmt = content["tables"]
    if not isinstance(fmt, str) or fmt not in SUFFIXES:
        raise values.refuse(f"{path}: tables", fmt, f"one of {', '.join(SUFFIXES)}{nearest(str(fmt), SUFFIXES)}")
    declare.whole(content["schema_version"], declare.AT_LEAST_ONE, f"{path}: schema_version")
    name = study_file.matching(content["name"], study_file.NAME, f"{path}: name")
    study = {key: values.checked(field, content[key], f"{path}: {key}") for key, field in _STUDY_KINDS.items()}
    found = content.get(OVERRIDES)
    study[OVERRIDES] = None if found is None else overrides.read(found, f"{path}: {OVERRIDES}")
    return Exported(
        name=name,
        tables=fmt,
        study=study,
        spec=_spec(content["spec"], name, path),
        rows=_rows(content["rows"], path),
        orders=_orders(content["orders"], path),
    )


def _content(folder: Path, path: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ExchangeError(f"there is no folder {folder}")
    try:
        content = values.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise ExchangeError(f"{folder} is no exported study: it has no {STUDY_FILE}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ExchangeError(f"{folder} is no exported study: its {STUDY_FILE} is of something else")
    version = content.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        why = "it was written by a newer PPO Tuner" if is_newer else "no such format is known"
        raise ExchangeError(f"{path}: format_version = {version!r}; this PPO Tuner reads {FORMAT_VERSION}: {why}")
    return content


def _spec(value: object, name: str, path: Path) -> dict[str, Any]:
    """Return the spec as it stands there, once it is known that studies of it can be read."""
    where = f"{path}: spec"
    if not isinstance(value, dict):
        raise values.refuse(where, value, "a JSON object")
    spec = StudySpec.from_dict(value, where)
    if spec.name != name:
        raise ExchangeError(f'{where}.name = "{spec.name}" is not the name "{name}" of the study')
    return value


def _rows(value: object, path: Path) -> dict[str, int]:
    names = [table.name for table in TABLES]
    if not isinstance(value, dict) or set(value) != set(names):
        raise values.refuse(f"{path}: rows", value, f"the numbers of {', '.join(names)}")
    field = Field("", Kind.WHOLE, True)
    return {name: values.checked(field, value[name], f"{path}: rows.{name}") for name in names}


def _orders(value: object, path: Path) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise values.refuse(f"{path}: orders", value, "a list")
    return [_order(item, f"{path}: orders[{number}]") for number, item in enumerate(value)]


def _order(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise values.refuse(where, value, "a JSON object")
    declare.require_known(value, [field.name for field in ORDER_FIELDS], f"{where}.")
    order = {
        field.name: values.checked(field, value.get(field.name), f"{where}.{field.name}") for field in ORDER_FIELDS
    }
    for key, allowed in (("kind", list(KINDS)), ("state", [state.value for state in OrderState])):
        if order[key] not in allowed:
            raise values.refuse(
                f"{where}.{key}", order[key], f"one of {', '.join(allowed)}{nearest(order[key], allowed)}"
            )
    if not isinstance(order["arguments"], dict):
        raise values.refuse(f"{where}.arguments", order["arguments"], "a JSON object")
    return order

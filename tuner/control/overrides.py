"""Settings of a study that both its file and the order `set` may give.

The order's value holds until the file's own value changes or a flag of `run` gives another one.
"""

from collections.abc import Mapping
from typing import Any

from ppo_core.errors import ConfigError, nearest
from tuner.study.space import is_number
from tuner.study.spec import StudySpec
from tuner.study.status import CHANGEABLE_SETTINGS

FILE_KEYS = {"trials": "trials", "budget": "budget", "kl_budget": "kl.budget"}
"""Settings by their name in orders, with their keys in study files."""
FILE, SET = "file", "set"

Overrides = Mapping[str, Mapping[str, float | None]]
"""Per setting: `file`, its value in the study file at the last run, None if it had none; `set`, an order's since."""


def changed_spec(spec: StudySpec, changes: Mapping[str, object]) -> StudySpec:
    """Return the spec changed by an order `set`; a change of `workers` is only checked.

    Raises:
        ConfigError: an unknown setting, or a value that is not allowed.
    """
    if not changes:
        raise ConfigError(f"set changes nothing; available: {', '.join(CHANGEABLE_SETTINGS)}")
    for name in changes:
        if name not in CHANGEABLE_SETTINGS:
            available = ", ".join(CHANGEABLE_SETTINGS)
            raise ConfigError(f'unknown setting "{name}"; available: {available}{nearest(name, CHANGEABLE_SETTINGS)}')
    workers = changes.get("workers", 1)
    if not is_number(workers) or workers < 1 or workers % 1 != 0:
        raise ConfigError(f"workers = {workers!r} is not allowed; expected a whole number of at least 1")
    keys: dict[str, object] = {name: changes[name] for name in ("trials", "budget") if name in changes}
    if "kl_budget" in changes:
        keys["kl"] = {"budget": changes["kl_budget"]}
    return spec.with_keys(keys, f'study "{spec.name}"')


def after_order(overrides: Overrides, changes: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return the record updated by an order `set`."""
    ordered = {name: {SET: changes[name]} for name in FILE_KEYS if name in changes}
    return {name: {**overrides.get(name, {}), **ordered.get(name, {})} for name in {**overrides, **ordered}}


def at_run(
    spec: StudySpec, overrides: Overrides, *, from_file: bool, flags: Mapping[str, float]
) -> tuple[StudySpec, dict[str, dict[str, float | None]], list[str]]:
    """Return a run's spec, the updated record, and notes for the user, one line each.

    Args:
        spec: The study file's, or the stored one.
        overrides: The record so far.
        from_file: True if `spec` comes from a file.
        flags: Values of `--trials` and `--budget`, if given.

    Raises:
        ConfigError: a kept value contradicts the file, or a flag does not apply to a study that lists its trials.
    """
    record: dict[str, dict[str, float | None]] = {}
    notes = []
    for name in FILE_KEYS:
        old, value = overrides.get(name, {}), getattr(spec, name)
        in_file = {FILE: value} if from_file else old
        record[name] = {FILE: in_file[FILE]} if FILE in in_file else {}
        is_changed = from_file and old.get(FILE, value) != value
        kept = old.get(SET)
        if kept is None or name in flags or is_changed:
            continue
        record[name][SET] = kept
        if kept != value:
            spec = changed_spec(spec, {name: kept})
            file_said = "nothing" if value is None else f"{value:g}"
            notes.append(
                f"{FILE_KEYS[name]} = {kept:g} is kept: it was set by an order; the study file said {file_said}; "
                f"to change it: ppo-tuner set {spec.name} --{name.replace('_', '-')} X, or another value in the file"
            )
    return (changed_spec(spec, flags) if flags else spec), record, notes

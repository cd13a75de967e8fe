"""The settings that both a study file and the order `set` give: which of the two holds. No torch.

The order holds, as the later word, until the file's own value changes or a flag of `run` gives another one.
"""

from collections.abc import Mapping
from typing import Any

from ppo_core import declare
from tuner.order_checks import changed_spec
from tuner.spec import StudySpec

FILE_KEYS = {"trials": "trials", "kl_budget": "kl.budget"}
"""The settings by their name in orders, and their keys in study files."""
FILE, SET = "file", "set"

Overrides = Mapping[str, Mapping[str, float]]
"""By setting: under `file` what the study file said in its last run, under `set` what an order said since then."""


def after_order(overrides: Overrides, changes: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the record after an order `set` with these changes."""
    ordered = {name: {SET: changes[name]} for name in FILE_KEYS if name in changes}
    return {name: {**overrides.get(name, {}), **ordered.get(name, {})} for name in {**overrides, **ordered}}


def at_run(
    spec: StudySpec, overrides: Overrides, *, is_file: bool, trials: int | None
) -> tuple[StudySpec, dict[str, dict[str, float]], list[str]]:
    """Return the spec that a run has, the record after its start, and what the user should know, one line each.

    Args:
        spec: As the study file says, or as it is stored.
        overrides: The record so far.
        is_file: Whether `spec` comes from a file.
        trials: The flag `--trials`, if given.

    Raises:
        ConfigError: a kept value does not go with the file, or the flag not with a study that lists its trials.
    """
    record: dict[str, dict[str, float]] = {}
    notes = []
    for name in FILE_KEYS:
        old, value = overrides.get(name, {}), getattr(spec, name)
        says = {FILE: value} if is_file else {key: old[key] for key in (FILE,) if key in old}
        is_flagged = name == "trials" and trials is not None
        is_changed = is_file and old.get(FILE, value) != value
        is_kept = SET in old and not is_flagged and not is_changed
        record[name] = {**says, SET: old[SET]} if is_kept else says
        if is_kept and old[SET] != value:
            spec = changed_spec(spec, {name: old[SET]})
            notes.append(_note(spec.name, name, old[SET], value))
    return (spec if trials is None else spec.with_trials(trials)), record, notes


def read(value: object, where: str) -> dict[str, dict[str, float]]:
    """Return a record that was exported; ConfigError where it is none."""
    record: dict[str, dict[str, float]] = {}
    words = declare.table(value, where)
    declare.require_known(words, FILE_KEYS, f"{where}.")
    for name in words:
        found = declare.table(words[name], f"{where}.{name}")
        declare.require_known(found, (FILE, SET), f"{where}.{name}.")
        for key, number in found.items():
            declare.number(number, declare.POSITIVE, f"{where}.{name}.{key}")
        record[name] = dict(found)
    return record


def _note(study: str, name: str, kept: float, says: float) -> str:
    return (
        f"{FILE_KEYS[name]} = {kept:g} is kept: it was set by an order after the study file said {says:g}; to change "
        f"it: ppo-tuner set {study} --{name.replace('_', '-')} X, or another value in the file"
    )

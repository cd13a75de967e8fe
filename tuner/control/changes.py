"""What may change in a study that has trials: by its file, by flags of a run, and by orders."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import ConfigError, nearest
from ppo_core.loading import digest
from ppo_core.loading.task_file import KL_LIMIT
from ppo_core.output import pluralize
from tuner.store import Store, command
from tuner.study.space import is_number
from tuner.study.spec import StudySpec
from tuner.study.status import CHANGEABLE_SETTINGS
from tuner.study.study_file import setting_text
from tuner.study.trial_tables import ListedTrial

FILE_KEYS = {"trials": "trials", "budget": "budget", "kl_budget": "kl.budget"}
"""Settings by their name in orders, with their keys in study files."""
FILE, SET = "file", "set"

Overrides = Mapping[str, Mapping[str, float | str | None]]
"""Per setting: `file`, the study file's value at the last run, if any; `set`, an order's since, which holds until the
file's own value changes or a flag of `run` gives another one."""
Record = dict[str, dict[str, float | str | None]]  # overrides to be stored


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


def after_order(overrides: Overrides, changes: Mapping[str, Any]) -> Record:
    """Return the record updated by an order `set`."""
    ordered = {name: {SET: changes[name]} for name in FILE_KEYS if name in changes}
    return {name: {**overrides.get(name, {}), **ordered.get(name, {})} for name in {**overrides, **ordered}}


def at_run(
    spec: StudySpec, overrides: Overrides, store: Store, flags: Mapping[str, float | str], *, from_file: bool
) -> tuple[StudySpec, Record, list[str]]:
    """Return a run's spec, the updated record, and notes for the user, one line each; see `session.reconcile`."""
    record: Record = {}
    notes = []
    for name in FILE_KEYS:
        old, value = overrides.get(name, {}), getattr(spec, name)
        record[name] = {FILE: value} if from_file else {FILE: old[FILE]} if FILE in old else {}
        is_changed = from_file and old.get(FILE, value) != value
        kept = old.get(SET)
        if kept is None or name in flags or is_changed:
            continue
        record[name][SET] = kept
        if kept != value:
            spec = changed_spec(spec, {name: kept})
            file_said = "nothing" if value is None else setting_text(value)
            set_it = command(["set", spec.name, f"--{name.replace('_', '-')}", "X"], store)
            notes.append(
                f"{FILE_KEYS[name]} = {setting_text(kept)} is kept: it was set by an order; the study file said "
                f"{file_said}; to change it: {set_it}, or another value in the file"
            )
    return (changed_spec(spec, flags) if flags else spec), record, notes


class SpecChanges(NamedTuple):
    """Differences between a study file and the stored study that it resumes, one line each."""

    allowed: list[str]
    """Changes that take effect."""
    refused: list[str]
    """Changes that would mix two experiments."""


def spec_changes(old: StudySpec, new: StudySpec) -> SpecChanges:
    """Return what a study file says otherwise than the stored study."""
    allowed = _changes(_may_change(old), _may_change(new))
    of_task = digest.changes(digest.declared(old.declared), digest.declared(new.declared))
    refused = [*_changes(_must_stay(old), _must_stay(new)), *of_task, *_listed_changes(old.listed, new.listed)]
    return SpecChanges(allowed, [f"{line}; give the study another name" for line in refused])


def _may_change(spec: StudySpec) -> dict[str, object]:
    return {
        **{
            f"search.{name}": spec.search[name].text if name in spec.search else "not searched"
            for name in HYPERPARAMETERS
        },
        **{key: getattr(spec, key) for key in ("trials", "budget", "device", "threads", "gpus_per_trial")},
        "spends its whole budget (--whole-budget, stop_early = false)": "no" if spec.stop_early else "yes",
        "kl.budget": spec.kl_budget,
        **{f"workers.{key}": f"{value:g}" for key, value in spec.workers.to_dict().items()},
        "sampler": f"{spec.sampler.name} after {pluralize(spec.sampler.startup_trials, 'trial')}",
    }


def _must_stay(spec: StudySpec) -> dict[str, object]:
    return {
        **{key: getattr(spec, key) for key in ("task", "trainer", "pruner", "seed")},
        **{
            f"{table}.{name}": values.get(name, "unset")
            for table, values in (("fixed", spec.fixed), ("baseline", spec.baseline))
            for name in HYPERPARAMETERS
        },
        "pace": "kept by each trial" if spec.keeps_kl_step else "as set by learning_rate and β",
        "kl.limit": spec.kl_limit,
        **{f"guard.{key}": value for key, value in spec.guard.to_dict().items()},
    }


def _listed_changes(old: Sequence[ListedTrial], new: Sequence[ListedTrial]) -> list[str]:
    """Return the differences of `new` from `old` in the trials that `old` lists, one line each."""
    if bool(old) != bool(new):
        return [f"trials: {'listed' if new else 'searched'}, were {'listed' if old else 'searched'}"]
    lines = []
    for number, trial in enumerate(old):
        now = new[number].to_dict() if number < len(new) else "not listed"
        if now != trial.to_dict():
            lines.append(f"trial {number}: {now}, was {trial.to_dict()}")
    return lines


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    said = {key: tuple("unset" if one is None else one for one in (value, old[key])) for key, value in new.items()}
    return [f"{name}: {now}, was {before}" for name, (now, before) in said.items() if now != before]


def continuing(new: StudySpec, old: StudySpec) -> StudySpec:
    """Return a study, just read, with its trials made for the KL budget that those of `old`, as stored, are.

    Raises:
        ConfigError: the new budget is over the KL limit.
    """
    kl = {"first_budget": old.first_budget}
    if all(spec.kl_limit == KL_LIMIT * spec.first_budget for spec in (old, new)):
        kl["limit"] = old.kl_limit
    return new if old.first_budget == new.first_budget else new.with_keys({"kl": kl}, f'study "{new.name}"')

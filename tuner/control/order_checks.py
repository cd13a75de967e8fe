"""Check an order against the study's current state: before it is placed, and again by the controller."""

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_core import checkpoint
from ppo_core.config.declare import RUN_LENGTH, HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.errors import ConfigError, StudyError, nearest
from tuner.control import forks
from tuner.control.orders import KINDS, SETTINGS
from tuner.files import delete as upkeep
from tuner.judge.results import StudyView
from tuner.search.choose import as_stored
from tuner.store import Store, StudyRow, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Role, Status

MOST_WORKERS = 1000
"""Larger numbers are typing errors: no machine runs as many."""


def check_trial_order(kind: str, row: TrialRow) -> None:
    """Raise ConfigError if an order cannot be carried out on a trial in its current state."""
    status = row.shown_status
    if kind == "resume" and row.status is not Status.PAUSED and row.wanted is None:
        raise ConfigError(f"trial {row.number} is {status}; only a paused trial can be resumed")
    if kind == "pause" and row.status is Status.PAUSED:
        raise ConfigError(f"trial {row.number} is paused already")
    if kind in ("stop", "pause") and row.status.is_final:
        raise ConfigError(f"trial {row.number} is {status}; {kind} does not apply to it")


def check_study_order(kind: str, study: StudyRow) -> None:
    """Raise ConfigError if an order on the whole study cannot be carried out in its current state."""
    if kind == "resume" and study.paused_at is None:
        raise ConfigError("the study is not paused")
    if kind == "pause" and study.paused_at is not None:
        raise ConfigError("the study is paused already")


def retried(rows: Sequence[TrialRow], number: int | None) -> list[TrialRow]:
    """Return the failed trials that a retry order concerns; ConfigError if there are none."""
    failed = [row for row in rows if row.status is Status.FAILED and number in (None, row.number)]
    if not failed:
        other = next((row for row in rows if row.number == number), None)
        raise ConfigError(
            "no trial has failed" if other is None else f"trial {number} is {other.shown_status}, not failed"
        )
    return failed


def enqueued_params(spec: StudySpec, rows: Sequence[TrialRow], values: Mapping[str, object]) -> dict[str, HyperValue]:
    """Return the params of an enqueued configuration; trial 0's fill in missing ones.

    Any hyperparameter may be given, searched or not, inside its range or not: it is this trial's own.

    Raises:
        ConfigError: a value is not allowed, does not go together with others, or a trial has these values already; the
            message says what is allowed.
    """
    given = {name: _declared(name, value) for name, value in values.items()}
    for name in given:
        if name in RUN_LENGTH:
            raise ConfigError(f"{name} is the same in all trials of a study, which are compared by what they come to")
    params = dict(given) if spec.listed else spec.params_with(given)
    config = spec.config(params).to_dict()
    same = next((row.number for row in rows if row.config == config), None)
    if same is not None:
        raise ConfigError(f"trial {same} has these values already")
    if "mini_batch_size" in given and config["mini_batch_size"] != given["mini_batch_size"]:
        raise ConfigError(
            f"mini_batch_size = {given['mini_batch_size']} is not allowed; expected at most batch_size = "
            f"{config['batch_size']}"
        )
    return as_stored(params, config)


def _declared(name: str, value: object) -> HyperValue:
    if name not in HYPERPARAMETERS:
        raise ConfigError(f'unknown hyperparameter "{name}"{nearest(name, HYPERPARAMETERS)}')
    return HYPERPARAMETERS[name].coerce(value)


def changed_spec(spec: StudySpec, changes: Mapping[str, object]) -> StudySpec:
    """Return the spec changed by an order `set`; a change of `workers` is only checked.

    Raises:
        ConfigError: an unknown setting, or a value that is not allowed.
    """
    if not changes:
        raise ConfigError(f"set changes nothing; available: {', '.join(SETTINGS)}")
    for name, value in changes.items():
        if name not in SETTINGS:
            raise ConfigError(f'unknown setting "{name}"; available: {", ".join(SETTINGS)}{nearest(name, SETTINGS)}')
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_count = is_number and float(str(value)).is_integer() and float(str(value)) >= 1
        if name not in ("budget", "kl_budget") and not is_count:
            raise ConfigError(f"{name} = {value!r} is not allowed; expected a whole number of at least 1")
        if name == "workers" and float(str(value)) > MOST_WORKERS:
            raise ConfigError(f"workers = {value!r} is not allowed; expected at most {MOST_WORKERS}")
    changed = spec
    if "trials" in changes:
        changed = changed.with_trials(int(float(str(changes["trials"]))))
    if "budget" in changes:
        changed = changed.with_budget(changes["budget"], "budget")
    if "kl_budget" in changes:
        changed = changed.with_kl_budget(changes["kl_budget"], "kl_budget")
    return changed


def check(store: Store, view: StudyView, kind: str, trial: int | None, arguments: Mapping[str, Any]) -> None:
    """Raise if the controller would refuse the order now; for use before placing it.

    Raises:
        ConfigError: it does not fit the study; the message says what is allowed.
        StudyError: there is no such trial, or no run that could be ended.
    """
    if kind not in KINDS:
        raise ConfigError(f'unknown order "{kind}"; available: {", ".join(KINDS)}')
    row = None if trial is None else store.trial(view.row, trial)
    if kind == "enqueue":
        enqueued_params(view.spec, view.trials, arguments["values"])
    elif kind == "set":
        changed_spec(view.spec, arguments["changes"])
    elif kind == "retry":
        retried((*view.trials, *view.confirming), trial)
    elif kind == "fork":
        if row is None:
            raise ConfigError("a fork needs the trial to start from")
        _check_fork(view, row, arguments["values"], arguments.get("episode"))
    elif row is not None:
        check_trial_order(kind, row)
    elif kind == "stop" and not view.row.is_held:
        raise StudyError(f'nothing runs study "{view.row.name}", so there is no run to stop')
    else:
        check_study_order(kind, view.row)


def _check_fork(view: StudyView, parent: TrialRow, values: Mapping[str, Any], episode: int | None) -> None:
    """Raise ConfigError for an impossible fork. Whoever can read its checkpoint checks that, too.

    A trial without checkpoints here may have some elsewhere, or soon: then the controller decides.
    """
    if not parent.attempts and parent.role is not Role.FORK:  # which begins with a copy of a checkpoint
        raise ConfigError(f"trial {parent.number} has not started yet; a fork starts from a checkpoint")
    folder = upkeep.own_folder(view.row)
    if folder is not None and checkpoint.complete(folder / str(parent.number)):
        _, _, episode = forks.choose(folder / str(parent.number), episode)
    forks.check(parent.config, values, episode or 0)


def why_waiting(is_held: bool, go_on: str) -> str:
    """Return why an order is still undecided; `go_on` is the command that runs its study."""
    return "the controller has not read it yet" if is_held else f"nothing runs the study; to carry it out: {go_on}"

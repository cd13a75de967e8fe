"""Whether a controller would refuse an order as things stand: asked by whoever places one, before placing it."""

from collections.abc import Mapping
from typing import Any

from ppo_core import checkpoint
from ppo_core.errors import ConfigError, StudyError
from tuner import forking, order_checks, order_kinds, upkeep
from tuner.results import StudyView
from tuner.store import Store, TrialRow


def check(store: Store, view: StudyView, kind: str, trial: int | None, arguments: Mapping[str, Any]) -> None:
    """Raise where the controller would refuse the order as things stand.

    Raises:
        ConfigError: it does not fit the study; the message says what is allowed.
        StudyError: there is no such trial, or no run that could be ended.
    """
    if kind not in order_kinds.KINDS:
        raise ConfigError(f'there is no order "{kind}"; there are: {", ".join(order_kinds.KINDS)}')
    row = None if trial is None else store.trial(view.row, trial)
    if kind == "enqueue":
        order_checks.enqueued_params(view.spec, view.trials, arguments["values"])
    elif kind == "set":
        order_checks.changed_spec(view.spec, arguments["changes"])
    elif kind == "retry":
        order_checks.retried(view.trials, trial)
    elif kind == "fork":
        if row is None:
            raise ConfigError("a fork names the trial that it goes on from")
        _check_fork(view, row, arguments["values"], arguments.get("episode"))
    elif row is not None:
        order_checks.check_trial_order(kind, row)
    elif kind == "stop" and not view.row.is_held:
        raise StudyError(f'nothing runs study "{view.row.name}", so there is no run of it to end')
    else:
        order_checks.check_study_order(kind, view.row)


def _check_fork(view: StudyView, parent: TrialRow, values: Mapping[str, Any], episode: int | None) -> None:
    """Raise ConfigError for a fork that cannot be; where its checkpoint is looked for by who has it at hand.

    A trial without checkpoints here may have some elsewhere, or soon: then the controller decides.
    """
    if not parent.attempts:
        raise ConfigError(f"trial {parent.number} has not started yet; a fork begins at a checkpoint")
    folder = upkeep.own_folder(view.row)
    if folder is not None and checkpoint.complete(folder / str(parent.number)):
        _, _, episode = forking.choose(folder / str(parent.number), episode)
    forking.check(parent.config, values, episode or 0)


def why_waiting(is_held: bool, go_on: str) -> str:
    """Return why an order is not decided yet; `go_on` is the command that runs its study."""
    return "the controller has not read it yet" if is_held else f"nothing runs the study; it is read by: {go_on}"

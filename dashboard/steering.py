"""Orders from the dashboard: proposed, confirmed by a person, placed once."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dashboard import access
from ppo_core import checkpoint
from ppo_core.errors import PPOTunerError, StudyError
from tuner.control import orders
from tuner.files import folder as study_folder
from tuner.files import trial_log
from tuner.judge.forks import by_episode
from tuner.judge.results import StudyView, read_study
from tuner.store import Order, Store
from tuner.study.status import ORDER_KINDS


@dataclass(frozen=True)
class Proposal:
    """An order that a person has yet to confirm."""

    study_id: int
    study: str
    kind: str
    trial: int | None = None
    """Number of the trial concerned; None: the study."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Makes repeated confirmations a single order."""

    @property
    def sentence(self) -> str:
        """Sentence on the order's effect that names study and trial."""
        target = f'study "{self.study}"' if self.trial is None else f'trial {self.trial} of study "{self.study}"'
        effect = EFFECTS.get((self.kind, self.trial is None), ORDER_KINDS[self.kind].doc)
        return f"{self.kind.capitalize()} {target}: {effect}."


EFFECTS = {
    ("stop", True): "the current run ends once each running trial has finished its step; its trials can be resumed",
    ("stop", False): "it ends after this step, for good, and keeps what it reached",
    ("pause", True): "running trials save and wait, and no other starts",
    ("pause", False): "it saves and waits",
    ("resume", True): "its trials continue",
    ("resume", False): "it continues from its last checkpoint",
    ("retry", True): "all its failed trials run again",
    ("retry", False): "it runs again",
}
"""Effects by kind of order, and whether it concerns the whole study."""


def propose(
    store: Store, view: StudyView, kind: str, trial: int | None = None, arguments: Mapping[str, Any] | None = None
) -> Proposal:
    """Return an order to confirm, checked against the current study.

    Raises:
        ConfigError, StudyError: it would be refused; the message says why, and what is allowed.
    """
    orders.check(store, view, kind, trial, arguments or {})
    return Proposal(view.row.id, view.row.name, kind, trial, dict(arguments or {}))


def refusal(
    store: Store, view: StudyView, kind: str, trial: int | None = None, arguments: Mapping[str, Any] | None = None
) -> str | None:
    """Return why the study would now refuse an order, or None."""
    try:
        orders.check(store, view, kind, trial, arguments or {})
    except PPOTunerError as problem:
        return str(problem)
    return None


def place(store: Store, proposal: Proposal, token: str) -> Order:
    """Place a confirmed order and return it; placing it again has no effect.

    Raises:
        NotPermitted: the token is missing or wrong, or the dashboard is read-only.
        ConfigError, StudyError: the study has changed meanwhile, and would refuse it.
    """
    access.require_order(token)
    view = read_study(store, proposal.study)
    if view.row.id != proposal.study_id:
        raise StudyError(f'study "{proposal.study}" was deleted and created again meanwhile; nothing was done')
    for order in store.orders(view.row):
        if order.key == proposal.key:
            return order
    orders.check(store, view, proposal.kind, proposal.trial, proposal.arguments)
    return store.place_order(view.row, proposal.kind, proposal.trial, proposal.arguments, key=proposal.key)


def ran_as(view: StudyView, trial: int) -> str | None:
    """Return the process, host and GPUs of a trial's last attempt; None where its log is not here."""
    folder = study_folder.own_folder(view.row)
    return None if folder is None else trial_log.ran_as(folder / str(trial))


def fork_episodes(view: StudyView, trial: int) -> list[int]:
    """Return the episodes of a trial's checkpoints on this machine, the newest first."""
    folder = study_folder.own_folder(view.row)
    if folder is None or not checkpoint.complete(folder / str(trial)):
        return []
    return sorted(by_episode(folder / str(trial)), reverse=True)

"""What a study has cost and found, one row a study: pure functions from its view."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tuner.results import State, StudyView
from tuner.status import Status
from tuner.store import LEASE_SECONDS

Shown = State | Literal["stalled"]

WORDS: Mapping[Shown, str] = {
    "running": "▶ running",
    "paused": "‖ paused",
    "finished": "✓ finished",
    "unfinished": "■ not running",
    "stalled": "◌ stalled",
}


@dataclass(frozen=True)
class Cost:
    """Time that trials took, which is not the wall's where several ran at once."""

    hours: float
    seconds_a_trial: float | None
    """Mean over the trials that have ended; None: none has."""
    pruned_share: float | None
    """Share of the time that went into pruned trials, 0 to 1; None: no time was spent."""


def cost(view: StudyView) -> Cost:
    """Return what the study's trials cost so far."""
    spent = sum(row.seconds for row in view.trials)
    ended = [row.seconds for row in view.trials if row.status.is_final]
    pruned = sum(row.seconds for row in view.trials if row.status is Status.PRUNED)
    return Cost(spent / 3_600, sum(ended) / len(ended) if ended else None, pruned / spent if spent else None)


def shown_state(view: StudyView) -> Shown:
    """Return the study's state; `stalled`: its controller lives, and has given no sign of it for a while."""
    if view.state == "running" and (silence(view) or 0.0) > LEASE_SECONDS:
        return "stalled"
    return view.state


def silence(view: StudyView) -> float | None:
    """Return the seconds since its controller's last sign of life, by the store's clock; None: there is none."""
    if view.row.lease_renewed_at is None:
        return None
    now = time.time() if view.row.read_at is None else view.row.read_at
    return max(0.0, now - view.row.lease_renewed_at)


def last_sign(view: StudyView) -> float:
    """Return when something last happened in the study, in seconds since the epoch."""
    ended = [row.ended_at for row in view.trials if row.ended_at is not None]
    known = [view.row.lease_renewed_at, view.row.finished_at, view.row.paused_at, *ended]
    return max([view.row.created_at, *(at for at in known if at is not None)])

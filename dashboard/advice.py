"""What to do next with a study, as a pure function: the first that applies of a list of situations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dashboard import costs
from dashboard.data import Snapshot
from dashboard.wall import Card
from tuner.status import Status


@dataclass(frozen=True)
class Advice:
    """One thing to do."""

    level: Literal["error", "warning", "info"]
    text: str
    """Our own words alone."""
    command: tuple[str, ...] = ()
    """The words of the `ppo-tuner` command that does it, if one does."""


def next_steps(snapshot: Snapshot, cards: Sequence[Card]) -> list[Advice]:
    """Return what to do next, the most pressing first. Never empty for a study that has a trial."""
    view, name = snapshot.view, snapshot.view.row.name
    found = [*_of_state(snapshot), *_of_trials(cards, name)]
    ended = [row for row in view.trials if row.status.is_final]
    if ended and all(row.status is Status.FAILED for row in ended):
        text = (
            "Every trial that ended has failed; the reasons are in the table below. Mend the cause, then try the "
            "failed trials again or run the study under another name."
        )
        found.insert(0, Advice("error", text, ("retry", name)))
    elif len(ended) >= snapshot.total and view.best() is None:
        text = (
            "No trial ended within the KL budget. Search lower learning rates or a higher β, or ask for the best "
            "under a higher budget."
        )
        found.append(Advice("warning", text, ("best", name, "--kl-budget", f"{2 * view.spec.kl_budget:g}")))
    elif view.state == "finished":
        text = (
            "The study has reached its total. Look at Reward and KL, read samples of its best trial, then train with "
            "what it found."
        )
        found.append(Advice("info", text, ("best", name)))
    if not found:
        what = "The first trials set the scale" if len(ended) < 5 else "All is well"
        found.append(Advice("info", f"{what}: nothing to do. Curves shows the trials side by side."))
    return found


def _of_state(snapshot: Snapshot) -> list[Advice]:
    state, name, found = costs.shown_state(snapshot.view), snapshot.view.row.name, []
    if snapshot.view.row.archived_at is not None:
        found.append(Advice("info", "This study is archived: lists leave it out.", ("archive", name, "--undo")))
    if state == "stalled":
        text = "The controller's process lives and has given no sign of life for over a minute: look at its terminal."
        found.append(Advice("error", text))
    elif state == "paused":
        found.append(Advice("warning", "The study is paused: no trial runs until it goes on.", ("resume", name)))
    elif state == "unfinished":
        text = "Nothing runs this study. Run it again: it goes on where it stopped."
        found.append(Advice("warning", text, ("run", name)))
    return found


def _of_trials(cards: Sequence[Card], name: str) -> list[Advice]:
    by_health: dict[str, list[str]] = {}
    for card in cards:
        by_health.setdefault(card.health, []).append(str(card.number))
    found = []
    if stalled := by_health.get("stalled"):
        text = f"Silent for far longer than a step takes: trial {', '.join(stalled)}. Its log may say why."
        found.append(Advice("error", text, ("logs", name, stalled[0])))
    if over := by_health.get("over the limit", []) + by_health.get("near the limit", []):
        text = f"Near the guard's KL limit or over it: trial {', '.join(over)}. Curves, Incident says what moved first."
        found.append(Advice("warning", text))
    if paused := by_health.get("paused"):
        found.append(Advice("info", f"Paused: trial {', '.join(paused)}.", ("resume", name, paused[0])))
    return found

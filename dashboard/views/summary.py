"""A study's head: its state, how far it is, the best it has found, what it cost, and what to do next."""

from collections.abc import Sequence
from typing import Literal

import streamlit as st

from dashboard import advice, costs, data, untrusted
from dashboard.costs import Shown
from dashboard.data import Snapshot
from dashboard.views import by_beta, common
from dashboard.wall import Card
from ppo_core.metrics import METRICS
from tuner.results import StudyView
from tuner.scoring import RULE
from tuner.status import Status

_BADGES: dict[Shown, tuple[str, str, Literal["green", "blue", "orange", "red"]]] = {
    "running": ("running", ":material/play_arrow:", "green"),
    "paused": ("paused", ":material/pause:", "orange"),
    "finished": ("finished", ":material/check:", "blue"),
    "unfinished": ("not running", ":material/stop_circle:", "orange"),
    "stalled": ("stalled", ":material/hourglass_disabled:", "red"),
}


def draw(snapshot: Snapshot, baseline: float | None) -> None:
    """Draw the state line and the cards; where there is nothing to see yet, what to do."""
    _state_line(snapshot.view)
    if snapshot.view.trials:
        _cards(snapshot, baseline)
    else:
        text = "The study is recorded, and its first trial has not begun: loading the task takes some seconds."
        common.not_begun(snapshot, "No trials yet", text)


def next_steps(snapshot: Snapshot, cards: Sequence[Card]) -> None:
    """Draw what to do next."""
    boxes = {"error": st.error, "warning": st.warning, "info": st.info}
    for one in advice.next_steps(snapshot, cards):
        boxes[one.level](one.text)
        if one.command:
            st.code(data.command(one.command), language=None)
    by_beta.link(snapshot)


def _state_line(view: StudyView) -> None:
    label, icon, color = _BADGES[costs.shown_state(view)]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge(label, icon=icon, color=color)
        if view.row.archived_at is not None:
            st.badge("archived", icon=":material/inventory_2:", color="gray")
        last = f", last sign of life {common.ago(costs.last_sign(view))}" if view.trials else ""
        st.text(f"Task {untrusted.one_line(view.spec.task)}, begun {common.ago(view.row.created_at)}{last}")


def _cards(snapshot: Snapshot, baseline: float | None) -> None:
    with st.grid(5, min_column_width=170):
        for label, value, note, help_text in (*_progress(snapshot), *_best(snapshot, baseline), _cost(snapshot.view)):
            st.metric(
                label, value, note, delta_color="off", delta_arrow="off", border=True, height="stretch", help=help_text
            )


_Card = tuple[str, str, str | None, str]


def _progress(snapshot: Snapshot) -> tuple[_Card, ...]:
    view = snapshot.view
    shown = [row.shown_status for row in view.trials if not row.status.is_final]
    under_way = ", ".join(f"{shown.count(status)} {status}" for status in dict.fromkeys(shown))
    failed = sum(row.status is Status.FAILED for row in view.trials)
    others = sum(row.status is Status.PRUNED for row in view.trials) - len(snapshot.kl_pruned)
    notes = [f"{count} {what}" for count, what in ((others, "pruned otherwise"), (failed, "failed")) if count]
    return (
        (
            "Trials ended",
            f"{snapshot.ended} of {snapshot.total}",
            under_way or None,
            "Ended in any way: completed, pruned, failed or stopped.",
        ),
        (
            "Pruned for KL",
            f"{len(snapshot.kl_pruned)}",
            ", ".join(notes) or None,
            "Trials that the guard ended because their KL went over its limit. Below: those that it ended for another "
            "reason, such as learning nothing, and those that failed.",
        ),
    )


def _best(snapshot: Snapshot, baseline: float | None) -> tuple[_Card, ...]:
    view, best = snapshot.view, snapshot.view.best()
    gained = "no trial within it yet"
    if best is not None and best.value is not None:
        gained = f"trial {best.number}"
        if baseline is not None:
            gained += f", {best.value - baseline:+.2f} on SFT"
    return (
        (
            "Best in the budget",
            "–" if best is None or best.value is None else f"{best.value:.2f}",
            gained,
            f"{RULE} Beside it: how far its eval reward is above the SFT policy's, before training.",
        ),
        (
            "Its KL",
            "–" if best is None or best.kl is None else f"{best.kl:.1f} nats",
            f"budget {view.spec.kl_budget:g} nats",
            f"Eval KL of the best trial in {METRICS['eval/kl'].unit}, over the same evaluations as its reward.",
        ),
    )


def _cost(view: StudyView) -> _Card:
    spent = costs.cost(view)
    notes = []
    if spent.seconds_a_trial is not None:
        notes.append(f"{spent.seconds_a_trial:,.0f} s each")
    if spent.pruned_share is not None:
        notes.append(f"{spent.pruned_share:.0%} pruned")
    help_text = (
        "Time that trials trained, over all attempts; where several ran at once, each counts. Below: the mean of those "
        "that ended, and the share of the time that pruned ones took."
    )
    return "Cost so far", hours(spent.hours), ", ".join(notes) or None, help_text


def hours(value: float) -> str:
    """Return a duration in hours, with digits as it needs them."""
    return f"{value:.1f} h" if value >= 1 else f"{60 * value:.0f} min"

"""A study's head: its state, how far it is, and the best it has found."""

import time
from typing import Literal

import streamlit as st

from dashboard import untrusted
from dashboard.data import Snapshot
from dashboard.views import common
from tuner.best import RULE
from tuner.results import State, StudyView
from tuner.status import Status

_BADGES: dict[State, tuple[str, str, Literal["green", "blue", "orange"]]] = {
    "running": ("running", ":material/play_arrow:", "green"),
    "paused": ("paused", ":material/pause:", "orange"),
    "finished": ("finished", ":material/check:", "blue"),
    "unfinished": ("not running", ":material/stop_circle:", "orange"),
}


def draw(snapshot: Snapshot, baseline: float | None) -> None:
    """Draw the state line and the cards; where there is nothing to see yet, what to do."""
    _state_line(snapshot.view)
    if snapshot.view.trials:
        _cards(snapshot, baseline)
        _advice(snapshot)
    else:
        common.guide(
            "No trials yet",
            "The study is recorded, and its first trial has not begun: preparing a task takes about a minute. If "
            "nothing runs it, run its file again; it goes on where it is.",
            ["ppo-tuner run STUDY.toml"],
        )


def _state_line(view: StudyView) -> None:
    label, icon, color = _BADGES[view.state]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge(label, icon=icon, color=color)
        st.text(f"Task {untrusted.one_line(view.spec.task)}, begun {common.ago(view.row.created_at)}{_sign(view)}")


def _sign(view: StudyView) -> str:
    if view.state == "running" and view.row.lease_renewed_at is not None:
        return f", last sign of life {max(0.0, time.time() - view.row.lease_renewed_at):.0f} s ago"
    if view.row.finished_at is not None:
        return f", finished {common.ago(view.row.finished_at)}"
    if view.state == "paused":
        return f". Go on with: ppo-tuner resume {view.row.name}"
    return ". Run its file again and it goes on where it stopped."


def _cards(snapshot: Snapshot, baseline: float | None) -> None:
    view, best = snapshot.view, snapshot.view.best()
    under_way = sum(not row.status.is_final for row in view.trials)
    failed = sum(row.status is Status.FAILED for row in view.trials)
    gained = "no trial within it yet"
    if best is not None and best.value is not None:
        gained = f"trial {best.number}"
        if baseline is not None:
            gained += f", {best.value - baseline:+.2f} on SFT"
    cards = (
        (
            "Trials ended",
            f"{snapshot.ended} of {snapshot.total}",
            f"{under_way} {'interrupted' if view.state == 'unfinished' else view.state}" if under_way else None,
            "Ended in any way: completed, pruned, failed or stopped.",
        ),
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
            "Eval KL of the best trial in nats per response, over the same evaluations as its reward.",
        ),
        (
            "Pruned for KL",
            f"{len(snapshot.kl_pruned)}",
            f"{failed} failed" if failed else None,
            "Trials that the guard ended because their KL went over its limit.",
        ),
    )
    with st.grid(len(cards), min_column_width=150):
        for label, value, note, help_text in cards:
            st.metric(
                label, value, note, delta_color="off", delta_arrow="off", border=True, height="stretch", help=help_text
            )


def _advice(snapshot: Snapshot) -> None:
    """Say what to do where the study came to nothing."""
    ended = [row for row in snapshot.view.trials if row.status.is_final]
    if ended and all(row.status is Status.FAILED for row in ended):
        st.error(
            "Every trial that ended has failed; the reasons are in the table below, all of one's steps in "
            "`ppo-tuner show STUDY TRIAL`. Mend the cause, then run the study under another name."
        )
    elif len(ended) == snapshot.total and snapshot.view.best() is None:
        st.warning(
            "No trial ended within the KL budget. Search lower learning rates or a higher β, or ask for the best "
            "under a higher budget: `ppo-tuner best STUDY --kl-budget X`."
        )

"""Running trials, a card each, those needing attention first; and the latest events."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import data, health, safe_text, style
from dashboard.data import Snapshot
from dashboard.health import HEALTH_MARKS as MARKS
from dashboard.health import LEAST_SECONDS, NEAR, TIMES_USUAL, Card
from dashboard.views.common import ago, duration, trial_link
from ppo_core.metrics import METRICS
from tuner.store import Store, TrialRow

MOST_CARDS = 12


def draw(cards: Sequence[Card], limit: float) -> None:
    """Draw the cards of unfinished trials, if any."""
    if not cards:
        return
    st.subheader(
        "Unfinished trials",
        anchor=False,
        help=f"Near the limit: KL from {NEAR:.0%} of the guard's {limit:g} nats on. Stalled: silent for "
        f"{TIMES_USUAL:g} usual steps and at least {LEAST_SECONDS:g} s. Interrupted: no controller is running; the "
        "next run resumes it.",
    )
    with st.grid(min(4, max(2, len(cards))), min_column_width=220):
        for card in cards[:MOST_CARDS]:
            with st.container(border=True):
                _card(card, limit)
    more = len(cards) - MOST_CARDS
    if more > 0:
        st.caption(f"And {more} more.")


def _card(card: Card, limit: float) -> None:
    glyph, colour = MARKS[card.health]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.html(style.heading(card.number), width="content")
        st.badge(f"{glyph} {card.health}", color=colour)
    st.progress(card.progress, text=f"{card.progress:.0%} of its episodes")
    st.text("\n".join(lines(card, limit)))
    trial_link(card.number, "Its page")


def lines(card: Card, limit: float) -> list[str]:
    """Return a card's text, line by line."""
    kl = "no KL yet" if card.kl is None else f"KL {card.kl:.1f} of {limit:g} {METRICS['eval/kl'].unit}"
    reward = "" if card.reward is None else f"eval reward {card.reward:.2f}"
    score = "" if card.score is None else f"score {card.score:.2f}"
    what = "last report" if card.step is not None else "queued" if card.health == "waiting" else "started"
    since = f"{what} {duration(card.silent)} ago"
    usual = "" if card.usual is None else f", usually {card.usual:.1f} s per step"
    step = "" if card.step is None else f"step {card.step}, "
    return [line for line in (kl, ", ".join(part for part in (reward, score) if part), f"{step}{since}{usual}") if line]


def read(store: Store, snapshot: Snapshot) -> list[Card]:
    """Return the cards of unfinished trials."""
    row = snapshot.view.row
    going = [trial.number for trial in snapshot.view.trials if not trial.status.is_final]
    steps = data.curves(store, snapshot, health.READ, numbers=going)
    return health.cards(
        snapshot.view.trials, steps, limit=snapshot.view.spec.kl_limit, now=row.read_at or row.created_at
    )


LATEST = 8
"""Number of latest events shown."""


def happened(store: Store, snapshot: Snapshot) -> None:
    """Draw the latest starts and ends of trials, with reasons."""
    if not snapshot.view.trials:
        return
    st.subheader("What happened", anchor=False, help="Trials that started or ended last.")
    rows = sorted(snapshot.view.trials, key=lambda row: row.ended_at or row.started_at, reverse=True)[:LATEST]
    shown = pd.DataFrame(
        {
            "trial": [row.number for row in rows],
            "status": [style.status_cell(row) for row in rows],
            "when": [_when(row) for row in rows],
            "reason": [safe_text.cell(row.reason.message) if row.reason else "" for row in rows],
        }
    )
    st.dataframe(
        shown, key="happened", hide_index=True, placeholder="",
        column_config={
            "trial": st.column_config.NumberColumn("Trial", width=55, pinned=True),
            "status": st.column_config.TextColumn("Status", width=120),
            "when": st.column_config.TextColumn("Started or ended", width=140),
            "reason": st.column_config.TextColumn("Reason", width=260),
        },
    )  # fmt: skip


def _when(row: TrialRow) -> str:
    """Return a trial's latest event: `ended 3 min ago`."""
    return f"started {ago(row.started_at)}" if row.ended_at is None else f"ended {ago(row.ended_at)}"

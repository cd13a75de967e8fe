"""Unfinished trials, a card each, those needing attention first; and the latest events."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import data, health, safe_text, style
from dashboard.data import Snapshot
from dashboard.health import HEALTH_MARKS, LEAST_SECONDS, NEAR, TIMES_USUAL, Card
from dashboard.views.common import ago, heading, looks, table, trial_link
from ppo_core.metrics import METRICS
from ppo_core.output import duration
from tuner.store import Store

MOST_CARDS = 12
MOST_EVENTS = 8


def draw(snapshot: Snapshot, cards: Sequence[Card]) -> None:
    """Draw the cards of unfinished trials, if any."""
    if not cards:
        return
    limit, shown = snapshot.view.spec.kl_limit, cards[:MOST_CARDS]
    look_of = looks(snapshot, [card.number for card in shown])
    heading(
        "Unfinished trials",
        f"Near the limit: KL from {NEAR:.0%} of the guard's {limit:g} nats on. Stalled: silent for "
        f"{TIMES_USUAL:g} usual steps and at least {LEAST_SECONDS:g} s. Interrupted: no controller is running; the "
        "next run resumes it.",
    )
    with st.grid(min(4, max(2, len(cards))), min_column_width=220):
        for card in shown:
            with st.container(border=True):
                _card(card, look_of[card.number], limit)
    more = len(cards) - MOST_CARDS
    if more > 0:
        st.caption(f"And {more} more.")


def _card(card: Card, look: style.Look, limit: float) -> None:
    glyph, colour = HEALTH_MARKS[card.health]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.html(style.heading(card.number, look), width="content")
        st.badge(f"{glyph} {card.health}", color=colour)
    st.progress(card.progress, text=f"{card.progress:.0%} of its episodes")
    st.text(_card_text(card, limit))
    trial_link(card.number, "Its page")


def _card_text(card: Card, limit: float) -> str:
    kl = "no KL yet" if card.kl is None else f"KL {card.kl:.1f} of {limit:g} {METRICS['eval/kl'].unit}"
    scores = {"eval reward": card.reward, "score": card.score}
    rewards = ", ".join(f"{name} {value:.2f}" for name, value in scores.items() if value is not None)
    if card.step is not None:
        progress = f"step {card.step}, last report"
    else:
        progress = "queued" if card.health == "waiting" else "started"
    usual = "" if card.usual is None else f", usually {card.usual:.1f} s per step"
    return "\n".join(filter(None, [kl, rewards, f"{progress} {duration(card.silent)} ago{usual}"]))


def read_cards(store: Store, snapshot: Snapshot) -> list[Card]:
    """Return the cards of unfinished trials."""
    view, row = snapshot.view, snapshot.view.row
    unfinished = [trial.number for trial in view.trials if not trial.status.is_final]
    steps = data.curves(store, snapshot, health.READ, numbers=unfinished)
    return health.cards(view.trials, steps, limit=view.spec.kl_limit, now=row.read_at or row.created_at)


def draw_events(store: Store, snapshot: Snapshot) -> None:
    """Draw the latest starts and ends of trials, with reasons."""
    if not snapshot.view.trials:
        return
    heading("What happened", "Trials that started or ended last.")
    rows = sorted(snapshot.view.trials, key=lambda row: row.ended_at or row.started_at, reverse=True)[:MOST_EVENTS]
    events = pd.DataFrame(
        {
            "trial": row.number,
            "status": style.status_cell(row),
            "when": f"started {ago(row.started_at)}" if row.ended_at is None else f"ended {ago(row.ended_at)}",
            "reason": safe_text.cell(row.reason.message) if row.reason else "",
        }
        for row in rows
    )
    text = st.column_config.TextColumn
    table(
        events,
        "happened",
        {
            "trial": st.column_config.NumberColumn("Trial", width=55, pinned=True),
            "status": text("Status", width=120),
            "when": text("Started or ended", width=140),
            "reason": text("Reason", width=260),
        },
    )

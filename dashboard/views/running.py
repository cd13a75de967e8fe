"""The trials that run now: a card for each with a verdict, what needs attention first."""

from collections.abc import Sequence

import streamlit as st

from dashboard import data, health, style
from dashboard.data import Snapshot
from dashboard.health import HEALTH_MARKS as MARKS
from dashboard.health import LEAST_SECONDS, NEAR, TIMES_USUAL, Card
from dashboard.views.common import duration, trial_link
from ppo_core.metrics import METRICS
from tuner.store import Store

MOST_CARDS = 12


def draw(cards: Sequence[Card], limit: float) -> None:
    """Draw the live cards; nothing where no trial is under way."""
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
    """Return what a card says, line by line."""
    kl = "no KL yet" if card.kl is None else f"KL {card.kl:.1f} of {limit:g} {METRICS['eval/kl'].unit}"
    reward = "" if card.reward is None else f"eval reward {card.reward:.2f}"
    score = "" if card.score is None else f"score {card.score:.2f}"
    what = "last report" if card.step is not None else "queued" if card.health == "waiting" else "started"
    since = f"{what} {duration(card.silent)} ago"
    usual = "" if card.usual is None else f", usually {card.usual:.1f} s per step"
    step = "" if card.step is None else f"step {card.step}, "
    return [line for line in (kl, ", ".join(part for part in (reward, score) if part), f"{step}{since}{usual}") if line]


def read(store: Store, snapshot: Snapshot) -> list[Card]:
    """Return the cards of the trials that have started and not ended."""
    row = snapshot.view.row
    going = [trial.number for trial in snapshot.view.trials if not trial.status.is_final]
    steps = data.curves(store, snapshot, health.READ, numbers=going)
    return health.cards(
        snapshot.view.trials, steps, limit=snapshot.view.spec.kl_limit, now=row.read_at or row.created_at
    )

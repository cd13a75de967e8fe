"""The live wall: a card for each trial under way, with a verdict, what needs a look first."""

from collections.abc import Sequence

import streamlit as st

from dashboard import appearance
from dashboard.views.common import duration
from dashboard.wall import LEAST_SECONDS, MARKS, NEAR, TIMES_USUAL, Card
from ppo_core.metrics import METRICS

MOST_CARDS = 12


def draw(cards: Sequence[Card], limit: float) -> None:
    """Draw the wall; nothing where no trial is under way."""
    if not cards:
        return
    st.subheader("Under way", anchor=False)
    with st.grid(min(4, max(2, len(cards))), min_column_width=220):
        for card in cards[:MOST_CARDS]:
            with st.container(border=True):
                _card(card, limit)
    more = len(cards) - MOST_CARDS
    st.caption(
        f"{f'{more} more are under way. ' if more > 0 else ''}Near the limit: KL from {NEAR:.0%} of the guard's "
        f"{limit:g} nats on. Stalled: silent for {TIMES_USUAL:g} usual steps and at least {LEAST_SECONDS:g} s. "
        "Interrupted: no controller lives; the next run takes it up."
    )


def _card(card: Card, limit: float) -> None:
    glyph, colour = MARKS[card.health]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.html(appearance.heading(card.number), width="content")
        st.badge(f"{glyph} {card.health}", color=colour)
    st.progress(card.progress, text=f"{card.progress:.0%} of its episodes")
    st.text("\n".join(lines(card, limit)))


def lines(card: Card, limit: float) -> list[str]:
    """Return what a card says, line by line."""
    kl = "no KL yet" if card.kl is None else f"KL {card.kl:.1f} of {limit:g} {METRICS['eval/kl'].unit}"
    reward = "" if card.reward is None else f"eval reward {card.reward:.2f}"
    score = "" if card.score is None else f"score {card.score:.2f}"
    since = (
        f"last report {duration(card.silent)} ago" if card.step is not None else f"begun {duration(card.silent)} ago"
    )
    usual = "" if card.usual is None else f", usually {card.usual:.1f} s a step"
    step = "" if card.step is None else f"step {card.step}, "
    return [line for line in (kl, ", ".join(part for part in (reward, score) if part), f"{step}{since}{usual}") if line]

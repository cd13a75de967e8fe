"""Unfinished trials, as cards or in a table, those needing attention first; and the latest events."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import data, health, safe_text, style
from dashboard.data import Snapshot
from dashboard.health import HEALTH_MARKS, LEAST_SECONDS, NEAR, TIMES_USUAL, Card
from dashboard.views.common import ONE_TRIAL, ago, heading, looks, page_link, table
from ppo_core.metrics import METRICS
from ppo_core.output import decimals, duration, fixed, measured, pluralize
from tuner.store import Store, TrialRow
from tuner.study.rules import KL, RULES
from tuner.study.status import Role, Status

MOST_CARDS = 12
MOST_EVENTS = 12


def draw(snapshot: Snapshot, cards: Sequence[Card]) -> None:
    """Draw the cards of unfinished trials, if any."""
    if not cards:
        return
    limit, shown = snapshot.view.spec.kl_limit, cards[:MOST_CARDS]
    look_of = looks(snapshot, [card.number for card in shown])
    places = decimals(card.reward for card in shown)
    heading(
        "Unfinished trials",
        f"Near the limit: KL from {NEAR:.0%} of the guard's {pluralize(limit, 'nat')} on. Stalled: silent for "
        f"{TIMES_USUAL:g} usual steps and at least {LEAST_SECONDS:g} s. Interrupted: no controller is running; the "
        "next run resumes it.",
    )
    with st.grid(min(4, max(2, len(cards))), min_column_width=220):
        for card in shown:
            with st.container(border=True):
                _card(card, look_of[card.number], limit, places)
    more = len(cards) - MOST_CARDS
    if more > 0:
        st.caption(f"And {more} more.")


def _card(card: Card, look: style.Look, limit: float, places: int) -> None:
    glyph, colour = HEALTH_MARKS[card.health]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.html(style.heading(card.number, look), width="content")
        usual = None if card.usual is None else f"Usually {card.usual:.1f} s per step."
        st.badge(f"{glyph} {card.health}", color=colour, help=usual)
    st.progress(card.progress, text=f"{card.progress:.0%} of its episodes")
    st.text(_card_text(card, limit, places))
    page_link("runs", f"Open trial {card.number}", view=ONE_TRIAL, n=f"{card.number}")


def _card_text(card: Card, limit: float, places: int) -> str:
    kl = "no KL yet" if card.kl is None else f"training KL {measured(card.kl)} of {pluralize(limit, 'nat')}"
    reward = "" if card.reward is None else f"eval reward {fixed(card.reward, places)}"
    if card.step is not None:
        progress = f"step {card.step}, last report"
    else:
        progress = "queued" if card.health == "waiting" else "started"
    return "\n".join(filter(None, [kl, reward, f"{progress} {duration(card.silent)} ago"]))


def read_cards(store: Store, snapshot: Snapshot, *, with_confirming: bool = False) -> list[Card]:
    """Return the cards of unfinished trials, `with_confirming` also of unfinished confirming runs."""
    view, row = snapshot.view, snapshot.view.row
    rows = snapshot.runs if with_confirming else view.trials
    unfinished = [trial.number for trial in rows if not trial.status.is_final]
    steps = data.curves(store, snapshot, health.READ, numbers=unfinished)
    return health.cards(rows, steps, limit=view.spec.kl_limit, now=row.read_at or row.created_at)


def draw_table(store: Store, snapshot: Snapshot) -> None:
    """Draw the trials and confirming runs that run or wait as a table, if any."""
    view, cards = snapshot.view, read_cards(store, snapshot, with_confirming=True)
    if not cards:
        return
    heading("Running and queued" if view.row.has_controller else "Unfinished trials")
    row_of = {row.number: row for row in snapshot.runs}
    text, number = st.column_config.TextColumn, st.column_config.NumberColumn
    table(
        pd.DataFrame(_unfinished(card, row_of[card.number]) for card in cards),
        "unfinished",
        {
            "trial": number("Trial", width=50, pinned=True),
            "status": text("Status", width=105),
            "episodes": text("Episodes", width=105),
            "kl": number("Training KL", format="%.1f", width=85, help=METRICS[KL].doc),
            "time": text("Time", width=110, help="Training time so far, and how long the rest takes at its pace."),
            "what": text("What it is", width=170),
        },
        placeholder="–",
    )


def _unfinished(card: Card, row: TrialRow) -> dict[str, object]:
    left = time_left(row)
    return {
        "trial": card.number,
        "status": f"{HEALTH_MARKS[card.health][0]} {card.health}",
        "episodes": f"{row.episodes:,} of {row.config['total_episodes']:,}",
        "kl": card.kl,
        "time": duration(row.seconds) + (f", {left}" if left else ""),
        "what": safe_text.cell(what_it_is(row)),
    }


def time_left(row: TrialRow) -> str:
    """Return about how long a running trial still takes; empty if it does not run, or its pace is not known."""
    left = int(row.config["total_episodes"] or 0) - row.episodes
    if row.status is not Status.RUNNING or row.is_interrupted or not row.episodes or left <= 0:
        return ""
    return f"{duration(row.seconds * left / row.episodes)} left"


def what_it_is(row: TrialRow) -> str:
    """Return a trial's label and how it came about: `reference`, `fork of 3`, `confirms trial 25, seed 2`."""
    origin = row.origin.value
    if row.role is Role.CONFIRM:
        origin = f"confirms trial {row.parent}, seed {row.seed}"
    elif row.role is Role.FORK:
        origin = f"fork of {row.parent}"
    return f"{row.label}, {origin}" if row.label else origin


def draw_events(store: Store, snapshot: Snapshot) -> None:
    """Draw the latest starts, pauses and ends of trials and confirming runs, with reasons."""
    rows = sorted(snapshot.runs, key=lambda row: row.ended_at or row.started_at, reverse=True)[
        : 3 * MOST_EVENTS
    ]  # pauses are later than starts
    if not rows:
        return
    heading("What happened", "Trials and confirming runs that started, were paused or ended last.")
    paused = [row.number for row in rows if row.status is Status.PAUSED]
    paused_at = data.curves(store, snapshot, health.READ, numbers=paused).groupby("trial")["at"].max()
    events = sorted((_event(row, paused_at.get(row.number)) for row in rows), key=lambda event: event[0], reverse=True)
    text = st.column_config.TextColumn
    table(
        pd.DataFrame(cells for _, cells in events[:MOST_EVENTS]),
        "happened",
        {
            "trial": st.column_config.NumberColumn("Trial", width=45, pinned=True),
            "status": text("Status", width=95),
            "when": text("When", width=110),
            "reason": text("Reason", width=310),
        },
    )


def _event(row: TrialRow, paused_at: float | None) -> tuple[float, dict[str, object]]:
    """Return when the latest happened to a trial, and its row of the table; `paused_at` is its last report's time."""
    at, reason = row.ended_at or paused_at or row.started_at, ""
    if row.reason is not None:
        rule = RULES.get(row.reason.rule)  # its label is short enough for the column
        reason = row.reason.message if rule is None else f"{rule.label} at step {row.reason.step}"
    reasons = [what_it_is(row) if row.role is Role.CONFIRM else "", reason]
    cells = {
        "trial": row.number,
        "status": style.status_cell(row),
        "when": ago(at),
        "reason": safe_text.cell("; ".join(filter(None, reasons))),
    }
    return at, cells

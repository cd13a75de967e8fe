"""The first page: all studies, then the chosen one. How it stands, what runs, what ended why, what to do next."""

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import data, wall
from dashboard.data import Snapshot
from dashboard.views import common, live_wall, studies, summary, table
from dashboard.wall import Card
from tuner.store import Store

BASELINE_FROM = 8
"""Trials whose first evaluation is the SFT policy's: it is the same in all of them."""


def page() -> None:
    """Draw the page."""
    with common.problems_told():
        store = common.open_store()
        studies.section(store)
        name = common.choose_study(store)
        if name is not None:
            _study(store, data.snapshot(store, name))


def _study(store: Store, snapshot: Snapshot) -> None:
    head = st.container()
    chosen = _chosen(snapshot) if snapshot.view.trials else ()
    live = st.fragment(_live, run_every=common.refresh_every(snapshot.view))
    # The fragment's first run draws what the page has read just now; its later ones read anew.
    live(snapshot, [snapshot], head, chosen)
    if _is_large(snapshot):
        table.draw(snapshot, chosen)


def _is_large(snapshot: Snapshot) -> bool:
    return len(snapshot.view.trials) > table.MOST_LIVE


def _chosen(snapshot: Snapshot) -> tuple[int, ...]:
    st.subheader("Trials", anchor=False)
    help_text = "The table shows these, and other pages, too. Nothing chosen: the table shows all."
    return common.choose_trials(snapshot, help_text)


def _live(drawn: Snapshot, fresh: list[Snapshot], head: DeltaGenerator, chosen: tuple[int, ...]) -> None:
    """Draw what changes while the study runs; `drawn` is what the rest shows, `head` the place above the controls."""
    with common.problems_told():
        store = common.open_store()
        snapshot = fresh.pop() if fresh else data.snapshot(store, drawn.view.row.name)
        begun = bool(snapshot.view.trials)
        if snapshot.view.state != drawn.view.state or begun != bool(drawn.view.trials):
            st.rerun()  # the whole page: with or without its timer, controls and sections
        with head:
            summary.draw(snapshot, _baseline(store, snapshot))
            st.text(common.freshness(snapshot.view))
            if begun:
                under_way = _cards(store, snapshot)
                live_wall.draw(under_way, snapshot.view.spec.kl_limit)
                st.subheader("What to do next", anchor=False)
                summary.next_steps(snapshot, under_way)
        if begun and not _is_large(drawn):
            table.draw(snapshot, chosen)
        elif (more := snapshot.ended - drawn.ended) > 0 and st.button(
            f"{more} more ended: draw the table again", icon=":material/refresh:"
        ):
            st.rerun()


def _cards(store: Store, snapshot: Snapshot) -> list[Card]:
    row = snapshot.view.row
    going = [trial.number for trial in snapshot.view.trials if not trial.status.is_final]
    steps = data.curves(store, snapshot, wall.READ, numbers=going)
    return wall.cards(snapshot.view.trials, steps, limit=snapshot.view.spec.kl_limit, now=row.read_at or row.created_at)


def _baseline(store: Store, snapshot: Snapshot) -> float | None:
    first = [row.number for row in snapshot.view.trials[:BASELINE_FROM]]
    steps = data.curves(store, snapshot, ("eval/reward",), numbers=first, evaluations_only=True)
    return data.baseline(steps)

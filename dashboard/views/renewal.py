"""How fresh an analysis page is: its figures stand still, so that a zoom stays, and a button draws them anew."""

import time
from collections.abc import Collection
from dataclasses import dataclass

import streamlit as st

from dashboard import costs, data
from dashboard.analysis import front
from dashboard.data import Snapshot
from dashboard.views import common
from tuner.store import Store


@dataclass(frozen=True)
class Standing:
    """What a page draws from, as it stood at one moment."""

    state: str
    evaluations: int
    ended: int
    """Trials of the study that have ended."""


def line(store: Store, snapshot: Snapshot, numbers: Collection[int] | None = None) -> None:
    """Say when the page was drawn; while the study runs, look for more, and offer to draw the page anew.

    Args:
        store: Where the study is.
        snapshot: What the page draws.
        numbers: Trials whose evaluations it draws; None: all.
    """
    drawn = standing(store, snapshot, numbers)
    look = st.fragment(_look, run_every=common.refresh_every(snapshot.view))
    look(snapshot.view.row.name, drawn, time.time(), [snapshot], numbers)


def standing(store: Store, snapshot: Snapshot, numbers: Collection[int] | None = None) -> Standing:
    """Return how the study and the evaluations of the trials `numbers` (None: of all) stand."""
    evaluated = data.curves(store, snapshot, front.EVALUATED, numbers=numbers, evaluations_only=True)
    return Standing(costs.shown_state(snapshot.view), len(front.evaluations(evaluated)), snapshot.ended)


def news(drawn: Standing, now: Standing) -> str:
    """Return what there is now that the page does not show yet; empty: nothing."""
    said = [
        f"{more} new {thing}{'s' if more > 1 else ''}{what}"
        for more, thing, what in (
            (now.evaluations - drawn.evaluations, "evaluation", ""),
            (now.ended - drawn.ended, "trial", " ended"),
        )
        if more > 0
    ]
    state = now.state if now.state != "unfinished" else "not run any more"
    return ", ".join([*said, f"the study is {state}"] if now.state != drawn.state else said)


def _look(name: str, drawn: Standing, drawn_at: float, fresh: list[Snapshot], numbers: Collection[int] | None) -> None:
    """Look once; `fresh` holds what the page has read just now. It never draws the rest of the page by itself."""
    with common.problems_told():
        store = common.open_store()
        snapshot = fresh.pop() if fresh else data.snapshot(store, name)
        st.caption(f"Drawn at {_clock(drawn_at)}. {_looked(snapshot)}")
        more = news(drawn, standing(store, snapshot, numbers))
        # It is there without news, too: as it came, it would push the figures down under the reader.
        held = snapshot.view.row.is_held
        label = f"{more}: refresh" if more else "Nothing new"
        if (more or held) and st.button(label, icon=":material/refresh:", key="draw anew", disabled=not more):
            st.rerun()


def _looked(snapshot: Snapshot) -> str:
    state = costs.shown_state(snapshot.view)
    if common.refresh_every(snapshot.view) is None:
        return "No controller runs this study, so nothing new is looked for."
    sign = "" if state != "stalled" else f", stalled: no sign of life for {costs.silence(snapshot.view) or 0.0:.0f} s"
    return (
        f"The study is {state}{sign}. Looked for more at {_clock(time.time())}, every {common.REFRESH_SECONDS} s; the "
        "figures stay as you left them until you refresh."
    )


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))

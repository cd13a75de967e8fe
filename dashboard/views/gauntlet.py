"""The gauntlet on a page: where each configuration stopped, and by how much; a click selects its trial."""

from functools import partial

import streamlit as st

from dashboard import gauntlet as figures
from dashboard.data import Snapshot
from dashboard.views import common
from tuner.confirm import gauntlet
from tuner.confirm.answer import Answer
from tuner.store import Store

WIDTHS = {"wide": False, "narrow": True}
"""Figures by name, of which the style sheet hides the one that is not for this screen."""


def show(store: Store, snapshot: Snapshot, answer: Answer | None) -> int | None:
    """Draw a study's gauntlet, and return the number of the trial that was clicked last, or None."""
    found, key = gauntlet.of_study(store, snapshot.view, answer), f"gauntlet {snapshot.view.row.id}"
    selected: int | None = st.session_state.get(key)
    for width, is_narrow in WIDTHS.items():
        with st.container(key=f"gauntlet-{width}"):
            st.plotly_chart(
                figures.figure(found, selected, is_narrow=is_narrow),
                key=f"gauntlet {width}",
                config=common.PLOTLY_CONFIG,
                alt=f"Gates that stopped trials: {found.line} are left",
                on_select=partial(_select, key, f"gauntlet {width}"),
                selection_mode="points",
            )
    return selected


def _select(key: str, figure: str) -> None:
    """Keep the trial whose mark was clicked; a click beside all marks selects none."""
    st.session_state[key] = next(iter(common.selected_trials(figure)), None)

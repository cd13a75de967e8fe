"""The gauntlet on a page: where each configuration stopped, and by how much; a click selects its trial."""

from functools import partial

import streamlit as st

from dashboard import gauntlet as figures
from dashboard.data import Snapshot
from dashboard.views import common
from tuner.confirm import gauntlet
from tuner.confirm.answer import Answer
from tuner.store import Store


def show(store: Store, snapshot: Snapshot, answer: Answer | None) -> int | None:
    """Draw a study's gauntlet, and return the number of the trial that was clicked last, or None."""
    found, key = gauntlet.study_gauntlet(store, snapshot.view, answer), f"gauntlet {snapshot.view.row.id}"
    selected: int | None = st.session_state.get(key)

    common.heading("Where each configuration stopped", _HELP)

    def draw(is_narrow: bool) -> None:
        name = f"gauntlet {'narrow' if is_narrow else 'wide'}"
        st.plotly_chart(
            figures.figure(found, selected, is_narrow=is_narrow),
            key=name,
            config=common.PLOTLY_CONFIG,
            alt=f"Gates that stopped trials: {found.line} are left",
            on_select=partial(_select, key, name),
            selection_mode="points",
        )

    common.for_each_width("gauntlet", draw)
    return selected


_HELP = (
    "A row is a configuration, a column a gate: its dot is the reading there, the line ends at the gate that stopped "
    "it. Above a column: how many are left. Click a mark to show that trial's curves and samples below; click "
    "an empty spot to close them."
)


def _select(key: str, figure: str) -> None:
    """Keep the trial whose mark was clicked; a click beside all marks selects none."""
    st.session_state[key] = next(iter(common.selected_trials(figure)), None)

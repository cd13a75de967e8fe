"""The click that shows KL under different β: on the Curves page, and as a link to it."""

import streamlit as st

from dashboard import analysis
from dashboard.data import Snapshot
from dashboard.views.sidebar import TRIALS
from ppo_core.hyperparameters import HYPERPARAMETERS

NAMED_BY, CHOSEN_METRICS = "by", "metric"
"""Keys of the Curves page: the setting that names lines, and the metrics."""
_SHOW, _BETA = "show", "beta"
"""Of the link. No selector is bound to it: Streamlit drops from a link to another page what is."""
_ICON = ":material/stacked_line_chart:"


def button(snapshot: Snapshot) -> None:
    """Draw the button where the study has more than one β. A click chooses trials that span β, names lines by it, and
    shows KL first.
    """
    if trials := _spanning(snapshot):
        st.button(
            "KL by β",
            icon=_ICON,
            on_click=_choose,
            args=(trials,),
            help="KL over training under the lowest, a middle and the highest fixed β of this study, and an adaptive "
            "one. Their other settings differ, too, unless the study lists its trials.",
        )


def link(snapshot: Snapshot) -> None:
    """Draw a link to the Curves page that does the same."""
    if _spanning(snapshot):
        page = st.Page(_curves, url_path="curves")
        st.page_link(page, label="KL under different β", icon=_ICON, query_params={_SHOW: _BETA})


def follow(snapshot: Snapshot) -> None:
    """Do on the Curves page, before its selectors are drawn, what the link asked for."""
    if _SHOW in st.query_params:
        if st.query_params[_SHOW] == _BETA and (trials := _spanning(snapshot)):
            _choose(trials)
            st.query_params[NAMED_BY] = HYPERPARAMETERS[analysis.BETA].label  # the link holds what a selector shows
        del st.query_params[_SHOW]


def _spanning(snapshot: Snapshot) -> tuple[int, ...]:
    trials = analysis.spanning(snapshot.view.trials, analysis.BETA)
    return trials if len(trials) > 1 else ()


def _choose(trials: tuple[int, ...]) -> None:
    st.session_state[TRIALS] = list(trials)
    st.session_state[NAMED_BY] = analysis.BETA
    st.session_state[CHOSEN_METRICS] = []


def _curves() -> None:
    """Stand for the page that the link leads to: its address is what counts."""

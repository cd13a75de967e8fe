"""The click on the Curves page that shows KL under different β."""

import streamlit as st

from dashboard import analysis
from dashboard.data import Snapshot
from dashboard.views.sidebar import TRIALS

NAMED_BY, CHOSEN_METRICS = "by", "metric"
"""Keys of the Curves page: the setting that names lines, and the metrics."""


def button(snapshot: Snapshot) -> None:
    """Draw the button where the study has more than one β. A click chooses trials that span β, names lines by it, and
    shows KL first.
    """
    if trials := _spanning(snapshot):
        st.button(
            "KL by β",
            icon=":material/stacked_line_chart:",
            on_click=_choose,
            args=(trials,),
            help="KL over training under the lowest, a middle and the highest fixed β of this study, and an adaptive "
            "one. Their other settings differ, too, unless the study lists its trials.",
        )


def _spanning(snapshot: Snapshot) -> tuple[int, ...]:
    trials = analysis.spanning(snapshot.view.trials, analysis.BETA)
    return trials if len(trials) > 1 else ()


def _choose(trials: tuple[int, ...]) -> None:
    st.session_state[TRIALS] = list(trials)
    st.session_state[NAMED_BY] = analysis.BETA
    st.session_state[CHOSEN_METRICS] = []

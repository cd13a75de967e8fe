"""Figures and tables as every page draws them: each can be taken away."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from dashboard import untrusted
from dashboard.echarts import Option
from dashboard.figures import live_copy

CONFIG = {"displaylogo": False, "toImageButtonOptions": {"format": "png", "scale": 2}}
Latest = dict[str, tuple[Option, str, str]]
"""Live charts as they were drawn last, by key: each with its study's name and what it shows."""


def figure(drawn: go.Figure, key: str, alt: str) -> None:
    """Draw a Plotly figure; its tool bar saves a PNG, the button below it a page that needs nothing else."""
    st.plotly_chart(drawn, key=key, config=CONFIG, alt=alt)
    _save_as_html(lambda: drawn, key, file=key.replace(" ", "-"))


def live(option: Option, *, key: str, height: int, alt: str, study: str, what: str, latest: Latest) -> None:
    """Draw a live chart, `height` pixels high, whose own button saves a PNG, and keep it in `latest` for `save_live`.

    `what` it shows is told in our own words.
    """
    st.echarts_chart(option, key=key, height=height, alt=alt)
    latest[key] = (option, study, what)


def save_live(latest: Latest) -> None:
    """Draw a button for each of the live charts; it saves the one drawn last as a page that needs nothing else.

    This belongs outside of what refreshes: a button that is drawn anew forgets how to answer a click on its last one.
    """
    with st.container(horizontal=True):
        for key, (option, study, what) in latest.items():
            picture = option["toolbox"]["feature"]["saveAsImage"]["name"]
            file = f"{untrusted.file_name(study)}-{picture}"
            _save_as_html(partial(_copied, latest, key), key, file=file, label=f"Save as HTML: {what}")


def _copied(latest: Latest, key: str) -> go.Figure:
    """Return the chart that was drawn last, as high as the page that it is opened in."""
    option, study, what = latest[key]
    return live_copy.figure(option, f"{untrusted.one_line(study)}: {what}").update_layout(height=None)


def table(rows: pd.DataFrame, key: str, columns: Mapping[str, Any] | None = None) -> None:
    """Draw a table whose texts are safe cells already; its tool bar saves it as CSV."""
    st.dataframe(rows, key=key, hide_index=True, placeholder="", column_config=columns)


def _save_as_html(make: Callable[[], go.Figure], key: str, file: str, label: str = "Save as HTML") -> None:
    st.download_button(
        label,
        lambda: make().to_html(include_plotlyjs=True, config=CONFIG),
        file_name=f"{file}.html",
        mime="text/html",
        key=f"save {key}",
        type="tertiary",
        icon=":material/download:",
        on_click="ignore",
        help="One file that opens without a network: the chart with its zoom and tooltips.",
    )

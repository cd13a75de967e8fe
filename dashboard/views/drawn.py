"""Figures and tables as every page draws them: each can be taken away."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from dashboard.echarts import Option
from dashboard.figures import live_copy

CONFIG = {"displaylogo": False, "toImageButtonOptions": {"format": "png", "scale": 2}}


def figure(drawn: go.Figure, key: str, alt: str) -> None:
    """Draw a Plotly figure; its tool bar saves a PNG, the button below it a page that needs nothing else."""
    st.plotly_chart(drawn, key=key, config=CONFIG, alt=alt)
    _save_as_html(lambda: drawn, key, file=key.replace(" ", "-"))


def live(option: Option, *, key: str, height: int, alt: str, name: str) -> None:
    """Draw a live chart, `height` pixels high; its own button saves a PNG, the one below it a page under `name`.

    The page is a Plotly figure, made when it is asked for.
    """
    st.echarts_chart(option, key=key, height=height, alt=alt)
    picture = option["toolbox"]["feature"]["saveAsImage"]["name"]
    _save_as_html(lambda: live_copy.figure(option, name), key, file=picture)


def table(rows: pd.DataFrame, key: str, columns: Mapping[str, Any] | None = None) -> None:
    """Draw a table whose texts are safe cells already; its tool bar saves it as CSV."""
    st.dataframe(rows, key=key, hide_index=True, placeholder="", column_config=columns)


def _save_as_html(make: Callable[[], go.Figure], key: str, file: str) -> None:
    st.download_button(
        "Save as HTML",
        lambda: make().to_html(include_plotlyjs=True, config=CONFIG),
        file_name=f"{file}.html",
        mime="text/html",
        key=f"save {key}",
        type="tertiary",
        icon=":material/download:",
        on_click="ignore",
        help="One file that opens without a network: the chart with its zoom and tooltips.",
    )

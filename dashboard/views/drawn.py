"""Figures and tables as every analysis page draws them: each can be taken away."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

CONFIG = {"displaylogo": False, "toImageButtonOptions": {"format": "png", "scale": 2}}


def figure(drawn: go.Figure, key: str, alt: str) -> None:
    """Draw a Plotly figure; its tool bar saves a PNG, the button below it a page that needs nothing else."""
    st.plotly_chart(drawn, key=key, config=CONFIG, alt=alt)
    st.download_button(
        "Save as HTML",
        lambda: drawn.to_html(include_plotlyjs=True, config=CONFIG),
        file_name=f"{key.replace(' ', '-')}.html",
        mime="text/html",
        key=f"save {key}",
        type="tertiary",
        icon=":material/download:",
        on_click="ignore",
        help="One file that opens without a network: the chart with its zoom and tooltips.",
    )


def table(rows: pd.DataFrame, key: str, columns: Mapping[str, Any] | None = None) -> None:
    """Draw a table whose texts are safe cells already; the button below it saves it as CSV."""
    st.dataframe(rows, key=key, hide_index=True, placeholder="", column_config=columns)
    st.download_button(
        "Save as CSV",
        rows.to_csv(index=False).encode(),
        file_name=f"{key.replace(' ', '-')}.csv",
        mime="text/csv",
        key=f"save {key}",
        type="tertiary",
        icon=":material/download:",
        on_click="ignore",
    )

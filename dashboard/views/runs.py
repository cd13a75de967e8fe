"""Runs: curves of trials, their reward against KL, one trial, and several compared."""

import streamlit as st

from dashboard.views import common, compare, curves, reward_kl, trial

PARTS = {"Curves": curves.page, "Reward and KL": reward_kl.page, common.ONE_TRIAL: trial.page, "Compare": compare.page}


def page(choice: common.Choice) -> None:
    """Draw the chosen part of the page."""
    part = st.segmented_control(
        "Part", list(PARTS), default="Curves", required=True, key="view", bind="query-params", persist_state="session",
        label_visibility="collapsed",
    )  # fmt: skip
    PARTS[part](choice)

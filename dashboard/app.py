"""The dashboard's entry: its pages. `streamlit run dashboard/app.py`, or `ppo-tuner dashboard`."""

import sys
from pathlib import Path

import streamlit as st

ROOT = str(Path(__file__).resolve().parent.parent)


def main() -> None:
    """Run the page that the link names."""
    if ROOT not in sys.path:  # Streamlit puts this file's folder there, and not the checkout's
        sys.path.insert(0, ROOT)
    from dashboard.views import study

    # An emoji, since the browser would fetch a Material icon from outside.
    st.set_page_config(page_title="PPO Tuner", page_icon="📈", layout="wide")
    st.navigation(
        [st.Page(study.page, title="Study", icon=":material/monitoring:", url_path="study", default=True)]
    ).run()


main()

"""The script that Streamlit runs at each visit: it draws the page that the address names."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit as st

if TYPE_CHECKING:
    from dashboard.views.common import Choice

ROOT = str(Path(__file__).resolve().parent.parent)

# Module in `dashboard.views`, which is also the address (the first page's is /); title; icon. (No docstring below it:
# Streamlit writes a string that stands alone in this file onto the page.)
PAGES = (
    ("overview", "Overview", ":material/dashboard:"),
    ("curves", "Curves", ":material/monitoring:"),
    ("trial", "Trial", ":material/looks_one:"),
    ("reward_kl", "Reward and KL", ":material/scatter_plot:"),
    ("search", "Search", ":material/travel_explore:"),
    ("samples", "Samples", ":material/chat:"),
    ("compare", "Compare", ":material/compare_arrows:"),
    ("confirm", "Confirm", ":material/verified:"),
    ("control", "Control", ":material/tune:"),
    ("studies", "Studies", ":material/stacked_line_chart:"),
)


def main() -> None:
    """Run the page that the address names."""
    if ROOT not in sys.path:  # Streamlit puts this file's folder there, not the checkout's
        sys.path.insert(0, ROOT)
    from dashboard import access, style
    from dashboard.views import common

    # An emoji, since the browser would fetch a Material icon from outside.
    st.set_page_config(page_title="PPO Tuner", page_icon="📈", layout="wide")
    st.html(style.SHEET)
    access.given()  # removes a wrong token from the address
    choice: list[Choice] = []
    pages = [
        st.Page(_page(module, choice), title=title, icon=icon, url_path=module, default=place == 0)
        for place, (module, title, icon) in enumerate(PAGES)
    ]
    shown = st.navigation(pages)
    # Drawn here, not by each page: Streamlit drops a page's own query parameters from links to other pages.
    choice.append(common.choose())
    shown.run()


def _page(module: str, choice: "Sequence[Choice]") -> Callable[[], None]:
    """Return a page that imports its module when shown, so that it need not wait for other pages' libraries.

    `choice` holds the sidebar's choice by then.
    """

    def page() -> None:
        importlib.import_module(f"dashboard.views.{module}").page(*choice)

    return page


main()

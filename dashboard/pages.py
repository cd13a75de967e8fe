"""The script that `app.py` runs at each visit: it draws the page that the address names."""

import importlib
from collections.abc import Callable

import streamlit as st

from dashboard import access, style
from dashboard.views import common

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
    # An emoji, since the browser would fetch a Material icon from outside.
    st.set_page_config(page_title="PPO Tuner", page_icon="📈", layout="wide")
    st.html(style.SHEET)
    access.session_token()  # removes a wrong token from the address

    def page_of(module: str) -> Callable[[], None]:
        def page() -> None:
            # Imported when shown, so that it need not wait for other pages' libraries.
            importlib.import_module(f"dashboard.views.{module}").page(choice)

        return page

    current = st.navigation(
        [
            st.Page(page_of(module), title=title, icon=icon, url_path=module, default=place == 0)
            for place, (module, title, icon) in enumerate(PAGES)
        ]
    )
    # Drawn here, not by each page: Streamlit drops a page's own query parameters from links to other pages.
    choice = common.choose()
    current.run()


main()

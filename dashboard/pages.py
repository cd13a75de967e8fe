"""The script that `app.py` runs at each visit: it draws the page that the address names."""

import importlib
from collections.abc import Callable

import streamlit as st

from dashboard import access, style
from dashboard.views import common

# Module in `dashboard.views`, which is also the address (the first page's is /); title; icon. (No docstring below it:
# Streamlit writes a string that stands alone in this file onto the page.)
PAGES = (
    ("answer", "Answer", ":material/verified:"),
    ("why", "Why", ":material/travel_explore:"),
    ("runs", "Runs", ":material/monitoring:"),
    ("samples", "Samples", ":material/chat:"),
    ("control", "Control", ":material/tune:"),
    ("studies", "Studies", ":material/stacked_line_chart:"),
)
HIDDEN = ("studies",)  # not in the navigation: it is linked below the choice of a study
WITHOUT_BUDGET = ("control", "studies")  # not about the sidebar's KL budget


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
            st.Page(
                page_of(module), title=title, icon=icon, url_path=module, default=place == 0,
                visibility="hidden" if module in HIDDEN else "visible",
            )
            for place, (module, title, icon) in enumerate(PAGES)
        ]
    )  # fmt: skip
    # Drawn here, not by each page: Streamlit drops a page's own query parameters from links to other pages.
    choice = common.choose(with_budget=current.url_path not in WITHOUT_BUDGET)
    current.run()


main()

"""The chosen trials as an analysis page needs them: those that have begun, and no more than it has room for."""

import streamlit as st

from dashboard.data import Snapshot
from dashboard.views import common


def trials(snapshot: Snapshot, help_text: str, most: int | None = None) -> tuple[int, ...]:
    """Return the chosen trials that have begun, in order of their choice, at most `most`; empty: nothing is chosen.

    What is left out of the choice is said.
    """
    chosen = common.choose_trials(snapshot, help_text)
    begun = {row.number for row in snapshot.view.trials}
    missing = [str(number) for number in chosen if number not in begun]
    if missing:
        st.info(f"Not begun yet: trial{'s' if len(missing) > 1 else ''} {', '.join(missing)}.")
    found = tuple(number for number in chosen if number in begun)
    if most is not None and len(found) > most:
        st.info(f"Shown are the first {most} of the chosen trials; there is no room for more.")
        found = found[:most]
    return found

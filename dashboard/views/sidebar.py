"""The sidebar, the same on every page: which study, which trials, which KL budget. All three are in the link."""

import math
from collections.abc import Sequence
from contextlib import suppress

import streamlit as st

from dashboard import data, safe_text
from dashboard.data import Snapshot
from ppo_core.output import KL_UNIT
from tuner.store import Store

STUDY, TRIALS, BUDGET = "study", "trial", "budget"
"""Keys of the three choices, in link and session."""
_BUDGET_OF = "budget of"
"""Session key: the study to which the session's budget belongs."""


def choose_study(store: Store) -> str | None:
    """Return the selected study's name; None if the store has no studies."""
    names = [study.name for study in data.studies(store)]
    if not names:
        return None
    _put_into_link(names)
    chosen: str | None = st.sidebar.selectbox(
        "Study",
        names,
        index=None,
        format_func=safe_text.one_line,
        key=STUDY,
        bind="query-params",
        persist_state="session",
        help="Studies in this store, the running one or the latest one first.",
    )
    if chosen is None:  # cleared, or Back to an address without one
        st.rerun()
    return chosen


def choose_trials(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the chosen trials by number, kept across pages; empty if none."""
    numbers = _numbers(snapshot)
    _say_unknown_trials(numbers)
    chosen = st.sidebar.multiselect(
        "Trials",
        numbers,
        key=TRIALS,
        bind="query-params",
        persist_state="session",
        placeholder="Default",
        filter_mode="prefix",
        select_all=False,
        help="Shown in colour in charts, and alone in samples and comparisons. By default: the answer and the "
        "reference, or the runner-up if they are one; in charts also those that run, and all where they are few.",
    )
    return tuple(chosen)


def _numbers(snapshot: Snapshot) -> list[int]:
    """Return the numbers of the study's trials and of those still to start, without confirming runs."""
    known = [row.number for row in snapshot.view.trials]
    first = max((row.number for row in snapshot.runs), default=-1) + 1
    to_start = max(0, (data.total(snapshot.view) or 0) - len(known))
    return [*known, *range(first, first + to_start)]


def choose_budget(snapshot: Snapshot) -> float:
    """Return the KL budget for all pages: the study's own, unless the link has another."""
    spec, name = snapshot.view.spec, snapshot.view.row.name
    top = max(spec.kl_limit, 2 * spec.kl_budget)
    step = 10.0 ** math.floor(math.log10(top / 100))
    digits = max(0, -math.floor(math.log10(step)))
    step = round(step, digits)
    highest = round(math.ceil(top / step) * step, digits)
    default = round(max(spec.kl_budget, step), digits + 2)
    if st.session_state.setdefault(_BUDGET_OF, name) != name:  # not the previous study's budget
        st.session_state.update({_BUDGET_OF: name, BUDGET: default})
    _say_unknown_budget(step, highest)
    chosen = st.sidebar.slider(
        "KL budget",
        min_value=step,
        max_value=highest,
        value=default,
        step=step,
        format=f"%.{max(digits, 1)}f",
        key=BUDGET,
        bind="query-params",
        persist_state="session",
        help=f"Highest eval KL that you accept, in {KL_UNIT}. Trials are judged by it from the evaluations in the "
        f"store; nothing is trained again. Confirmations hold for the study's own budget, "
        f"{spec.kl_budget:g}, and its guard stops trials that stay over {spec.kl_limit:g}.",
    )
    return float(chosen)


# Report a link's invalid values before drawing the widgets, which discard them.


def _say_unknown_trials(numbers: Sequence[int]) -> None:
    unknown = [text for text in st.query_params.get_all(TRIALS) if text not in map(str, numbers)]
    if unknown:
        st.warning(f"The link names trial {_listed(unknown)}, which this study does not have.")


def _say_unknown_budget(lowest: float, highest: float) -> None:
    for text in st.query_params.get_all(BUDGET):
        with suppress(ValueError):
            if lowest <= float(text) <= highest:
                continue
        st.warning(f"The link names a KL budget of {_listed([text])}; this study allows {lowest:g} to {highest:g}.")


def _listed(texts: list[str]) -> str:
    return ", ".join(safe_text.in_markdown(text[:20]) for text in texts[:5])


def _put_into_link(names: list[str]) -> None:
    """Put the first study into a link without a valid one, so that the link stays stable."""
    linked, first = st.query_params.get(STUDY), names[0]
    if linked is not None and linked not in [safe_text.one_line(name) for name in names]:
        st.query_params[STUDY] = safe_text.one_line(first)
        st.session_state["study not found"] = True
        st.rerun()  # otherwise the selector would drop the link's value
    if st.session_state.pop("study not found", False):
        st.warning("The study in the link is not in this store; this is its latest one.")
    if linked is None:
        st.query_params[STUDY] = safe_text.one_line(st.session_state.get(STUDY) or first)
        st.session_state.setdefault(STUDY, first)

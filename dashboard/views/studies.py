"""Studies: a table of all, with state, best and cost; and several compared by front and by hyperparameter."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import pandas as pd
import streamlit as st

from dashboard import analysis, data, figures, importance_figures, safe_text, sentences, style
from dashboard.data import Snapshot
from dashboard.views import common
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from tuner.judge.results import StudyView
from tuner.store import Store, StudyRow

A_PAGE = 20
"""Studies per page of the table."""
SLOW_SECONDS = 10
"""Refresh interval of the table."""


MOST = len(style.COLOURS)
"""Most studies compared."""


def page(choice: common.Choice) -> None:
    """Draw the page; the table refreshes by itself while any of the studies runs."""
    with common.problems_shown():
        rows = data.studies(choice.store)
        running = any(row.is_held for row in rows)
        st.fragment(_table, run_every=SLOW_SECONDS if running else None)(choice.store)
        _several(choice, [row.name for row in rows])


def _several(choice: common.Choice, names: list[str]) -> None:
    """Compare a few studies: by default the sidebar's and the latest."""
    st.subheader("Across studies", anchor=False)
    first = list(dict.fromkeys([choice.snapshot.view.row.name, *names]))[:MOST]
    chosen = st.multiselect(
        "Studies", names, key="compared", bind="query-params", max_selections=MOST, format_func=safe_text.one_line,
        label_visibility="collapsed", placeholder=f"The latest {len(first)}" if len(first) > 1 else "Studies",
    )  # fmt: skip
    shown = {name: data.snapshot(choice.store, name) for name in chosen or first}
    evaluated = {
        name: analysis.evaluations(data.curves(choice.store, one, analysis.EVALUATED, evaluations_only=True))
        for name, one in shown.items()
    }
    evaluated = {name: points for name, points in evaluated.items() if len(points)}
    if not evaluated:
        st.info("None of these studies has an evaluation yet.")
        return
    fronts = {name: analysis.front(points) for name, points in evaluated.items()}
    tasks = {one.view.spec.task for one in shown.values()}
    differ = "" if len(tasks) == 1 else " They train different tasks, so their rewards are not on one scale."
    common.figure(
        figures.fronts(fronts, choice.budget),
        key="fronts",
        alt="The front of eval reward against eval KL of each study",
        says=sentences.of_studies(evaluated, choice.budget) + differ,
    )
    best = [_best(name, shown[name], points, choice.budget) for name, points in evaluated.items()]
    number = st.column_config.NumberColumn
    common.table(
        pd.DataFrame(best),
        key="best of studies",
        columns={
            "study": _link_column(),
            "reward": number("Best eval reward", format="%.3f", help=f"Within {choice.budget:g} nats."),
            "reward_se": number("± SE", format="%.3f"),
            "kl": number("Eval KL (nats)", format="%.2f"),
        },
    )
    _in_common({name: shown[name].trials for name in evaluated})


def _best(name: str, snapshot: Snapshot, points: pd.DataFrame, kl_budget: float) -> dict[str, object]:
    """Return a table row with a study's best checkpoint within a KL budget, empty without one."""
    inside = analysis.trained_within(points, kl_budget).nlargest(1, "reward")
    row: dict[str, object] = {"study": _link(name), "task": safe_text.cell(snapshot.view.spec.task)}
    return (
        row
        | dict.fromkeys(("reward", "reward_se", "kl", "trial", "step"))
        | next(iter(inside[["reward", "reward_se", "kl", "trial", "step"]].to_dict("records")), {})
    )


def _in_common(trials: Mapping[str, pd.DataFrame]) -> None:
    """Draw the studies' trials over a hyperparameter that all searched."""
    st.subheader("A hyperparameter in common", anchor=False)
    names = [
        name
        for name in HYPERPARAMETERS
        if all(
            figures.PARAMS + name in frame.columns and importance_figures.is_number(frame[figures.PARAMS + name])
            for frame in trials.values()
        )
    ]
    if not names:
        st.info("These studies searched no hyperparameter in common.")
        return
    name = st.selectbox(
        "Hyperparameter", names, key="common", bind="query-params", width=320, label_visibility="collapsed",
        format_func=lambda name: HYPERPARAMETERS[name].label,
    )  # fmt: skip
    common.figure(
        figures.in_common(trials, name),
        key="in common",
        alt=f"The value of every trial over {name}, a colour for each study",
        says=sentences.of_common(trials, name),
    )


def _link(name: str) -> str:
    """Return the address of a study's Overview, from any page."""
    return f"./?study={quote(name, safe='')}"


def _link_column() -> Any:
    return st.column_config.LinkColumn("Study", display_text=r"study=(.*)", pinned=True, width=145)


def _table(store: Store) -> None:
    with common.problems_shown():
        rows = data.studies(store)
        st.subheader("All studies", anchor=False)
        pages = -(-len(rows) // A_PAGE)
        page = st.pagination(pages, key="studies", bind="query-params") if pages > 1 else 1
        listed = rows[(page - 1) * A_PAGE : page * A_PAGE]
        table = table_of([(row, data.view(store, row)) for row in listed])
        st.dataframe(table, key="all studies", hide_index=True, placeholder="–", column_config=_study_columns())


def table_of(studies: list[tuple[StudyRow, StudyView | None]]) -> pd.DataFrame:
    """Return one row per study, safe to show and to export; an unreadable study has only its name."""
    table = pd.DataFrame([_row(row, view) for row, view in studies])
    has_budget = "spent" in table.columns and table["spent"].fillna("").ne("").any()
    return table if has_budget else table.drop(columns="spent", errors="ignore")


def _row(row: StudyRow, view: StudyView | None) -> dict[str, object]:
    name: dict[str, object] = {"study": _link(row.name)}
    if view is None:
        return name | {"state": "not readable"}
    best, spent, extent = view.best(), data.cost(view), view.extent
    return name | {
        "state": data.WORDS[data.shown_state(view)],
        "ended": _ended(view.ended, data.total(view), extent.screened),
        "spent": "" if extent.budget is None else f"{extent.spent:.1f} of {extent.budget:g}",
        "best": None if best is None else best.value,
        "kl": None if best is None else best.kl,
        "budget": view.spec.kl_budget,
        "device": common.device_time(spent.hours),
        "pruned": None if spent.pruned_share is None else 100 * spent.pruned_share,
        "sign": common.ago(data.last_sign(view)),
    }


def _ended(ended: int, total: int | None, screened: int) -> str:
    """Return the numbers of ended, planned (if known) and screened trials."""
    return f"{ended}{'' if total is None else f' of {total}'}{f', {screened} screened' if screened else ''}"


def _study_columns() -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    return {
        "study": _link_column(),
        "state": text("State", width=115, help="Not responding: its controller has been silent for a minute."),
        "ended": text("Trials ended", width=110, help="And how many were screened."),
        "spent": text("Search budget", width=100, help="In trials of full length; empty: limited by number of trials."),
        "best": number(
            "Best eval reward", format="%.3f", width=120, help="Eval reward of the best trial within the KL budget."
        ),
        "kl": number("Its KL", format="%.2f", width=65, help=f"KL of the best trial. {METRICS['eval/kl'].doc}"),
        "budget": number("KL budget", format="%g", width=85, help=f"In {METRICS['eval/kl'].unit}."),
        "device": text("Device time", width=95, help="Trials that run side by side each count."),
        "pruned": number(
            "Pruned", format="%.0f%%", width=70, help="Share of all device time that went into pruned trials."
        ),
        "sign": text("Last activity", width=105),
    }

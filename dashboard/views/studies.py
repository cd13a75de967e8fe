"""Studies: a table of all, with state, best trial and cost; and several compared by front and by hyperparameter."""

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
from ppo_core.output import duration
from tuner.judge.results import StudyView
from tuner.store import Store, StudyRow

STUDIES_PER_PAGE = 20
REFRESH_SECONDS = 10
MOST_COMPARED = len(style.COLOURS)


def page(choice: common.Choice) -> None:
    """Draw the page; the table refreshes by itself while any of the studies runs."""
    with common.problems_shown():
        rows = data.studies(choice.store)
        is_any_held = any(row.is_held for row in rows)
        st.fragment(_table, run_every=REFRESH_SECONDS if is_any_held else None)(choice.store)
        _several(choice, [row.name for row in rows])


def _several(choice: common.Choice, names: list[str]) -> None:
    """Compare a few studies: by default the sidebar's and the latest."""
    common.heading("Across studies")
    first = list(dict.fromkeys([choice.snapshot.view.row.name, *names]))[:MOST_COMPARED]
    chosen = st.multiselect(
        "Studies", names, key="compared", bind="query-params", max_selections=MOST_COMPARED,
        format_func=safe_text.one_line, label_visibility="collapsed",
        placeholder=f"The latest {len(first)}" if len(first) > 1 else "Studies",
    )  # fmt: skip
    snapshots, evaluated = {}, {}
    for name in chosen or first:
        snapshot = data.snapshot(choice.store, name)
        steps = data.curves(choice.store, snapshot, analysis.EVALUATED, evaluations_only=True)
        if len(points := analysis.evaluations(steps)):
            snapshots[name], evaluated[name] = snapshot, points
    if not evaluated:
        st.info("None of these studies has an evaluation yet.")
        return
    fronts = {name: analysis.front(points) for name, points in evaluated.items()}
    tasks = {snapshot.view.spec.task for snapshot in snapshots.values()}
    differ = "" if len(tasks) == 1 else " They train different tasks, so their rewards are not on one scale."
    common.figure(
        figures.fronts(fronts, choice.budget),
        key="fronts",
        alt="The front of eval reward against eval KL of each study",
        caption=sentences.of_studies(evaluated, choice.budget) + differ,
    )
    number = st.column_config.NumberColumn
    common.table(
        pd.DataFrame([_best(snapshots[name], points, choice.budget) for name, points in evaluated.items()]),
        key="best of studies",
        columns={
            "study": _link_column(),
            "reward": number("Best eval reward", format="%.3f", help=f"Within {choice.budget:g} nats."),
            "reward_se": number("± SE", format="%.3f"),
            "kl": number("Eval KL (nats)", format="%.2f"),
        },
    )
    _in_common({name: snapshot.trials for name, snapshot in snapshots.items()})


def _best(snapshot: Snapshot, points: pd.DataFrame, kl_budget: float) -> dict[str, object]:
    """Return a table row with a study's best checkpoint within a KL budget, empty without one."""
    view, columns = snapshot.view, ["reward", "reward_se", "kl", "trial", "step"]
    best = analysis.trained_within(points, kl_budget).nlargest(1, "reward")
    [values] = best[columns].to_dict("records") or [dict.fromkeys(columns)]
    return {"study": _link(view.row.name), "task": safe_text.cell(view.spec.task), **values}


def _in_common(trials: Mapping[str, pd.DataFrame]) -> None:
    """Draw the studies' trials over a hyperparameter that all searched."""
    common.heading("A hyperparameter in common")
    names = [
        name
        for name in HYPERPARAMETERS
        if all(
            (column := data.PARAMS + name) in frame.columns and importance_figures.is_number(frame[column])
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
        caption=sentences.of_common(trials, name),
    )


def _link(name: str) -> str:
    """Return the address of a study's Overview, from any page."""
    return f"./?study={quote(name, safe='')}"


def _link_column() -> Any:
    return st.column_config.LinkColumn("Study", display_text=r"study=(.*)", pinned=True, width=145)


def _table(store: Store) -> None:
    with common.problems_shown():
        rows = data.studies(store)
        common.heading("All studies")
        table = table_of([(row, data.view(store, row)) for row in common.paginate(rows, STUDIES_PER_PAGE, "studies")])
        common.table(table, "all studies", _study_columns(), placeholder="–")


def table_of(studies: list[tuple[StudyRow, StudyView | None]]) -> pd.DataFrame:
    """Return one row per study, safe to show and to export; an unreadable study has only its name."""
    table = pd.DataFrame([_row(row, view) for row, view in studies])
    has_budget = "spent" in table.columns and table["spent"].fillna("").ne("").any()
    return table if has_budget else table.drop(columns="spent", errors="ignore")


def _row(row: StudyRow, view: StudyView | None) -> dict[str, object]:
    if view is None:
        return {"study": _link(row.name), "state": "not readable"}
    best, cost, extent, total = view.best(), data.cost(view), view.extent, data.total(view)
    planned = "" if total is None else f" of {total}"
    screened = f", {extent.screened} screened" if extent.screened else ""
    return {
        "study": _link(row.name),
        "state": data.WORDS[data.shown_state(view)],
        "ended": f"{view.ended}{planned}{screened}",
        "spent": "" if extent.budget is None else f"{extent.spent:.1f} of {extent.budget:g}",
        "best": None if best is None else best.value,
        "kl": None if best is None else best.kl,
        "budget": view.spec.kl_budget,
        "device": duration(3_600 * cost.hours),
        "pruned": None if cost.pruned_share is None else 100 * cost.pruned_share,
        "sign": common.ago(data.last_sign(view)),
    }


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
        "sign": text("Last activity", width=125),
    }

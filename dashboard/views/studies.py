"""Studies: the picker of a study, with decision, reward, KL and cost a row; and several compared."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import streamlit as st

from dashboard import analysis, data, figures, importance_figures, safe_text, style
from dashboard.views import common
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.data.task import Task
from ppo_core.metrics import METRICS
from ppo_core.output import duration, measured, plus_minus
from tuner.confirm.answer import study_answer
from tuner.judge.results import StudyView
from tuner.store import Store, StudyRow

STUDIES_PER_PAGE = 20
REFRESH_SECONDS = 10
MOST_COMPARED = len(style.COLOURS)


def page(choice: common.Choice) -> None:
    """Draw the page; the table refreshes by itself while any of the studies runs."""
    with common.problems_shown():
        rows = data.studies(choice.store)
        is_any_held = any(row.has_controller for row in rows)
        st.fragment(_table, run_every=REFRESH_SECONDS if is_any_held else None)(choice.store)
        if len(rows) > 1:
            _several(choice, rows)


def _several(choice: common.Choice, rows: Sequence[StudyRow]) -> None:
    """Compare a few studies: by default the sidebar's and the latest that can be read."""
    common.heading("Across studies")
    names, readable = [row.name for row in rows], (row.name for row in rows if data.view(choice.store, row) is not None)
    latest = islice(readable, MOST_COMPARED)
    first = list(dict.fromkeys([choice.snapshot.view.row.name, *latest]))[:MOST_COMPARED]
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
    tasks = {snapshot.view.spec.task for snapshot in snapshots.values()}
    if len(tasks) > 1:
        text = "These studies train different tasks: compare each reward with its study's SFT policy alone."
        st.info(text)
    common.figure(
        figures.fronts({name: analysis.front(points) for name, points in evaluated.items()}, choice.budget),
        key="fronts",
        alt="The front of eval reward against eval KL of each study",
    )
    _in_common({name: snapshot.trials for name, snapshot in snapshots.items()})


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
    plot = figures.in_common(trials, name)
    if plot.layout.xaxis.type == "log":
        plot.update_xaxes(dtick="D2")  # labels at 1, 2 and 5 alone
    common.figure(plot, key="in common", alt=f"The value of every trial over {name}, a colour for each study")


def task_text(task: Task) -> str:
    """Return a task's policy, rewards and prompts by the last parts of their paths; of one without them, its name."""
    places = task.places or [task.name]
    return safe_text.cell(", ".join(Path(place).name if Path(place).is_absolute() else place for place in places))


def _link(name: str) -> str:
    """Return the address of a study's answer, from any page."""
    return f"./?study={quote(name, safe='')}"


def _table(store: Store) -> None:
    with common.problems_shown():
        rows = data.studies(store)
        common.heading("All studies")
        listed = [(row, data.view(store, row)) for row in common.paginate(rows, STUDIES_PER_PAGE, "studies")]
        common.table(table_of(store, listed), "all studies", _study_columns(), placeholder="–")


def table_of(store: Store, studies: list[tuple[StudyRow, StudyView | None]]) -> pd.DataFrame:
    """Return one row per study, safe to show and to export; an unreadable study has only its name."""
    return pd.DataFrame([_row(store, row, view) for row, view in studies])


def _row(store: Store, row: StudyRow, view: StudyView | None) -> dict[str, object]:
    if view is None:
        return {"study": _link(row.name), "state": "not readable"}
    total, answer = data.total(view), study_answer(store, view)
    planned = "" if total is None else f" of {total}"
    confirmed = None if answer is None else answer.confirmed
    reward, kl = (None, None) if confirmed is None else (confirmed.reward, confirmed.kl)
    value = None if answer is None or answer.reward is None else plus_minus(answer.reward.mean, answer.reward.se)
    at_kl = kl or (None if answer is None else answer.kl)
    return {
        "study": _link(row.name),
        "state": data.WORDS[data.shown_state(view)],
        "decision": None if answer is None else answer.decision,
        "reward": value if reward is None else reward.text,
        "kl": None if at_kl is None else f"{measured(at_kl.mean)} of {view.spec.kl_budget:g}",
        "device": duration(sum(trial.seconds for trial in view.trials)),
        "ended": f"{view.ended}{planned}",
        "sign": common.ago(data.last_sign(view)),
        "task": task_text(view.spec.declared),
    }


def _study_columns() -> dict[str, Any]:
    text = st.column_config.TextColumn
    return {
        "study": st.column_config.LinkColumn("Study", display_text=r"study=(.*)", pinned=True, width=95),
        "state": text("State", width=95, help="Not responding: its controller has been silent for a minute."),
        "decision": text("Decision", width=340),
        "reward": text(
            "Its reward",
            width=125,
            help="Of what to launch: its mean on fresh seeds and the test prompts with the 95% interval if it is "
            "confirmed; else of its best checkpoint, ± one standard error over the eval prompts: the highest of many, "
            "so part of it is luck.",
        ),
        "kl": text("KL of budget", width=90, help=f"Its KL and the study's KL budget. {METRICS['eval/kl'].doc}"),
        "device": text("Device time", width=82, help="Trials that run side by side each count."),
        "ended": text("Trials", width=60, help="Trials that ended, of those planned if their number is."),
        "sign": text("Last activity", width=90),
        "task": text(
            "Task",
            width=70,
            help="Policy, rewards and prompts: last parts of their paths, or hub ids; or the built-in task's name.",
        ),
    }

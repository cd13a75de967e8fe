"""The table of trials: status, reason, value, KL and searched values; it also selects trials."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import pandas as pd
import streamlit as st

from dashboard import charts, safe_text, style
from dashboard.data import PARAMS, Snapshot
from dashboard.views import common
from dashboard.views.sidebar import TRIALS
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, decimals
from tuner.confirm.answer import Answer
from tuner.judge.best import VALUE
from tuner.judge.results import StudyView
from tuner.judge.scoring import ends_within
from tuner.study.status import Origin, Role, Status

MOST_ROWS = 20
"""Rows shown without scrolling."""
MOST_LIVE = 250
"""Larger tables are neither refreshed live nor coloured: too much to send each time."""


def draw(snapshot: Snapshot, chosen: common.Numbers, to_launch: Answer | None) -> None:
    """Draw the table, the answer on top, then by reward (by number while the study runs, so that rows and a reader's
    own sorting stay); ticking a row chooses its trial on all pages.
    """
    row = st.container(horizontal=True, vertical_alignment="center")
    row.subheader("Trials", anchor=False, help=_HELP, width="content")
    with row:
        trials, filters = _filtered(snapshot)
    trials = with_headlines(snapshot, trials)
    if not snapshot.view.row.has_controller:
        trials = trials.sort_values("reward", ascending=False, kind="stable")
    first = to_launch or snapshot.view.best()
    if first is not None:
        trials = trials.sort_values("number", key=lambda numbers: numbers != first.number, kind="stable")
    # Rows are ticked by place, so a new order needs a new key.
    order = first and first.number if snapshot.view.row.has_controller else hash(tuple(trials["number"]))
    looks = common.looks(snapshot, common.highlighted(snapshot, chosen, charts.MOST_LINES))
    table = rows(trials, notes(snapshot.view, to_launch), looks)
    styled: Any = table
    if len(table) <= MOST_LIVE:
        styled = table.style.apply(_coloured, axis=None, looks=_looks(trials, looks))
    height: Literal["content", "auto"] = "content" if len(table) <= MOST_ROWS else "auto"
    numbers = trials["number"].tolist()
    version, name = st.session_state.get(_VERSION, 0), f"trials {order} {filters}"
    if _ticked(f"{name} {version}", numbers) not in (None, set(chosen) & set(numbers)):
        version += 1  # a new key, because the choice was changed elsewhere
        st.session_state[_VERSION] = version
    key = f"{name} {version}"
    with st.container(key="all trials"):
        st.dataframe(
            styled, key=key, height=height, hide_index=True, placeholder="", column_config=_columns(trials),
            on_select=partial(_choose, key, numbers, chosen), selection_mode="multi-row",
            selection_default={"selection": {"rows": [i for i, number in enumerate(numbers) if number in chosen]}},
        )  # fmt: skip


def with_headlines(snapshot: Snapshot, trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials with each one's `reward`, `reward_kl`, and the fresh `seeds` that these are means of."""
    rows = {row.number: snapshot.headline(row) for row in snapshot.view.trials}
    ones = [rows[number] for number in trials["number"]]
    return trials.assign(
        reward=[one.reward for one in ones],
        reward_kl=[one.kl for one in ones],
        seeds=[0 if one.confirmed is None else len(one.confirmed.rewards) for one in ones],
    ).astype({"reward": float, "reward_kl": float})


_VERSION = "version of the table"
"""Session key: the part of the table's key that changes with a choice made elsewhere."""


def _filtered(snapshot: Snapshot) -> tuple[pd.DataFrame, list[str]]:
    """Return the filtered trials and the filters, which are in the link.

    Statuses are alternatives; all other filters must hold.
    """
    trials, view = snapshot.trials, snapshot.view
    passing = {
        "within budget": [row.number for row in view.trials if ends_within(row, view.spec)],
        "fixed β": [row.number for row in view.trials if row.config.get("kl_target") is None],
        "labelled": [row.number for row in view.trials if row.label],
    }
    masks = {name: trials["number"].isin(numbers) for name, numbers in passing.items()}
    present = [status.value for status in Status if (trials["status"] == status).any()]
    present += [name for name, mask in masks.items() if mask.any() and not (name == "fixed β" and mask.all())]
    if len(present) < 2:
        return trials, []
    with st.popover("Filter", icon=":material/filter_list:"):
        chosen = list(st.pills("Show", present, selection_mode="multi", key="show", bind="query-params"))
    statuses = [status for status in Status if status in chosen]
    passes = trials["status"].isin(statuses or list(Status))
    for name in chosen:
        if name in masks:
            passes &= masks[name]
    return trials[passes], chosen


def _ticked(key: str, numbers: Sequence[int]) -> set[int] | None:
    """Return the ticked trials of the table with this key; None if it was not drawn yet."""
    state = st.session_state.get(key)
    return None if state is None else {numbers[place] for place in state.selection.rows if place < len(numbers)}


def _choose(key: str, numbers: Sequence[int], chosen: Sequence[int]) -> None:
    """Choose the ticked trials, and keep chosen ones that the table does not show."""
    ticked = _ticked(key, numbers) or set()
    kept = [number for number in chosen if number in ticked or number not in numbers]
    added = [number for number in numbers if number in ticked and number not in kept]
    st.session_state[TRIALS] = [*kept, *added]
    common.ask_for_the_whole_page()


_HELP = (
    "Tick trials to choose them on every page. Where a trial was confirmed, reward and KL are means over fresh "
    f"seeds on the test prompts; otherwise they are those of {VALUE}. An empty cell: not searched in that "
    f"trial."
)


def notes(view: StudyView, to_launch: Answer | None) -> dict[int, str]:
    """Return notes by trial number: the answer, reference, baseline, over the budget, fork."""
    notes_of: dict[int, str] = {}
    for row in view.trials:
        facts = {
            to_launch.title if to_launch else "": to_launch is not None and row.number == to_launch.number,
            "reference": row.origin is Origin.REFERENCE,
            "baseline": row.origin is Origin.BASELINE,
            "ends over budget": ends_within(row, view.spec) is False,
            f"fork of {row.parent}": row.role is Role.FORK,
        }
        notes_of[row.number] = ", ".join(fact for fact, holds in facts.items() if holds)
    return notes_of


def rows(trials: pd.DataFrame, notes_of: Mapping[int, str], looks: Mapping[int, style.Look]) -> pd.DataFrame:
    """Return the table's cells by column, safe to show and to export; notes and looks are by trial number."""
    cells = pd.DataFrame(
        {
            "number": trials["number"],
            "line": [look.dash.glyph for look in _looks(trials, looks)],
            "status": [f"{style.mark(row.status).glyph} {row.shown_status}" for row in trials.itertuples()],
            "note": [
                safe_text.cell("; ".join(filter(None, [notes_of.get(row.number, ""), row.reason or row.rule])))
                for row in trials.itertuples()
            ],
        },
        index=trials.index,
    )
    # A phone shows no more than trial, status, reward and KL.
    best = trials[["reward", "reward_kl", "seeds"]]
    first, second = cells[["number", "status"]], cells[["line", "note"]]
    searched = trials[_searched(trials)].map(lambda value: safe_text.cell(value) if isinstance(value, str) else value)
    progress = (100 * trials["episodes"] / trials["total_episodes"]).rename("progress")
    return pd.concat([first, best, second, searched, progress, trials["seconds"]], axis=1)


def _searched(trials: pd.DataFrame) -> list[str]:
    order = [PARAMS + name for name in HYPERPARAMETERS]
    searched = [column for column in trials.columns if column.startswith(PARAMS)]
    return sorted(searched, key=lambda column: order.index(column) if column in order else len(order))


def _looks(trials: pd.DataFrame, looks: Mapping[int, style.Look]) -> list[style.Look]:
    return [looks.get(number, style.Look(style.NEUTRAL, style.SOLID)) for number in trials["number"]]


def _coloured(table: pd.DataFrame, looks: Sequence[style.Look]) -> pd.DataFrame:
    styles = pd.DataFrame("", index=table.index, columns=table.columns)
    styles["line"] = [f"color: {look.colour}" for look in looks]
    return styles


def _columns(trials: pd.DataFrame) -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    reward, kl = decimals(trials["reward"], trials["value_se"]), decimals(trials["reward_kl"])
    statuses = "; ".join(f"{style.mark(status).glyph} {status}: {status.meaning}" for status in Status)
    columns: dict[str, Any] = {
        "number": number("Trial", width=50, pinned=True),
        "line": text(
            "Line",
            width=55,
            help="The trial's colour and line style on every page; grey: not in colour until it is chosen.",
        ),
        "status": text("Status", width=105, help=statuses),
        "note": text(
            "Note and reason",
            width=280,
            help="The answer, the reference, completed trials over the KL budget, forks; and why a trial ended "
            "early or is paused, with what its rule measured. Click for all.",
        ),
        "reward": number(
            "Reward", format=f"%.{reward}f", width=65, help="Empty: no trained checkpoint is in the budget."
        ),
        "reward_kl": number("Eval KL", format=f"%.{kl}f", width=75, help=f"{METRICS['eval/kl'].doc} In {KL_UNIT}."),
        "seeds": number(
            "Fresh seeds", width=85, help="Fresh seeds of which reward and KL are means; 0: best of one seed."
        ),
        "progress": st.column_config.ProgressColumn(
            "Episodes", format="%.0f%%", max_value=100, width=150, color="gray", help="Share of the trial's episodes."
        ),
        "seconds": number("Time (s)", format="%.0f", width=80, help="Seconds of training, over all attempts."),
    }
    return columns | {
        column: _searched_column(column.removeprefix(PARAMS), trials[column]) for column in _searched(trials)
    }


def _searched_column(name: str, values: pd.Series) -> Any:
    declared = HYPERPARAMETERS.get(name)
    label, doc = (declared.title, declared.doc) if declared else (safe_text.one_line(name), None)
    if not pd.api.types.is_numeric_dtype(values):
        return st.column_config.TextColumn(label, help=doc)
    places, sizes = decimals(values), values.abs()
    small = sizes.max() < 0.01 or 0 < sizes.min() < 10.0**-places  # of several orders of magnitude
    whole = (values.dropna() % 1 == 0).all()
    number = "%d" if whole else "%.2e" if small else f"%.{places}f"
    return st.column_config.NumberColumn(label, help=doc, format=number)

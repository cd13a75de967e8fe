"""The table of trials: status, reason, value, KL and searched values; it also selects trials."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import pandas as pd
import streamlit as st

from dashboard import charts, safe_text, style
from dashboard.data import Snapshot
from dashboard.views import common
from dashboard.views.sidebar import TRIALS
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from tuner.judge.best import VALUE
from tuner.judge.results import StudyView
from tuner.judge.scoring import ends_within
from tuner.study.status import Role

PREFIX = "params_"
MOST_ROWS = 20
"""Rows shown without scrolling."""
MOST_LIVE = 250
"""Larger tables are neither refreshed live nor coloured: too much to send each time."""


def draw(snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw the table, chosen trials and the best on top; ticking a row chooses its trial on all pages."""
    row = st.container(horizontal=True, vertical_alignment="center")
    row.subheader("Trials", anchor=False, help=_HELP, width="content")
    with row:
        trials, filters = _filtered(snapshot)
    best = snapshot.view.best()
    if best is not None:
        trials = trials.sort_values("number", key=lambda numbers: numbers != best.number, kind="stable")
    looks = style.looks(common.highlighted(snapshot, chosen, charts.MOST_LINES))
    shown = rows(trials, notes(snapshot.view), _optional(snapshot), looks)
    styled: Any = shown
    if len(shown) <= MOST_LIVE:
        styled = shown.style.apply(_coloured, axis=None, looks=_looks(trials, looks))
    height: Literal["content", "auto"] = "content" if len(shown) <= MOST_ROWS else "auto"
    numbers = trials["number"].tolist()
    key = f"trials {best and best.number} {filters}"
    if _ticked(f"{key} {_version()}", numbers) not in (None, set(chosen) & set(numbers)):
        st.session_state[_VERSION] = _version() + 1  # a new key, because the choice was changed elsewhere
    key = f"{key} {_version()}"
    rows_chosen = [place for place, number in enumerate(numbers) if number in chosen]
    with st.container(key="all trials"):
        st.dataframe(
            styled, key=key, height=height, hide_index=True, placeholder="", column_config=_trial_columns(trials),
            on_select=partial(_choose, key, numbers, chosen), selection_mode="multi-row",
            selection_default={"selection": {"rows": rows_chosen}},
        )  # fmt: skip


_VERSION = "version of the table"


def _filtered(snapshot: Snapshot) -> tuple[pd.DataFrame, list[str]]:
    """Return the filtered trials and the filters, which are in the link.

    Statuses are alternatives; all other filters must hold.
    """
    trials, view = snapshot.trials, snapshot.view
    of_kind = {kind: trials["kind"] == kind for kind in style.KINDS}
    others = {
        "ends within the KL budget": trials["end_kl"] <= view.spec.kl_budget,
        "fixed β": trials["number"].isin([row.number for row in view.trials if row.config.get("kl_target") is None]),
        "labelled": trials["number"].isin([row.number for row in view.trials if row.label]),
    }
    present = [name for name, passes in (of_kind | others).items() if passes.any()]
    if others["fixed β"].all():
        present.remove("fixed β")
    if len(present) < 2:
        return trials, []
    chosen = list(
        st.pills("Show", present, selection_mode="multi", key="show", bind="query-params", label_visibility="collapsed")
    )
    kinds = [name for name in chosen if name in of_kind]
    passed = trials["kind"].isin(kinds or style.KINDS)
    for name in chosen:
        passed &= others.get(name, passed)
    return trials[passed], chosen


def _version() -> int:
    return int(st.session_state.get(_VERSION, 0))


def _ticked(key: str, numbers: Sequence[int]) -> set[int] | None:
    """Return the ticked trials of the table with this key; None if it was not drawn yet."""
    state = st.session_state.get(key)
    return None if state is None else {numbers[place] for place in state.selection.rows if place < len(numbers)}


def _choose(key: str, numbers: Sequence[int], chosen: Sequence[int]) -> None:
    """Choose the ticked trials, and keep chosen ones that the table does not show."""
    ticked = _ticked(key, numbers) or set()
    kept = [number for number in chosen if number in ticked or number not in numbers]
    st.session_state[TRIALS] = [*kept, *(number for number in numbers if number in ticked and number not in kept)]
    common.ask_for_the_whole_page()


_HELP = (
    "Tick trials to choose them on every page. "
    "Value and KL are of a trial's best checkpoint within the KL budget; end reward and KL are those of its last "
    "evaluation. An empty cell was not searched in that trial."
)


def _optional(snapshot: Snapshot) -> list[str]:
    """Return the optional columns that matter in this study."""
    return ["end_reward", "end_kl", *(["rung_score"] if snapshot.view.spec.pauses_trials else [])]


def notes(view: StudyView) -> dict[int, str]:
    """Return notes by trial number: best, over the budget, fork."""
    best = view.best()
    found = {}
    for row in view.trials:
        is_over = ends_within(row, view.spec) is False
        parts = [
            "best" if best is not None and row.number == best.number else "",
            "ends over budget" if is_over else "",
        ]
        parts.append(f"fork of {row.parent}" if row.role is Role.FORK else "")
        found[row.number] = ", ".join(part for part in parts if part)
    return found


def rows(
    trials: pd.DataFrame,
    notes: Mapping[int, str] | None = None,
    optional: Sequence[str] = (),
    looks: Mapping[int, style.Look] | None = None,
) -> pd.DataFrame:
    """Return the table's cells by column, safe to show and to export; `notes` by number, `optional` columns by name,
    `looks` as in the page's charts.
    """
    shown = pd.DataFrame(
        {
            "number": trials["number"],
            "line": [look.dash.glyph for look in _looks(trials, looks or {})],
            "status": [
                f"{style.mark(kind).glyph} {shown}"
                for kind, shown in zip(trials["kind"], trials["shown_status"], strict=True)
            ],
            "note": [
                safe_text.cell("; ".join(filter(None, [(notes or {}).get(number, ""), message or rule])))
                for number, rule, message in zip(trials["number"], trials["rule"], trials["reason"], strict=True)
            ],
            "value": trials["value"],
            "value_se": trials["value_se"],
            "kl": trials["kl"],
            **{name: trials[name] for name in optional},
        },
        index=trials.index,
    )
    progress = (100 * trials["episodes"] / trials["total_episodes"]).rename("progress")
    searched = trials[_searched(trials)].map(_safe)
    return pd.concat([shown, searched, progress, trials["seconds"]], axis=1)


def _safe(value: Any) -> Any:
    """Return a searched value made safe: it may be text from outside."""
    return safe_text.cell(value) if isinstance(value, str) else value


def _searched(trials: pd.DataFrame) -> list[str]:
    present = [column for column in trials.columns if column.startswith(PREFIX)]
    order = [PREFIX + name for name in HYPERPARAMETERS]
    return sorted(present, key=lambda column: order.index(column) if column in order else len(order))


def _looks(trials: pd.DataFrame, looks: Mapping[int, style.Look]) -> list[style.Look]:
    """Return each trial's look: the charts', else its number's."""
    return [looks.get(number) or style.looks([number])[number] for number in trials["number"]]


def _coloured(shown: pd.DataFrame, looks: Sequence[style.Look]) -> pd.DataFrame:
    styles = pd.DataFrame("", index=shown.index, columns=shown.columns)
    styles["line"] = [f"color: {look.colour}" for look in looks]
    return styles


def _trial_columns(trials: pd.DataFrame) -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    statuses = "; ".join(f"{style.kind_label(kind)}: {style.MEANINGS[kind]}" for kind in style.KINDS)
    columns: dict[str, Any] = {
        "number": number("Trial", width=60, pinned=True),
        "line": text("Line", width=55, help="The trial's colour and line style in every chart."),
        "status": text("Status", width=110 if trials["kind"].ne(style.SCREENED).all() else 130, help=statuses),
        "note": text(
            "Note and reason",
            width=200,
            help="The best trial within the KL budget, completed trials over it, forks; and why a trial ended early or "
            "is paused, with what its rule measured. Click for all.",
        ),
        "value": number("Value", format="%.3f", width=70, help=f"Eval reward: {VALUE}."),
        "value_se": number("± SE", format="%.3f", width=65, help=METRICS["eval/reward_se"].doc),
        "kl": number("KL (nats)", format="%.2f", width=85, help=METRICS["eval/kl"].doc),
        "end_reward": number(
            "End reward", format="%.3f", width=80, help="Eval reward of the trial's last evaluation, whatever its KL."
        ),
        "end_kl": number("End KL", format="%.2f", width=70, help="Eval KL of the trial's last evaluation."),
        "rung_score": number(
            "Screening score", format="%.3f", width=110, help="Ranks it after a tenth of the episodes."
        ),
        "progress": st.column_config.ProgressColumn(
            "Episodes", format="%.0f%%", max_value=100, width=150, color="gray", help="Share of the trial's episodes."
        ),
        "seconds": number("Time (s)", format="%.0f", width=80, help="Seconds of training, over all attempts."),
    }
    return columns | {
        column: _searched_column(column.removeprefix(PREFIX), trials[column]) for column in _searched(trials)
    }


def _searched_column(name: str, values: pd.Series) -> Any:
    declared = HYPERPARAMETERS.get(name)
    label, doc = (declared.title, declared.doc) if declared else (safe_text.one_line(name), None)
    if not pd.api.types.is_numeric_dtype(values):
        return st.column_config.TextColumn(label, help=doc)
    small = values.abs().max() < 0.01
    whole = (values.dropna() % 1 == 0).all()
    return st.column_config.NumberColumn(label, help=doc, format="%.2e" if small else "%d" if whole else "%.3f")

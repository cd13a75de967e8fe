"""Compare a few trials in tables: settings, outcomes, differences, lineage, commands."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import analysis, data, safe_text, style
from dashboard.data import Snapshot
from dashboard.figures import title_of
from dashboard.views import common
from ppo_core.output import KL_UNIT, NOTHING, measured, plus_minus, short
from tuner.judge.paired import Difference, over
from tuner.judge.results import LONGER, differences
from tuner.judge.scoring import ends_within
from tuner.store import Store, TrialRow
from tuner.study.status import Role

LEAST, MOST = 2, 6
"""Most trials compared."""
BESIDE = 3
"""Most trials for which both tables fit side by side."""


def page(choice: common.Choice) -> None:
    """Draw the page."""
    common.of_a_study(choice, _study)


def _study(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    if not snapshot.view.trials:
        common.line(store, snapshot)
        common.not_begun(snapshot, "No trials yet", "There is nothing to compare before the first trial starts.")
        return
    head = st.container()
    numbers = common.begun(snapshot, chosen or tuple(snapshot.default_trials), MOST)
    with head:
        common.line(store, snapshot, numbers)
    if len(numbers) < LEAST:
        st.info("Choose at least two trials in the sidebar to compare them.")
        return
    row_of = {row.number: row for row in snapshot.view.trials}
    rows = [row_of[number] for number in numbers]
    left, right = st.columns(2) if len(rows) <= BESIDE else (st.container(), st.container())
    with left:
        _settings(rows)
    with right:
        found = _outcomes(store, snapshot, rows)
    _over_the_first(rows, found)
    lineage(snapshot, rows)
    _commands(snapshot, rows)


def _settings(rows: Sequence[TrialRow]) -> None:
    st.subheader("Different settings", anchor=False, help="All other settings are equal.")
    differing = differences(rows)
    if not differing:
        st.info("Their configurations are equal.")
        return
    table = {"setting": [title_of(name) for name in differing]}
    for place, row in enumerate(rows):
        values = (safe_text.cell(short(values[place], 4)) for values in differing.values())
        table[_name(row)] = list(values)
    common.table(pd.DataFrame(table), key="settings", columns=_columns(rows))


_WITHIN = {None: NOTHING, True: "yes", False: "no"}


def _outcomes(store: Store, snapshot: Snapshot, rows: Sequence[TrialRow]) -> dict[int, Difference | None]:
    """Draw the outcomes; return each trial's difference in value from the first."""
    st.subheader(
        "Outcomes",
        anchor=False,
        help=f"One run of each trial. {analysis.NOISE}",
    )
    spec = snapshot.view.spec
    paused = [measured(row.rung_score) if row.rung_episode is not None else "" for row in rows]
    lines = {
        "Status": [style.status_cell(row) for row in rows],
        "Label": [safe_text.cell(row.label) for row in rows],
        "Screening score": paused,
        "Value ± SE (reward)": [plus_minus(row.value, row.value_se) for row in rows],
        "Read at step": ["" if row.value_step is None else str(row.value_step) for row in rows],
        f"Eval KL there ({KL_UNIT})": [measured(row.kl) for row in rows],
        "Last eval reward": [measured(row.end_reward) for row in rows],
        f"Last eval KL ({KL_UNIT})": [measured(row.end_kl) for row in rows],
        f"Ends within {spec.kl_budget:g} {KL_UNIT}": [_WITHIN[ends_within(row, spec)] for row in rows],
        "Episodes": [f"{row.episodes:,}" for row in rows],
        "Time (s)": [f"{row.seconds:.0f}" for row in rows],
        "Reason": [safe_text.cell(row.reason.message) if row.reason else "" for row in rows],
    }
    shown = {name: cells for name, cells in lines.items() if any(cells)}
    table = pd.DataFrame({"outcome": list(shown)} | {_name(row): list(cells) for row, cells in _turned(rows, shown)})
    common.table(table, key="outcomes", columns=_columns(rows))
    base, *others = rows
    return {row.number: over(store, base, row) for row in others}


def _over_the_first(rows: Sequence[TrialRow], found: Mapping[int, Difference | None]) -> None:
    """Describe each trial's reward relative to the first."""
    base, *others = rows
    for row in others:
        difference = found[row.number]
        if difference is None:
            continue
        screened = [one.number for one in (base, row) if one.is_at_rung]
        st.text(
            f"Trial {row.number} against trial {base.number}: {_signed(difference.mean, difference.se)} reward, "
            f"{difference.verdict}.{_screened(screened)}"
        )
    if not any(found.values()):
        st.info(f"Trial {base.number} or all the others have no value yet, so there is no difference to show.")


def _turned(rows: Sequence[TrialRow], lines: dict[str, list[str]]) -> list[tuple[TrialRow, list[str]]]:
    return [(row, [cells[place] for cells in lines.values()]) for place, row in enumerate(rows)]


def _screened(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    who = "Trial {} is" if len(numbers) == 1 else "Trials {} are"
    return f" {who.format(_listed(numbers))} screened, so this does not compare whole runs."


def _signed(mean: float, error: float | None) -> str:
    return f"{mean:+.3f}" if error is None else f"{mean:+.3f} ± {error:.3f}"


def lineage(snapshot: Snapshot, rows: Sequence[TrialRow]) -> None:
    """Describe the trials' lineage, if any is a fork or was forked."""
    trials = snapshot.view.trials
    lines = []
    for row in rows:
        for step in analysis.lineage(trials, row.number):
            changed = ", ".join(
                f"{name} {short(now, 4)} (was {short(before, 4)})" for name, (before, now) in step.changed.items()
            )
            lines.append(f"Trial {step.trial} is a fork of trial {step.parent} at step {step.step}: {changed}")
        forks = analysis.forks_of(trials, row.number)
        if forks:
            lines.append(f"Trial {row.number} was forked into trial{'s' if len(forks) > 1 else ''} {_listed(forks)}")
    if lines:
        st.subheader("Lineage", anchor=False, help="Up to the fork's step a fork's curve is its parent's.")
        for line in dict.fromkeys(lines):
            st.text(safe_text.one_line(line, 400))


def _commands(snapshot: Snapshot, rows: Sequence[TrialRow]) -> None:
    forked = any(row.role is Role.FORK for row in rows)
    from_start = " A fork's command trains with its parent's values up to the fork's episode." if forked else ""
    st.subheader(
        "Train one of them longer",
        anchor=False,
        help=f"Each command trains that trial's configuration {LONGER} times longer and keeps the model; a schedule "
        f"over the run's length stretches with it.{from_start}",
    )
    for row in rows:
        st.code(data.train_for_real(snapshot.view.row.name, row), language=None, wrap_lines=True)


def _name(row: TrialRow) -> str:
    return f"trial {row.number}"


def _columns(rows: Sequence[TrialRow]) -> dict[str, Any]:
    """Return columns wide enough for a value with its standard error."""
    return {_name(row): st.column_config.TextColumn(_name(row).capitalize(), width=115) for row in rows}


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

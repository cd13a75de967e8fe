"""Compare: settings, outcomes, differences, lineage and commands of a few trials."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import analysis, safe_text, style
from dashboard.data import Snapshot
from dashboard.figures import title_of
from dashboard.views import changes, common
from ppo_core.config.declare import HyperValue
from ppo_core.output import pluralize, plus_minus, short
from tuner.confirm.answer import Answer, study_answer
from tuner.confirm.plan import ALWAYS
from tuner.judge.paired import reward_difference
from tuner.judge.results import differences
from tuner.store import Store, TrialRow
from tuner.study.space import is_number
from tuner.study.status import Origin

LEAST_TRIALS = 2
MOST_TRIALS = 6
MOST_BESIDE = 3
"""Most trials for which both tables fit side by side, and most commands beside each other."""
MOST_CHARACTERS = 24
"""Most characters for which a column is widened: the label of a trial may be long."""
Looks = Mapping[int, style.Look]


@common.study_page("There is nothing to compare before the first trial starts.")
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page; a trial chosen alone is beside the answer or the reference."""
    head = st.container()
    numbers = common.started(snapshot, chosen, MOST_TRIALS)
    if len(numbers) < LEAST_TRIALS:
        numbers = tuple(dict.fromkeys([*numbers, *snapshot.defaults]))[:LEAST_TRIALS]
    with head:
        common.watch(store, snapshot, numbers)
    if len(numbers) < LEAST_TRIALS:
        st.info("The study has only one trial yet.")
        return
    row_of = {row.number: row for row in snapshot.view.trials}
    rows = sorted((row_of[number] for number in numbers), key=lambda row: row.origin is not Origin.REFERENCE)
    looks = common.looks(snapshot, [row.number for row in rows])
    answer = study_answer(store, snapshot.view)
    left, right = st.columns([9, 10]) if len(rows) <= MOST_BESIDE else [st.container()] * 2
    with left:
        _settings(rows, looks)
    with right:
        _outcomes(snapshot, rows, looks, answer)
        _differences(store, snapshot, rows)
    lineage(snapshot, rows)
    _commands(store, snapshot, rows, looks)


def _settings(rows: Sequence[TrialRow], looks: Looks) -> None:
    common.heading("Different settings", f"All other settings are equal. In brackets: times trial {rows[0].number}'s.")
    differing = differences(rows)
    if not differing:
        st.info("Their configurations are equal.")
        return
    cells = {title_of(name): [_setting(value, values[0]) for value in values] for name, values in differing.items()}
    _table("setting", cells, rows, looks)


def _setting(value: HyperValue, first: HyperValue) -> str:
    """Return a value with its ratio to the first trial's, if both are numbers, and more than a hair apart."""
    text = safe_text.cell(short(value, 4))
    ratio = f"{value / first:.2g}" if is_number(value) and is_number(first) and first else "1"
    return text if ratio == "1" else f"{text} (×{ratio})"


def _outcomes(snapshot: Snapshot, rows: Sequence[TrialRow], looks: Looks, answer: Answer | None) -> None:
    common.heading(
        "Outcomes",
        "Reward and KL are means of fresh seeds on the test prompts with 95% intervals where a trial ran on them; "
        "else of its best in the budget, one seed: the highest of several evaluations, so optimistic.",
    )
    headlines = [snapshot.headline(row) for row in rows]
    titles = {} if answer is None else {answer.number: answer.title}
    roles = [(row.origin if row.origin in ALWAYS else "", titles.get(row.number, "")) for row in rows]
    outcomes = {
        "Role": [", ".join(filter(None, role)) for role in roles],
        "Status": [style.status_cell(row) for row in rows],
        "Label": [safe_text.cell(row.label) for row in rows],
        "Reward": [one.text() for one in headlines],
        "Eval KL (nats)": [one.kl_text() for one in headlines],
        "Measured as": [one.label for one in headlines],
        "Reason": [safe_text.cell(row.reason.message) if row.reason else "" for row in rows],
        "Episodes": [f"{row.episodes:,}" for row in rows],
        "Time (s)": [f"{row.seconds:.0f}" for row in rows],
    }
    _table("outcome", outcomes, rows, looks)


def _table(title: str, cells: Mapping[str, Sequence[str]], rows: Sequence[TrialRow], looks: Looks) -> None:
    """Draw named cells, one column per trial under its line, wide enough for its texts."""
    names = [f"trial {row.number}" for row in rows]
    cells = {"Line": [looks[row.number].dash.glyph for row in rows], **cells}
    shown = {name: texts for name, texts in cells.items() if any(texts)}
    table = pd.DataFrame.from_dict(shown, orient="index", columns=names).reset_index(names=title)
    styles = pd.DataFrame("", index=table.index, columns=table.columns)
    styles.loc[0, names] = [f"color: {looks[row.number].colour}" for row in rows]
    wide = 14 + 7 * int(table[title].map(len).max())
    columns: dict[str, Any] = {title: st.column_config.TextColumn(title.capitalize(), pinned=True, width=wide)} | {
        name: st.column_config.TextColumn(name.capitalize(), width=14 + 6 * int(characters))
        for name, characters in table[names].map(len).clip(len("Trial 00"), MOST_CHARACTERS).max().items()
    }
    styled = table.style.apply(lambda _: styles, axis=None)
    st.dataframe(styled, key=title, hide_index=True, column_config=columns, height="content")


def _differences(store: Store, snapshot: Snapshot, rows: Sequence[TrialRow]) -> None:
    """Draw each trial's reward relative to the first: on fresh seeds where both ran on them, else in the search."""
    base, *others = rows
    for row in others:
        text, about = _difference(store, snapshot, base, row)
        if text:
            st.text(text, help=about)


def _difference(store: Store, snapshot: Snapshot, base: TrialRow, row: TrialRow) -> tuple[str, str | None]:
    """Return a line on a trial's reward relative to another's with its help; empty if one has none."""
    lead = f"Trial {row.number} against trial {base.number}: "
    for run in reversed(snapshot.confirmations):
        if (difference := run.lead_of(row.number, base.number)) is not None:
            return f"{lead}{difference.signed} reward on {pluralize(difference.n, 'fresh seed')}.", None
    searched = reward_difference(store, base, row)
    if searched is None:
        return "", None
    text = plus_minus(searched.mean, searched.se, signed=True)
    return f"{lead}{text} reward, {searched.verdict}.", f"{searched.evidence}."


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
            into = ", ".join(map(str, forks))
            lines.append(f"Trial {row.number} was forked into trial{'s' if len(forks) > 1 else ''} {into}")
    if lines:
        common.heading("Lineage", "Up to the fork's step a fork's curve is its parent's.")
        for line in dict.fromkeys(lines):
            st.text(safe_text.one_line(line, 400))


def _commands(store: Store, snapshot: Snapshot, rows: Sequence[TrialRow], looks: Looks) -> None:
    common.heading("Train one of them")
    grid = st.grid(min(MOST_BESIDE, len(rows)), min_column_width=280)
    for row in rows:
        with grid.cell():
            st.html(style.heading(row.number, looks[row.number], style.status_cell(row)))
            common.show_commands(*changes.go_on(store, snapshot.view, row))

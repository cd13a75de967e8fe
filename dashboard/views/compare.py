"""Compare: settings, outcomes, differences, lineage and commands of a few trials."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import analysis, data, safe_text, style
from dashboard.data import Snapshot
from dashboard.figures import title_of
from dashboard.views import changes, common
from ppo_core.config.declare import HyperValue
from ppo_core.config.kl_budget import is_within
from ppo_core.output import NOTHING, counted, decimals, fixed, plus_minus, short
from tuner.confirm.plan import ALWAYS
from tuner.confirm.result import Confirmation, Interval, confirmations, places_of
from tuner.judge.answer import Answer, of_study
from tuner.judge.paired import over
from tuner.judge.results import StudyView, as_view, differences
from tuner.judge.rules import blame_of
from tuner.judge.scoring import ends_within
from tuner.store import Store, TrialRow
from tuner.study.space import is_number
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Role

LEAST_TRIALS = 2
MOST_TRIALS = 6
NONE_TRAINED = "none trained"
"""Value of a trial whose best checkpoint within the KL budget is the SFT policy, at step 0."""
MOST_BESIDE = 3
"""Most trials for which both tables fit side by side, and most commands beside each other."""
MOST_CHARACTERS = 24
"""Most characters for which a column is widened: the label of a trial may be long."""
BEST = "★"
"""Mark of the highest value."""
Looks = Mapping[int, style.Look]


@common.study_page("There is nothing to compare before the first trial starts.")
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    head = st.container()
    numbers = common.started(snapshot, chosen or tuple(snapshot.default_trials), MOST_TRIALS)
    with head:
        common.watch(store, snapshot, numbers)
    is_alone = len(numbers) == 1
    if is_alone:
        numbers = tuple(dict.fromkeys([snapshot.default_trials[0], *numbers, *snapshot.default_trials]))[:LEAST_TRIALS]
    if len(numbers) < LEAST_TRIALS:
        st.info("Choose at least two trials in the sidebar to compare them.")
        return
    if is_alone:
        st.caption("Only one trial is chosen, so another is beside it: the reference, or the best one.")
    row_of = {row.number: row for row in snapshot.view.trials}
    rows = [row_of[number] for number in numbers]
    looks = tables(store, snapshot, rows)
    lineage(snapshot, rows)
    _commands(store, snapshot, rows, looks)


def tables(store: Store, snapshot: Snapshot, rows: Sequence[TrialRow]) -> Looks:
    """Draw the trials' settings, outcomes and differences; return their looks."""
    looks = common.looks(snapshot, [row.number for row in rows])
    roles = _roles(of_study(store, snapshot.view), rows)
    left, right = st.columns([9, 10]) if len(rows) <= MOST_BESIDE else [st.container()] * 2
    with left:
        _settings(rows, looks, roles)
    with right:
        runs = confirmations(store, as_view(snapshot.view.row, (*snapshot.view.trials, *snapshot.view.confirming)))
        _outcomes(store, snapshot, rows, looks, roles, runs)
    with left:
        _differences(store, rows, runs)
    return looks


def _roles(answer: Answer | None, rows: Sequence[TrialRow]) -> dict[int, str]:
    """Return by number what a trial is of reference, baseline and the one to launch; empty: none."""
    launched = None if answer is None else answer.number
    return {
        row.number: ", ".join([str(row.origin)] * (row.origin in ALWAYS) + ["to launch"] * (row.number == launched))
        for row in rows
    }


def _settings(rows: Sequence[TrialRow], looks: Looks, roles: Mapping[int, str]) -> None:
    common.heading("Different settings", f"All other settings are equal. In brackets: times trial {rows[0].number}'s.")
    differing = differences(rows)
    if not differing:
        st.info("Their configurations are equal.")
        return
    _table(
        "setting",
        {title_of(name): [_setting(value, values[0]) for value in values] for name, values in differing.items()},
        looks,
        roles,
    )


def _setting(value: HyperValue, first: HyperValue) -> str:
    """Return a value with its ratio to the first trial's, if both are numbers, and more than a hair apart."""
    text = safe_text.cell(short(value, 4))
    ratio = f"{value / first:.2g}" if is_number(value) and is_number(first) and first else "1"
    return text if ratio == "1" else f"{text} (×{ratio})"


_WITHIN = {None: NOTHING, True: "yes", False: "no"}


def ended_within(row: TrialRow, spec: StudySpec) -> bool | None:
    """Return True if a trial ends within the KL budget; False also if it ended early over it; None: not known."""
    is_read = row.status.is_final and row.end_kl is not None
    return is_within(row.end_kl, row.end_kl_se, spec.kl_budget) and ends_within(row, spec) if is_read else None


def _outcomes(
    store: Store,
    snapshot: Snapshot,
    rows: Sequence[TrialRow],
    looks: Looks,
    roles: Mapping[int, str],
    runs: Sequence[Confirmation],
) -> None:
    common.heading(
        "Outcomes",
        f"On fresh seeds: the mean reward and KL of the runs that confirm it, on the test prompts, with 95% intervals. "
        f"Below: one run of each trial. {common.VALUE_IS} {BEST} is the highest, if none ran on fresh seeds. "
        f"{analysis.NOISE}",
    )
    spec, top = snapshot.view.spec, max((row.value for row in rows if row.value is not None), default=None)
    evaluated = data.curves(store, snapshot, analysis.EVALUATED, numbers=list(roles), evaluations_only=True)
    read_at = {(each.trial, each.step): f"{each.episode:,} (step {each.step})" for each in evaluated.itertuples()}
    reward = decimals([row.value for row in rows], [row.value_se for row in rows])
    kl = decimals(kl for row in rows for kl in (row.kl, row.end_kl))
    fresh: dict[str, list[str]] = {}
    for run in runs:
        one_of = {one.trial.number: one for one in run.configurations if one.reward is not None}
        ones = [one_of.get(row.number) for row in rows]
        at = f" at {run.total_episodes:,} episodes" if len(runs) > 1 else ""
        rewards, kls = ([None if one is None else getattr(one, name) for one in ones] for name in ("reward", "kl"))
        fresh |= {
            f"Fresh seeds: reward{at}": _texts(rewards),
            f"Fresh seeds: KL{at}": _texts(kls),
            f"Fresh seeds: within budget{at}": [
                "" if one is None else f"{one.ends_within} of {len(one.rewards)}" for one in ones
            ],
        }
    is_starred = not any(map(any, fresh.values()))  # one run of each says less
    star_of = {row.number: f"{BEST} " for row in rows if is_starred and row.value is not None and row.value == top}
    outcomes = {
        "Status": [style.status_cell(row) for row in rows],
        "Label": [safe_text.cell(row.label) for row in rows],
        **fresh,
        "Value ± SE (reward)": [
            NONE_TRAINED
            if row.value_step == 0
            else star_of.get(row.number, "") + plus_minus(row.value, row.value_se, reward)
            for row in rows
        ],
        "Read at episode": [read_at.get((row.number, row.value_step or None), "") for row in rows],
        "Eval KL there (nats)": ["" if row.value_step == 0 else fixed(row.kl, kl) for row in rows],
        "Last eval reward": [fixed(row.end_reward, reward) for row in rows],
        "Last eval KL (nats)": [fixed(row.end_kl, kl) for row in rows],
        f"Ends within {spec.kl_budget:g} nats": [_WITHIN[ended_within(row, spec)] for row in rows],
        "Episodes": [f"{row.episodes:,}" for row in rows],
        "Time (s)": [f"{row.seconds:.0f}" for row in rows],
    }
    _table("outcome", outcomes, looks, roles)
    for row in rows:
        if row.reason:
            st.text(f"Trial {row.number}: {safe_text.one_line(row.reason.message, 400)}")


def _texts(intervals: Sequence[Interval | None]) -> list[str]:
    """Return intervals with one number of decimals; those that are not known as empty texts."""
    places = places_of(intervals)
    return ["" if one is None else one.with_places(places) for one in intervals]


def _table(title: str, cells: Mapping[str, Sequence[str]], looks: Looks, roles: Mapping[int, str]) -> None:
    """Draw named cells, one column per trial under its line and role, wide enough for its texts."""
    names = [f"trial {number}" for number in roles]
    cells = {"Line": [looks[number].dash.glyph for number in roles], "Role": list(roles.values()), **cells}
    shown = {name: texts for name, texts in cells.items() if any(texts)}
    table = pd.DataFrame.from_dict(shown, orient="index", columns=names).reset_index(names=title)
    styles = table.map(lambda cell: f"background-color: {common.MARKS['✓']}" if cell.startswith(BEST) else "")
    styles.loc[0, names] = [f"color: {looks[number].colour}" for number in roles]
    columns: dict[str, Any] = {title: st.column_config.TextColumn(title.capitalize(), pinned=True)} | {
        name: st.column_config.TextColumn(name.capitalize(), width=14 + 6 * int(characters))
        for name, characters in table[names].map(len).clip(len("Trial 00"), MOST_CHARACTERS).max().items()
    }
    styled = table.style.apply(lambda _: styles, axis=None)
    st.dataframe(styled, key=title, hide_index=True, column_config=columns, height="content")


def _differences(store: Store, rows: Sequence[TrialRow], runs: Sequence[Confirmation]) -> None:
    """Describe each trial's reward relative to the first, in the search and on fresh seeds."""
    base, *others = rows
    lines = [line for row in others if (line := against(store, base, row))]
    for run in runs:
        one_of = {one.trial.number: one for one in run.read}
        for row in others:
            one = one_of.get(row.number)
            lead = None if one is None else run.lead(one, one_of.get(base.number))
            if lead is not None:
                lines.append(
                    f"On {counted(lead.n, 'fresh seed')}, trial {row.number} against trial {base.number}: "
                    f"{lead.signed} reward{'' if lead.low is None else ', with its 95% interval'}."
                )
    for line in lines or [f"Trial {base.number} or all the others have no value, so there is no difference to show."]:
        st.text(line)


def against(store: Store, base: TrialRow, row: TrialRow) -> str:
    """Return a sentence on a trial's value relative to another's; empty if one has none."""
    lead = over(store, base, row)
    if lead is None:
        return ""
    who = " (the reference)" if base.origin is Origin.REFERENCE else ""
    reward = plus_minus(lead.mean, lead.se, signed=True)
    return f"Trial {row.number} against trial {base.number}{who}: {reward} reward, {lead.verdict}."


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
    is_forked = any(row.role is Role.FORK for row in rows)
    from_start = " A fork's command trains with its parent's values up to the fork's episode." if is_forked else ""
    common.heading(
        "Train one of them",
        f"The command keeps the model.{from_start}",
    )
    grid = st.grid(min(MOST_BESIDE, len(rows)), min_column_width=280)
    for row in rows:
        with grid.cell():
            st.html(style.heading(row.number, looks[row.number], style.status_cell(row)))
            commands = dict(islice(changes.go_on(store, snapshot.view, row).items(), 1))
            if blame_of(row.reason):
                instead = " Try a change of it instead:" if commands else ""
                st.text(f"The guard ended trial {row.number}, so it is not worth training longer.{instead}")
            common.show_captioned(commands)
    draw_known(snapshot.view, rows)


def draw_known(view: StudyView, rows: Sequence[TrialRow]) -> None:
    """Say for which lengths the results of trials hold that the guard did not end."""
    rows = [row for row in rows if not blame_of(row.reason)]
    if not rows:
        return
    numbers = {row.number for row in rows}
    runs = [*rows, *(run for run in view.confirming if run.parent in numbers)]
    lengths = " and ".join(f"{episodes:,}" for episodes in sorted({run.episodes for run in runs} - {0})) or "no"
    text = f"The results above are of runs of {lengths} episodes; how longer runs end is not known, so watch their KL."
    st.caption(text)

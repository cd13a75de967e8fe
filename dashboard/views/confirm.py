"""Confirm: how the best configurations did on fresh seeds, and which one to launch."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from plotly.subplots import make_subplots

from dashboard import data, figures, style
from dashboard.data import Snapshot
from dashboard.views import common, compare
from dashboard.views.answer import what_to_launch
from ppo_core.errors import ConfigError
from ppo_core.output import KL_UNIT, decimals, measured, plus_minus
from tuner.confirm.plan import DEFAULT_SEEDS, DEFAULT_TOP, Plan, cost_line, missing
from tuner.confirm.result import Confirmation, Confirmed, Interval, beats, confirmations, places_of, runs_text
from tuner.judge.answer import of_study
from tuner.store import Store

ROW_HEIGHT, AXIS_HEIGHT = 40, 92
"""Height in pixels of a configuration, and of a panel's axis."""


@common.study_page(under_own_budget=True)
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    common.watch(store, snapshot)
    every = confirmations(store, snapshot.view)
    if every:
        _confirmation(store, snapshot, _choose(every))
    else:
        _not_confirmed(store, snapshot)


def _not_confirmed(store: Store, snapshot: Snapshot) -> None:
    view = snapshot.view
    word = {"finished": "confirm", "paused": "resume", "unfinished": "run"}.get(view.state)
    command = [] if word is None else [data.command([word, view.row.name])]
    if view.state != "finished":
        text = "Let the search finish first: its best configurations may still change."
        common.guide("Not confirmed yet", text, command)
        return
    try:
        wanted = missing(view.trials, view.spec, Plan())
    except ConfigError as problem:
        common.guide("Not confirmed yet", "No configuration of the search can run on fresh seeds.", [], str(problem))
        return
    text = (
        f"One search on one seed chose the best trial. This command runs up to {DEFAULT_TOP} of the best "
        f"configurations and the reference on {DEFAULT_SEEDS} fresh seeds each, and evaluates them once on the "
        "test prompts."
    )
    common.guide("Not confirmed yet", f"{text} {cost_line(wanted, view.trials, view.row.workers or 1)}.", command)
    row_of = {row.number: row for row in view.trials}
    parents = [row_of[number] for number in dict.fromkeys(run.parent for run in wanted) if number is not None]
    compare.tables(store, snapshot, parents)


def _choose(every: Sequence[Confirmation]) -> Confirmation:
    """Return the confirmation of the length in the link, else the longest."""
    by_length = {f"{confirmation.total_episodes:,}": confirmation for confirmation in every}
    if len(every) == 1:
        return every[0]
    lengths = list(by_length)
    length = st.segmented_control(
        "Episodes per run", lengths, default=lengths[-1], required=True, key="length", bind="query-params"
    )
    return by_length[length]


def _confirmation(store: Store, snapshot: Snapshot, confirmation: Confirmation) -> None:
    left, right = st.columns([3, 2], gap="medium")
    with left:
        if confirmation.best is not None:
            common.heading("Reward and KL on the test prompts", _intervals_help(snapshot, confirmation))
            kl_budget = snapshot.view.spec.kl_budget
            looks = common.looks(snapshot, [one.trial.number for one in confirmation.configurations])
            common.figure(
                intervals(confirmation, looks, kl_budget),
                key="confirmed rewards",
                alt="Reward, its difference to the reference, and KL on the test prompts: a point per seed, and each "
                "configuration's mean with its 95% interval",
                caption=what_to_see(confirmation, kl_budget),
            )
    with right:
        launch = of_study(store, snapshot.view)
        if launch is not None:
            common.heading("What to launch")
            what_to_launch(launch)
        if launch is None or launch.decision != confirmation.verdict:
            st.markdown(f"At {confirmation.total_episodes:,} episodes: **{confirmation.verdict}**")
        baseline = confirmation.baseline
        if baseline is not None and baseline.reward is not None:
            reward = plus_minus(baseline.reward, baseline.reward_se)
            st.text(f"The SFT policy scores {reward} on the same prompts.")
    common.table(table(confirmation), key="confirmed")


def _intervals_help(snapshot: Snapshot, confirmation: Confirmation) -> str:
    return (
        f"Each configuration ran on the same fresh seeds. A run's checkpoint was chosen on the eval prompts, within "
        f"{snapshot.view.spec.kl_budget:g} {KL_UNIT}, and evaluated once on {confirmation.prompts} test prompts. "
        "Intervals are 95% t-intervals over the seeds, with the spread that all share; those of differences hold for "
        "all at once, however often you look. That of the winner is not adjusted for its being chosen."
    )


def table(confirmation: Confirmation) -> pd.DataFrame:
    """Return one row per configuration, the highest mean first."""

    read = confirmation.configurations
    searched = decimals([one.trial.value for one in read], [one.trial.value_se for one in read])
    columns = ("reward", "kl", "over_reference", "under_best")
    places = {name: places_of(getattr(one, name) for one in read) for name in columns}

    def text(config: Confirmed, name: str, *, signed: bool = False) -> str:
        interval: Interval | None = getattr(config, name)
        return "–" if interval is None else interval.with_places(places[name], signed=signed)

    return pd.DataFrame(
        {
            "configuration": config.label,
            "seeds": 0 if config.reward is None else config.reward.n,
            "reward [95%]": text(config, "reward"),
            f"KL [95%], {KL_UNIT}": text(config, "kl"),
            "reward over the reference": text(config, "over_reference", signed=True),
            "best over this one": text(config, "under_best", signed=True),
            "ends within budget": "–" if config.reward is None else f"{config.ends_within} of {config.reward.n}",
            "value in the search": plus_minus(config.trial.value, config.trial.value_se, searched),
            "note": runs_text(config),
        }
        for config in read
    )


class Panel(NamedTuple):
    """One quantity of the configurations, and the lines that it is judged by."""

    title: str
    rows: Sequence[tuple[Confirmed, Mapping[int, float], Interval]]
    """Values by seed and their mean, the best last, since the axis rises."""
    levels: Mapping[str, float]
    """Places of vertical lines by their texts."""

    @property
    def ends(self) -> list[float]:
        """All values and all ends of intervals."""
        every = [end for _, values, mean in self.rows for end in (*values.values(), mean.low, mean.high)]
        return [end for end in every if end is not None]


def panels(confirmation: Confirmation, kl_budget: float) -> list[Panel]:
    """Return reward, its difference to the reference (where that was read) and KL."""
    read, baseline = confirmation.configurations[::-1], confirmation.baseline
    first = {} if confirmation.reference is None else confirmation.reference.rewards
    levels = {"the reference's mean": statistics.fmean(first.values())} if first else {}
    reward = Panel("Reward", [(one, one.rewards, one.reward) for one in read if one.reward], levels)
    sft = None if baseline is None else baseline.reward
    if sft is not None and min(reward.ends) - sft < max(reward.ends) - min(reward.ends):  # else it flattens the rest
        levels["SFT policy"] = sft
    over = [
        (one, {seed: value - first[seed] for seed, value in one.rewards.items() if seed in first}, one.over_reference)
        for one in read
        if one.over_reference
    ]
    difference = Panel("Reward over the reference, seed by seed", over, {"no difference": 0.0})
    kls = [(one, one.kls, one.kl) for one in read if one.kl]
    kl = Panel(f"KL ({KL_UNIT})", kls, {f"KL budget {kl_budget:g}": kl_budget})
    return [reward, *([difference] if over else []), kl]


def intervals(confirmation: Confirmation, looks: Mapping[int, style.Look], kl_budget: float) -> go.Figure:
    """Plot each quantity below the other: a point per seed, and the mean with its interval, the best on top."""
    drawn = panels(confirmation, kl_budget)
    sizes = [ROW_HEIGHT * len(panel.rows) for panel in drawn]
    height = sum(sizes) + AXIS_HEIGHT * len(drawn)
    figure = make_subplots(len(drawn), 1, row_heights=sizes, vertical_spacing=AXIS_HEIGHT / height)
    figures.lay_out(figure, x="", y="", height=height, margin_t=24)
    for row, panel in enumerate(drawn, 1):
        for config, values, mean in panel.rows:
            colour = looks[config.trial.number].colour
            figure.add_scatter(
                x=list(values.values()), y=[config.label] * len(values), mode="markers", row=row, col=1,
                marker={"color": colour, "size": 8, "opacity": 0.65}, customdata=list(values), showlegend=False,
                hovertemplate="%{y}, seed %{customdata}: "
                f"%{{x:.{places_of(every for _, _, every in panel.rows)}f}}<extra></extra>",
            )  # fmt: skip
            high, low = (0.0 if end is None else abs(end - mean.mean) for end in (mean.high, mean.low))
            figure.add_scatter(
                x=[mean.mean], y=[config.label], mode="markers", row=row, col=1, showlegend=False,
                marker={"color": colour, "size": 12, "symbol": "diamond"},
                error_x={"array": [high], "arrayminus": [low], "color": colour, "thickness": 2, "width": 6},
                hovertemplate=f"{config.label}: {mean.text}, n = {mean.n}<extra></extra>",
            )  # fmt: skip
        for text, place in panel.levels.items():
            figure.add_vline(
                x=place, line={"color": figures.GREY, "dash": "dot", "width": 1.5}, row=row, col=1,
                annotation={"text": text, "font": figures.FONT, "yanchor": "bottom"}, annotation_position="top left",
            )  # fmt: skip
        figure.update_xaxes(title=panel.title, row=row, col=1)
    right = 1.03 * max(*drawn[-1].ends, kl_budget)
    figure.add_vrect(kl_budget, right, fillcolor=figures.GREY, opacity=0.1, line_width=0, row=len(drawn), col=1)
    return figure.update_xaxes(zeroline=False).update_yaxes(automargin=True, type="category")


def what_to_see(confirmation: Confirmation, kl_budget: float) -> str:
    """Say which configurations beat the reference, and whether KL is within the budget."""
    reference = confirmation.reference
    over = [one for one in confirmation.configurations if reference is not None and one.over_reference]
    clear = [one.name for one in over if reference is not None and beats(one, reference, one.over_reference)]
    better = f"{' and '.join(clear)} {'beats' if len(clear) == 1 else 'beat'}" if clear else "No configuration beats"
    text = f"{better[0].upper()}{better[1:]} the reference. " if over else ""
    kls = [kl for one in confirmation.configurations for kl in one.kls.values()]
    within = f"{sum(kl <= kl_budget for kl in kls)} of {len(kls)} runs are within the KL budget on the test prompts"
    return f"{text}{within}: the highest KL is {measured(max(kls))} {KL_UNIT}."

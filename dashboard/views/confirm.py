"""Confirm: how the best configurations did on fresh seeds, and which one to launch."""

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from dashboard import data, figures, style
from dashboard.data import Snapshot
from dashboard.views import common
from dashboard.views.answer import what_to_launch
from ppo_core.output import KL_UNIT, plus_minus
from tuner.confirm.plan import DEFAULT_SEEDS, DEFAULT_TOP
from tuner.confirm.result import Confirmation, Interval, confirmations, runs_text
from tuner.judge.answer import of_study
from tuner.store import Store


@common.study_page(under_own_budget=True)
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    common.watch(store, snapshot)
    every = confirmations(store, snapshot.view)
    if every:
        _confirmation(store, snapshot, _choose(every))
    else:
        _not_confirmed(snapshot)


def _not_confirmed(snapshot: Snapshot) -> None:
    name, state = snapshot.view.row.name, snapshot.view.state
    word = {"finished": "confirm", "paused": "resume", "unfinished": "run"}.get(state)
    text = "Let the search finish first: its best configurations may still change."
    if state == "finished":
        text = (
            f"One search on one seed chose the best trial. This command runs up to {DEFAULT_TOP} of the best "
            f"configurations and the reference on {DEFAULT_SEEDS} fresh seeds each, and evaluates them once on the "
            "test prompts."
        )
    common.guide("Not confirmed yet", text, [] if word is None else [data.command([word, name])])


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
            common.heading("Reward on the test prompts", _intervals_help(snapshot, confirmation))
            common.figure(
                intervals(
                    confirmation, common.looks(snapshot, [one.trial.number for one in confirmation.configurations])
                ),
                key="confirmed rewards",
                alt="Reward on the test prompts: a point per seed, and each configuration's mean with its 95% interval",
            )
    with right:
        launch = of_study(store, snapshot.view)
        if launch is not None:
            common.heading("What to launch")
            what_to_launch(snapshot.view, launch)
            if launch.confirm:
                st.text("To be surer, confirm again:")
                common.show_commands(data.command(launch.confirm))
        if launch is None or launch.confirmation is None or launch.confirmation.verdict != confirmation.verdict:
            st.markdown(f"At {confirmation.total_episodes:,} episodes: **{confirmation.verdict}**")
        if not confirmation.is_whole:
            st.info("Some runs have not ended or were not evaluated yet; this is the result so far.")
        baseline = confirmation.baseline
        if baseline is not None and baseline.reward is not None:
            reward = plus_minus(baseline.reward, baseline.reward_se)
            st.text(f"The SFT policy scores {reward} on the same prompts.")
    common.table(table(confirmation), key="confirmed")


def _intervals_help(snapshot: Snapshot, confirmation: Confirmation) -> str:
    return (
        f"Each configuration ran on the same fresh seeds. A run's checkpoint was chosen on the eval prompts, within "
        f"{snapshot.view.spec.kl_budget:g} {KL_UNIT}, and evaluated once on {confirmation.prompts} test prompts. "
        "Intervals are 95% t-intervals over the seeds; those of differences are paired by seed and hold for all at "
        "once."
    )


def table(confirmation: Confirmation) -> pd.DataFrame:
    """Return one row per configuration, the highest mean first."""

    def text(interval: Interval | None) -> str:
        return "–" if interval is None else interval.text

    return pd.DataFrame(
        {
            "configuration": config.label,
            "seeds": 0 if config.reward is None else config.reward.n,
            "reward [95%]": text(config.reward),
            f"KL [95%], {KL_UNIT}": text(config.kl),
            "reward over the reference": text(config.over_reference),
            "best over this one": text(config.under_best),
            "ends within budget": "–" if config.reward is None else f"{config.ends_within} of {config.reward.n}",
            "in the search": plus_minus(config.trial.value, config.trial.value_se)
            + (" at screening" if config.trial.is_at_rung else ""),
            "note": runs_text(config),
        }
        for config in confirmation.configurations
    )


def intervals(confirmation: Confirmation, looks: Mapping[int, style.Look]) -> go.Figure:
    """Plot the rewards: a point per seed, and the mean with its interval, highest on top."""
    rows = [(config, config.reward) for config in reversed(confirmation.configurations) if config.reward is not None]
    figure = go.Figure()
    for config, reward in rows:
        colour = style.NEUTRAL if config.is_reference else looks[config.trial.number].colour
        half = 0.0 if reward.high is None else reward.high - reward.mean
        figure.add_scatter(
            x=list(config.rewards.values()),
            y=[config.label] * len(config.rewards),
            mode="markers",
            marker={"color": colour, "size": 7, "opacity": 0.45},
            customdata=list(config.rewards),
            hovertemplate="%{y}, seed %{customdata}: %{x:.3f}<extra></extra>",
            showlegend=False,
        )
        figure.add_scatter(
            x=[reward.mean],
            y=[config.label],
            mode="markers",
            marker={"color": colour, "size": 12, "symbol": "diamond"},
            error_x={"type": "data", "array": [half], "color": colour, "thickness": 2, "width": 6},
            hovertemplate=f"{config.label}: {reward.text}, n = {reward.n}<extra></extra>",
            showlegend=False,
        )
    figures.lay_out(figure, x="Reward on the test prompts", y="", height=110 + 56 * len(rows))
    return figure.update_yaxes(automargin=True, type="category")

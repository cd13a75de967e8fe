"""Confirm: how the best configurations did on fresh seeds, and which one to launch."""

from collections.abc import Sequence

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


def page(choice: common.Choice) -> None:
    """Draw the page."""
    common.of_a_study(choice, _study, under_own_budget=True)


def _study(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    common.line(store, snapshot)
    found = confirmations(store, snapshot.view)
    if found:
        _confirmation(store, snapshot, _chosen(found))
    else:
        _not_confirmed(snapshot)


def _not_confirmed(snapshot: Snapshot) -> None:
    name, is_finished = snapshot.view.row.name, snapshot.view.state == "finished"
    text = (
        f"One search on one seed chose the best trial. This command runs up to {DEFAULT_TOP} of the best "
        f"configurations and the reference on {DEFAULT_SEEDS} fresh seeds each, and evaluates them once on the "
        "test prompts."
    )
    early = "Finish the search first: its best configurations may still change."
    command = data.command(["confirm" if is_finished else "run", name])
    common.guide("Not confirmed yet", text if is_finished else early, [command])


def _chosen(found: Sequence[Confirmation]) -> Confirmation:
    """Return the confirmation of the length in the link, else the longest."""
    by_length = {f"{one.total_episodes:,}": one for one in found}
    if len(found) == 1:
        return found[0]
    length = st.segmented_control(
        "Episodes per run",
        list(by_length),
        default=list(by_length)[-1],
        required=True,
        key="length",
        bind="query-params",
    )
    return by_length[length]


def _confirmation(store: Store, snapshot: Snapshot, found: Confirmation) -> None:
    left, right = st.columns([3, 2], gap="medium")
    with left:
        if found.best is not None:
            st.subheader("Reward on the test prompts", anchor=False, help=_intervals_help(snapshot, found))
            common.figure(
                intervals(found),
                key="confirmed rewards",
                alt="Reward on the test prompts: a point per seed, and each configuration's mean with its 95% interval",
            )
    with right:
        launch = of_study(store, snapshot.view)
        if launch is not None:
            st.subheader("What to launch", anchor=False)
            what_to_launch(snapshot.view, launch)
        if launch is None or launch.confirmation is None or launch.confirmation.verdict != found.verdict:
            st.markdown(f"At {found.total_episodes:,} episodes: **{found.verdict}**")
        if not found.is_whole:
            st.info("Some runs have not ended or were not evaluated yet; this is the result so far.")
        for said in _beside(found):
            st.text(said)
    common.table(table(found), key="confirmed")


def _intervals_help(snapshot: Snapshot, found: Confirmation) -> str:
    return (
        f"Each configuration ran on the same fresh seeds. A run's checkpoint was chosen on the eval prompts, within "
        f"{snapshot.view.spec.kl_budget:g} {KL_UNIT}, and evaluated once on {found.prompts} test prompts. Intervals "
        "are 95% t-intervals over the seeds; those of differences are paired by seed and hold for all at once."
    )


def _beside(found: Confirmation) -> list[str]:
    """Return further results, in sentences."""
    said = []
    if found.baseline is not None and found.baseline.reward is not None:
        before = plus_minus(found.baseline.reward, found.baseline.reward_se)
        said.append(f"The SFT policy scores {before} on the same prompts.")
    return said


def table(found: Confirmation) -> pd.DataFrame:
    """Return one row per configuration, the highest mean first."""

    def text(interval: Interval | None) -> str:
        return "–" if interval is None else interval.text

    return pd.DataFrame(
        {
            "configuration": one.label,
            "seeds": 0 if one.reward is None else one.reward.n,
            "reward [95%]": text(one.reward),
            f"KL [95%], {KL_UNIT}": text(one.kl),
            "reward over the reference": text(one.over_reference),
            "best over this one": text(one.under_best),
            "ends within budget": "–" if one.reward is None else f"{one.ends_within} of {one.reward.n}",
            "in the search": plus_minus(one.trial.value, one.trial.value_se) + (" at screening" * one.trial.is_at_rung),
            "note": runs_text(one),
        }
        for one in found.configurations
    )


def intervals(found: Confirmation) -> go.Figure:
    """Plot the rewards: a point per seed, and the mean with its interval, highest on top."""
    shown = [one for one in reversed(found.configurations) if one.reward is not None]
    figure = go.Figure()
    for one in shown:
        reward, colour = one.reward, style.NEUTRAL if one.is_reference else style.colour(one.trial.number)
        assert reward is not None
        half = 0.0 if reward.high is None else reward.high - reward.mean
        figure.add_scatter(
            x=list(one.rewards.values()),
            y=[one.label] * len(one.rewards),
            mode="markers",
            marker={"color": colour, "size": 7, "opacity": 0.45},
            customdata=list(one.rewards),
            hovertemplate="%{y}, seed %{customdata}: %{x:.3f}<extra></extra>",
            showlegend=False,
        )
        figure.add_scatter(
            x=[reward.mean],
            y=[one.label],
            mode="markers",
            marker={"color": colour, "size": 12, "symbol": "diamond"},
            error_x={"type": "data", "array": [half], "color": colour, "thickness": 2, "width": 6},
            hovertemplate=f"{one.label}: {reward.text}, n = {reward.n}<extra></extra>",
            showlegend=False,
        )
    figures.lay_out(figure, x="Reward on the test prompts", y="", height=110 + 56 * len(shown))
    return figure.update_yaxes(automargin=True, type="category")

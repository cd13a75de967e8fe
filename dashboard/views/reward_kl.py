"""Reward and KL: every trial's trajectory over its evaluations, and what each part of the KL budget buys."""

import math
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import analysis, data, figures, style
from dashboard.analysis import Checkpoint
from dashboard.data import Snapshot
from dashboard.views import common
from dashboard.views.sidebar import TRIALS
from ppo_core.output import decimals, plus_minus
from tuner.confirm.answer import decided
from tuner.confirm.result import Confirmed
from tuner.judge.best import is_sound
from tuner.judge.results import StudyView
from tuner.store import Store

FIGURE = "reward and KL"
"""Key of the figure."""


@common.study_page()
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    common.watch(store, snapshot)
    evaluated = analysis.evaluations(data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True))
    if evaluated.empty:
        text = "A trial is evaluated before its first update, and then every `eval_every_episodes` episodes."
        common.not_started(snapshot, text, "No evaluation yet")
        return
    chosen, done = common.started(snapshot, chosen), decided(list(snapshot.confirmations))
    best = best_checkpoint(snapshot.view, evaluated)
    _figure(snapshot, evaluated, chosen, best, () if done is None else done.configurations)
    _what_kl_buys(snapshot, evaluated)


def _what_kl_buys(snapshot: Snapshot, evaluated: pd.DataFrame) -> None:
    """Draw the best evaluation of any sound trial within parts of the KL budget, and within twice as much."""
    common.heading(
        "What the KL buys",
        "The highest eval reward of any evaluation within each KL, and what it adds to the row above; in the first "
        "row, to the SFT policy. Within means that the KL and its standard error fit. ± is one standard error over the "
        "eval prompts. Trials that failed or broke are left out.",
    )
    sound = [row.number for row in snapshot.view.trials if is_sound(row)]
    best = analysis.best_by_kl(evaluated[evaluated["trial"].isin(sound)], snapshot.view.spec.kl_budget)
    reward, kl = (decimals(best[name], best[f"{name}_se"]) for name in ("reward", "kl"))
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    common.table(
        best.assign(
            reward=[_plus_minus(row.reward, row.reward_se, reward) for row in best.itertuples()],
            kl=[_plus_minus(row.kl, row.kl_se, kl) for row in best.itertuples()],
        )[["within", "reward", "gain", "trial", "kl", "step"]],
        key="what KL buys",
        columns={
            "within": number("Within (nats)", format="%.3g", width=85),
            "reward": text("Best eval reward", width=115),
            "gain": number("Adds", format=f"%+.{reward}f", width=55),
            "trial": number("Trial", format="%d", width=50),
            "kl": text("Its KL", width=95),
            "step": number("Step", format="%d", width=50),
        },
        placeholder="–",
    )


def _plus_minus(mean: float, se: float, places: int) -> str | None:
    return None if math.isnan(mean) else plus_minus(mean, se, places)


def best_checkpoint(view: StudyView, evaluated: pd.DataFrame) -> Checkpoint | None:
    """Return the best checkpoint of the search under the view's KL budget."""
    best = view.best()
    if best is None or best.value_step is None:
        return None
    return analysis.checkpoint_of(evaluated, best.number, best.value_step)


def _figure(
    snapshot: Snapshot,
    evaluated: pd.DataFrame,
    chosen: common.Numbers,
    best: Checkpoint | None,
    confirmed: Sequence[Confirmed],
) -> None:
    finalists = [one.trial.number for one in confirmed]
    highlighted = common.highlighted(snapshot, chosen or tuple(dict.fromkeys([*snapshot.defaults, *finalists])))
    row = st.container(horizontal=True, vertical_alignment="center")
    row.subheader("Reward against KL", anchor=False, help=_LEGEND, width="content")
    scale = row.segmented_control(
        "KL axis", ("linear", "log"), default="linear", required=True, key="scale", bind="query-params",
        label_visibility="collapsed", format_func=lambda scale: f"{scale} KL",
    )  # fmt: skip
    common.figure(
        figures.trajectories(
            evaluated,
            snapshot.trials,
            spec=snapshot.view.spec,
            looks=common.looks(snapshot, highlighted),
            best=best,
            confirmed=confirmed,
            log_kl=scale == "log",
        ),
        key=FIGURE,
        alt="Eval reward against eval KL: each trial's evaluations joined by a line",
        on_select=_choose,
    )


def _choose() -> None:
    """Choose the trials whose points were clicked, on all pages."""
    if numbers := common.selected_trials(FIGURE):
        st.session_state[TRIALS] = numbers[: style.DISTINCT]


_LEGEND = (
    "A line joins a trial's evaluations, starting at the SFT policy; of very many trials a grey dot is the last. In "
    "colour: the chosen trials, else the answer, the reference and what was confirmed; click a line to choose its "
    "trial. ✕ marks where a rule ended it, ■ a "
    "person, ▲ where it failed. The star is the best in budget of one seed, the highest of many noisy evaluations; a "
    "large diamond is the mean of a configuration's fresh seeds on the test prompts, with its 95% intervals: part of "
    "a difference may be the prompts. What exceeds a linear axis is shown by a log KL axis."
)

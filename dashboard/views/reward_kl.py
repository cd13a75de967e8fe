"""Reward and KL: every trial's trajectory, and the best checkpoint under a KL budget."""

import math
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import analysis, data, figures, safe_text, sentences, style
from dashboard.analysis import Checkpoint
from dashboard.data import Snapshot
from dashboard.views import common
from dashboard.views.answer import what_to_launch
from ppo_core.output import counted, decimals, measured, plus_minus
from tuner.confirm.result import Confirmed
from tuner.control import forks
from tuner.judge.answer import launch_of, of_study
from tuner.judge.best import RULE, is_sound
from tuner.judge.results import StudyView
from tuner.judge.scoring import ends_within
from tuner.store import Store
from tuner.study.spec import StudySpec


@common.study_page()
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    common.watch(store, snapshot)
    evaluated = analysis.evaluations(data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True))
    if evaluated.empty:
        text = "A trial is evaluated before its first update, and then every `eval_every_episodes` episodes."
        common.not_started(snapshot, text, "No evaluation yet")
        return
    chosen = common.started(snapshot, chosen)
    best, answer = best_checkpoint(snapshot.view, evaluated), of_study(store, snapshot.view)
    is_own = answer is not None and answer.kl_budget == answer.own_budget
    confirmed = answer.confirmation.configurations if answer is not None and answer.confirmation and is_own else ()
    _figure(snapshot, evaluated, chosen, best, confirmed, None if answer is None else answer.number)
    left, right = st.columns(2, gap="medium")
    with left:
        _what_kl_buys(snapshot, evaluated)
    with right:
        if best is None:
            common.heading(f"No trained checkpoint within {snapshot.view.spec.kl_budget:g} nats", RULE)
            return
        if answer is not None and answer.number != best.trial:
            common.heading("What to launch")
            what_to_launch(answer)
        _checkpoint(store, snapshot, best, evaluated, confirmed)


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


def _checkpoint(
    store: Store, snapshot: Snapshot, best: Checkpoint, evaluated: pd.DataFrame, confirmed: Sequence[Confirmed]
) -> None:
    """Draw the search's best checkpoint, how to get it, and how much luck may be in it."""
    study = snapshot.view.row
    kept = forks.find(snapshot.view.row, best.trial, best.step)
    trial = next(row for row in snapshot.view.trials if row.number == best.trial)
    sound = evaluated["trial"].isin([row.number for row in snapshot.view.trials if is_sound(row)])
    count = len(analysis.trained_within(evaluated[sound], snapshot.view.spec.kl_budget))
    reward = plus_minus(best.reward, best.reward_se)
    found = f"Highest value in the search: {reward}, trial {best.trial} at step {best.step}, KL {measured(best.kl)}"
    common.heading(found, f"{common.VALUE_IS} {RULE}")
    fresh = "Confirm it on fresh seeds before you rely on it."
    for one in confirmed:
        if one.trial.number == best.trial and one.reward is not None and one.kl is not None:
            fresh = (
                f"What to expect is the mean of {counted(one.reward.n, 'fresh seed')} of {one.name} on the test "
                f"prompts: {one.reward.text} at a KL of {one.kl.text}."
            )
    st.text(f"The star is the highest of {count:,} noisy evaluations within the budget, so part of it is luck. {fresh}")
    if ends_within(trial, snapshot.view.spec) is False:
        st.text(
            f"Trial {trial.number} itself ends over the budget, at a KL of {measured(trial.end_kl)}: its configuration "
            "is good up to this step, and not to its end."
        )
    if kept.path is not None:
        common.show_commands(safe_text.one_line(str(kept.path)))
        st.text("To continue training from it, with other values where you like:")
        common.show_commands(data.go_on(study.name, trial, best.episode))
    else:
        st.text(f"Not kept here: {kept.why_not}. To train its model again, from the same seed:")
        common.show_commands(data.command(launch_of(store, snapshot.view, trial)))


def _figure(
    snapshot: Snapshot,
    evaluated: pd.DataFrame,
    chosen: common.Numbers,
    best: Checkpoint | None,
    confirmed: Sequence[Confirmed],
    launched: int | None,
) -> None:
    spec, front = snapshot.view.spec, analysis.front(evaluated)
    highlighted = numbered = common.highlighted(snapshot, chosen, style.DISTINCT)
    if not chosen:
        found = [number for number in (best.trial if best else None, launched) if number is not None]
        highlighted = tuple(dict.fromkeys([*highlighted, *found]))
        numbered = (*snapshot.default_trials, *found)
    row = st.container(horizontal=True, vertical_alignment="center")
    row.subheader("Reward against KL", anchor=False, help=_legend(spec), width="content")
    scale = row.segmented_control(
        "KL axis", ("linear", "log"), default="linear", required=True, key="scale", bind="query-params",
        label_visibility="collapsed", format_func=lambda scale: f"{scale} KL",
    )  # fmt: skip
    over = "" if scale == "log" else figures.over_the_axis(evaluated, snapshot.trials, spec.kl_budget)
    common.figure(
        figures.trajectories(
            evaluated,
            snapshot.trials,
            front,
            spec=spec,
            chosen=highlighted,
            numbered=numbered,
            best=best,
            confirmed=confirmed,
            log_kl=scale == "log",
        ),
        key="reward and KL",
        alt="Eval reward against eval KL: each trial's evaluations joined by a line, and the front over all of them",
        caption=f"{sentences.of_front(evaluated, spec.kl_budget)} {_MEANS if confirmed else ''} {over}",
    )


_MEANS = (
    "Large diamonds are means of fresh seeds on the test prompts, all else is on the eval prompts: part of a "
    "difference may be the prompts."
)


def _legend(spec: StudySpec) -> str:
    return (
        "A line joins a trial's evaluations, starting at the SFT policy. Numbered at their last, if there is room: the "
        "chosen trials, else the reference, the best, the one to launch, and the latest pruned for KL. "
        "✕ marks where a rule ended it, ■ a person, ▲ where it failed. The grey steps are the front: the "
        "highest reward of any evaluation at no more KL. The star is the best checkpoint, the highest of many noisy "
        "evaluations; a large diamond is the mean of a configuration's fresh seeds, with its 95% intervals. The dotted "
        "upright line, if the axis reaches it, is the guard's limit."
    )

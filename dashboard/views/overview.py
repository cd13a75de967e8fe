"""Overview: what to launch, curves, progress, running trials, all trials."""

from functools import partial

import streamlit as st

from dashboard import data
from dashboard.charts import Drawing
from dashboard.data import Snapshot
from dashboard.views import answer, common, cost, curve_charts, running, trials_table
from dashboard.views.common import KeyNumber
from dashboard.views.curve_charts import DEFAULT_METRICS, ChartData
from ppo_core.output import counted, duration
from tuner.judge.answer import of_study
from tuner.judge.best import best_trial
from tuner.judge.results import StudyView
from tuner.judge.scoring import with_running
from tuner.store import Store
from tuner.study.status import Status

BASELINE_TRIALS = 8
"""Number of trials read for the SFT policy's evaluation, which is the same in all."""
CHARTS = DEFAULT_METRICS[:2]
"""KL and eval reward."""


@common.study_page()
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    is_large = len(snapshot.view.trials) > trials_table.MOST_LIVE
    common.live(snapshot, partial(_live, chosen=chosen, ended=snapshot.ended, is_large=is_large))
    if is_large:
        trials_table.draw(snapshot, chosen)
    if snapshot.view.trials:
        cost.draw(store, snapshot, _baseline(store, snapshot))


def _live(store: Store, snapshot: Snapshot, chosen: common.Numbers, ended: int, is_large: bool) -> None:
    """Draw the live part.

    The table of trials is in it unless `is_large`; then `ended` is the number of ended trials in the table.
    """
    view = snapshot.view
    common.draw_status(view)
    if not view.trials:
        text = "The study is recorded, and its first trial has not started: loading a task takes seconds."
        common.not_started(snapshot, text)
        return
    to_launch = of_study(store, view)
    cards = running.read_cards(store, snapshot)
    leader = None if to_launch else best_trial(with_running(store, view.trials, view.spec), view.spec.kl_budget)
    answer.draw(snapshot, to_launch, _baseline(store, snapshot), cards, leader)
    _curves(store, snapshot, chosen)
    common.key_numbers([*_progress(snapshot), _device_time(view)])
    running.draw(snapshot, cards)
    if view.row.is_held:
        running.draw_events(store, snapshot)
    if not is_large:
        trials_table.draw(snapshot, chosen)
    elif (more := snapshot.ended - ended) > 0 and st.button(
        f"{more} more trials ended: refresh the table", icon=":material/refresh:"
    ):
        st.rerun()


def _curves(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    curve_charts.apply_pending_zoom()
    curve_charts.whole_run_button()
    curves = ChartData.read(store, snapshot, chosen, drawing=Drawing("episodes", window=curve_charts.window()))
    if curves.frame.empty:
        st.info("No trial has reported a step yet.")
        return
    curve_charts.draw(curves, CHARTS, height=260)
    st.caption(curve_charts.caption(curves, chosen))


def _baseline(store: Store, snapshot: Snapshot) -> float | None:
    numbers = [row.number for row in snapshot.view.trials[:BASELINE_TRIALS]]
    return data.baseline(data.curves(store, snapshot, ("eval/reward",), numbers=numbers, evaluations_only=True))


def _progress(snapshot: Snapshot) -> list[KeyNumber]:
    view = snapshot.view
    statuses = [row.shown_status for row in view.trials if not row.is_done]
    unfinished = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    screened = f"{view.extent.screened} screened" if view.extent.screened else None
    budget = []
    if view.extent.budget is not None:
        budget = [_budget(view, screened)]
    elif screened:
        unfinished.insert(0, screened)
    others = sum(row.status is Status.PRUNED for row in view.trials) - len(snapshot.kl_pruned)
    failed = sum(row.status is Status.FAILED for row in view.trials)
    ends = [f"{count} {how}" for count, how in ((others, "other pruned"), (failed, "failed")) if count]
    total = "" if snapshot.total is None else f" of {snapshot.total}"
    return [
        KeyNumber(
            "Trials ended",
            f"{snapshot.ended}{total}",
            ", ".join(unfinished) or None,
            "Ended in any way: completed, pruned, failed or stopped. Below: those that have not.",
        ),
        *budget,
        KeyNumber(
            "Pruned for KL",
            f"{len(snapshot.kl_pruned)}",
            ", ".join(ends) or None,
            "Trials that the guard ended because their KL went over its limit. Below: trials pruned for another reason "
            "(by the guard, such as for learning nothing, or by the study's pruner), and those that failed.",
        ),
    ]


def _budget(view: StudyView, screened: str | None) -> KeyNumber:
    help_text = "In trials of full length: what the search has spent of what it may spend."
    if view.spec.pauses_trials:
        promoted = counted(sum(row.is_promoted for row in view.trials), "trial")
        help_text += f" Below: trials that were screened. {promoted.capitalize()} promoted so far."
    return KeyNumber(
        "Search budget", f"{view.extent.spent:.1f} of {view.extent.budget:g} full trials", screened, help_text
    )


def _device_time(view: StudyView) -> KeyNumber:
    spent = data.cost(view)
    notes = [] if spent.seconds_a_trial is None else [f"{spent.seconds_a_trial:,.0f} s per ended trial"]
    if view.confirming:
        notes.append(f"{duration(sum(run.seconds for run in view.confirming))} more to confirm")
    pruned = f" Pruned trials took {spent.pruned_share:.0%} of it." if spent.pruned_share else ""
    return KeyNumber(
        "Device time",
        duration(3_600 * spent.hours),
        ", ".join(notes) or None,
        "Training time of all trials and attempts, without confirming runs; trials that run side by side each count. "
        f"Below: the mean over trials that ended, which screened ones have not; confirming runs.{pruned}",
    )

"""Overview: what to launch, curves, progress, running trials, all trials, and what they cost."""

import math
from functools import partial

import pandas as pd
import streamlit as st

from dashboard import analysis, charts, data, sentences
from dashboard.charts import Drawing
from dashboard.data import Snapshot
from dashboard.views import answer, common, curve_charts, running, trials_table
from dashboard.views.common import KeyNumber
from dashboard.views.curve_charts import DEFAULT_METRICS, ChartData
from ppo_core.output import duration
from tuner.judge.answer import Answer, of_study
from tuner.judge.best import best_trial
from tuner.judge.results import StudyView, spent
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
    first = of_study(store, snapshot.view) if snapshot.view.trials else None
    common.live(snapshot, partial(_live, chosen=chosen, drawn=snapshot, first=first, is_large=is_large))
    if is_large:
        trials_table.draw(snapshot, chosen, first)
    if snapshot.view.trials:
        _cost(store, snapshot, _baseline(store, snapshot))


def _live(
    store: Store, snapshot: Snapshot, chosen: common.Numbers, drawn: Snapshot, first: Answer | None, is_large: bool
) -> None:
    """Draw the live part; `drawn` is what the rest of the page is of, and `first` its answer.

    The table of trials is in it unless `is_large`.
    """
    view = snapshot.view
    common.draw_status(view)
    if not view.trials:
        text = "The study is recorded, and its first trial has not started: loading a task takes seconds."
        common.not_started(snapshot, text)
        return
    to_launch = first if snapshot is drawn else of_study(store, view)
    cards = running.read_cards(store, snapshot)
    leader = None if to_launch else best_trial(with_running(store, view.trials, view.spec), view.spec.kl_budget)
    answer.draw(store, snapshot, to_launch, _baseline(store, snapshot), cards, leader)
    _curves(store, snapshot, chosen)
    common.key_numbers([*_progress(snapshot), _device_time(view)])
    running.draw(snapshot, cards)
    if view.row.is_held:
        running.draw_events(store, snapshot)
    if not is_large:
        trials_table.draw(snapshot, chosen, to_launch)
    elif (more := snapshot.ended - drawn.ended) > 0 and st.button(
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
    statuses = [row.shown_status for row in view.trials if not row.status.is_final]
    unfinished = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    budget = []
    if view.tally.budget is not None:
        spent = f"{view.tally.spent:.1f} of {view.tally.budget:g} full trials"
        help_text = "In trials of full length: what the search has spent of what it may spend."
        budget = [KeyNumber("Search budget", spent, None, help_text)]
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


def _device_time(view: StudyView) -> KeyNumber:
    cost = data.cost(view)
    notes = [] if cost.seconds_per_trial is None else [f"{cost.seconds_per_trial:,.0f} s per ended trial"]
    if view.confirming:
        notes.append(f"{duration(sum(run.seconds for run in view.confirming))} more to confirm")
    pruned = f" Pruned trials took {cost.pruned_share:.0%} of it." if cost.pruned_share else ""
    return KeyNumber(
        "Device time",
        duration(3_600 * cost.hours),
        ", ".join(notes) or None,
        "Training time of all trials and attempts, without confirming runs; trials that run side by side each count. "
        f"Below: the mean over trials that ended; confirming runs.{pruned}",
    )


def _cost(store: Store, snapshot: Snapshot, baseline: float | None) -> None:
    """Draw the best value over device time, and device time by outcome; reads the evaluations only when opened."""
    part = st.expander("Cost: best value over device time, and what the time went into", key="cost", on_change="rerun")
    if part.open:
        with part:
            common.live(snapshot, partial(_draw_cost, baseline=baseline))


def _draw_cost(store: Store, snapshot: Snapshot, baseline: float | None) -> None:
    left, right = st.columns(2)
    with left:
        st.markdown("**Best value so far, over the device time of the search**")
        _best_so_far(store, snapshot, baseline)
    with right:
        st.markdown("**Where the device time went**")
        costs, confirming = spent(store, snapshot.view), snapshot.view.confirming
        uses = dict(costs.by)
        if confirming:
            uses["confirming runs"] = len(confirming), sum(run.seconds for run in confirming)
        total, number = sum(seconds for _, seconds in uses.values()) or 1.0, st.column_config.NumberColumn
        common.table(
            pd.DataFrame(
                [(use, trials, seconds, 100 * seconds / total) for use, (trials, seconds) in uses.items()],
                columns=["on", "trials", "seconds", "share"],
            ),
            "spent",
            {
                "on": st.column_config.TextColumn("Spent on", width=165),
                "trials": number("Trials", format="%d", width=55),
                "seconds": number("Device s", format="%.0f", width=75, help="Device time used."),
                "share": st.column_config.ProgressColumn(
                    "Share", format="%.0f%%", max_value=100, width=95, color="gray", help="Of all device-seconds."
                ),
            },
        )
        of_what = "the search's time" if confirming else "it"
        st.caption(f"{costs.evaluations / (costs.seconds or 1.0):.0%} of {of_what} went into evaluations.")


def _best_so_far(store: Store, snapshot: Snapshot, baseline: float | None) -> None:
    view = snapshot.view
    steps = data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True)
    if steps.empty:
        st.caption("Starts with the first evaluation.")
        return
    best = analysis.best_so_far(view.trials, steps, view.spec)
    seconds = sum(row.seconds for row in view.trials if row.counts)
    alt = "The best value within the KL budget over the device time of the search"
    st.echarts_chart(charts.progress(best, math.ceil(seconds), baseline), key="best so far", height=260, alt=alt)
    st.caption(sentences.of_progress(best, seconds))

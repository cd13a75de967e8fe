"""Overview: what to launch, curves, progress, running trials, all trials."""

import streamlit as st

from dashboard import data
from dashboard.charts import Drawing
from dashboard.data import Snapshot
from dashboard.views import answer, common, cost, curve_charts, running, trials_table
from dashboard.views.common import Figure
from dashboard.views.curve_charts import SHOWN_FIRST, Drawn
from ppo_core.output import counted
from tuner.judge.answer import of_study
from tuner.judge.best import best_trial
from tuner.judge.results import StudyView
from tuner.judge.scoring import with_running
from tuner.store import Store, TrialRow
from tuner.study.status import Status

BASELINE_FROM = 8
"""Trials read for the SFT policy's evaluation, which is the same in all."""
CHARTS = SHOWN_FIRST[:2]
"""KL and eval reward."""


def page(choice: common.Choice) -> None:
    """Draw the page."""
    common.of_a_study(choice, _study)


def _study(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    live = st.fragment(_live, run_every=common.refresh_every(snapshot.view))
    # The fragment's first run reuses the page's snapshot; later runs read a new one.
    live(snapshot, [snapshot], chosen)
    if _is_large(snapshot):
        trials_table.draw(snapshot, chosen)
    if snapshot.view.trials:
        cost.draw(store, snapshot, _baseline(store, snapshot))


def _is_large(snapshot: Snapshot) -> bool:
    return len(snapshot.view.trials) > trials_table.MOST_LIVE


def _live(drawn: Snapshot, fresh: list[Snapshot], chosen: tuple[int, ...]) -> None:
    """Draw the live part; `drawn` is the snapshot of the rest of the page."""
    with common.problems_shown():
        common.draw_the_whole_page_if_asked()
        store = common.open_store()
        snapshot = fresh.pop() if fresh else common.again(store, drawn)
        started = bool(snapshot.view.trials)
        if snapshot.view.state != drawn.view.state or started != bool(drawn.view.trials):
            st.rerun()  # rerun the whole page, to change its timer and sections
        common.status(snapshot.view)
        if not started:
            text = "The study is recorded, and its first trial has not started: loading a task takes seconds."
            common.not_begun(snapshot, "No trials yet", text)
            return
        baseline = _baseline(store, snapshot)
        found = of_study(store, snapshot.view)
        under_way = running.read(store, snapshot)
        answer.draw(snapshot, found, baseline, under_way, _leader(store, snapshot.view) if found is None else None)
        _curves(store, snapshot, chosen)
        _cards(snapshot)
        running.draw(under_way, snapshot.view.spec.kl_limit)
        if snapshot.view.row.is_held:
            running.happened(store, snapshot)
        if not _is_large(drawn):
            trials_table.draw(snapshot, chosen)
        elif (more := snapshot.ended - drawn.ended) > 0 and st.button(
            f"{more} more trials ended: refresh the table", icon=":material/refresh:"
        ):
            st.rerun()


def _leader(store: Store, view: StudyView) -> TrialRow | None:
    """Return the best trial by evaluations so far, running ones included; None if none is within the budget."""
    return best_trial(with_running(store, view.trials, view.spec), view.spec.kl_budget)


def _curves(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    drawing = Drawing(axis="episodes", window=curve_charts.window())
    curve_charts.whole_run_button(drawing.window)
    drawn = Drawn.of(store, snapshot, chosen, drawing=drawing)
    if drawn.frame.empty:
        st.info("No trial has reported a step yet.")
        return
    curve_charts.draw(drawn, CHARTS, height=280)
    if said := curve_charts.in_colour(drawn, chosen):
        st.caption(said)


def _baseline(store: Store, snapshot: Snapshot) -> float | None:
    first = [row.number for row in snapshot.view.trials[:BASELINE_FROM]]
    steps = data.curves(store, snapshot, ("eval/reward",), numbers=first, evaluations_only=True)
    return data.baseline(steps)


# Progress and cost.


def _cards(snapshot: Snapshot) -> None:
    common.figures((*_progress(snapshot), _cost(snapshot.view)))


def _progress(snapshot: Snapshot) -> tuple[Figure, ...]:
    view = snapshot.view
    shown = [row.shown_status for row in view.trials if not row.is_done]
    screened = [_at_rung(view)] if view.extent.budget is None else []
    counts = [f"{shown.count(status)} {status}" for status in dict.fromkeys(shown)]
    under_way = ", ".join(filter(None, [*screened, *counts]))
    failed = sum(row.status is Status.FAILED for row in view.trials)
    others = sum(row.status is Status.PRUNED for row in view.trials) - len(snapshot.kl_pruned)
    notes = [f"{count} {what}" for count, what in ((others, "other pruned"), (failed, "failed")) if count]
    total = "" if snapshot.total is None else f" of {snapshot.total}"
    return (
        (
            "Trials ended",
            f"{snapshot.ended}{total}",
            under_way or None,
            "Ended in any way: completed, pruned, failed or stopped. Below: those that have not.",
        ),
        *_budget(view),
        (
            "Pruned for KL",
            f"{len(snapshot.kl_pruned)}",
            ", ".join(notes) or None,
            "Trials that the guard ended because their KL went over its limit. Below: those that it ended for another "
            "reason, such as learning nothing, and those that failed.",
        ),
    )


def _budget(view: StudyView) -> tuple[Figure, ...]:
    """Return the card on the search budget; none if only the number of trials is limited."""
    extent = view.extent
    if extent.budget is None:
        return ()
    help_text = f"In trials of full length: what the search has spent of what it may spend.{_promoted(view)}"
    return (
        ("Search budget", f"{extent.spent:.1f} of {extent.budget:g} full trials", _at_rung(view) or None, help_text),
    )


def _at_rung(view: StudyView) -> str:
    """Return the number of screened trials as text; empty if none."""
    return f"{view.extent.screened} screened" if view.extent.screened else ""


def _promoted(view: StudyView) -> str:
    """Return the card's help on screening; empty if the strategy does not screen."""
    if not view.spec.pauses_trials:
        return ""
    promoted = counted(sum(row.is_promoted for row in view.trials), "trial")
    return f" Below: trials that were screened. {promoted.capitalize()} promoted so far."


def _cost(view: StudyView) -> Figure:
    spent = data.cost(view)
    note = None if spent.seconds_a_trial is None else f"{spent.seconds_a_trial:,.0f} s per ended trial"
    pruned = "" if not spent.pruned_share else f" Pruned trials took {spent.pruned_share:.0%} of it."
    help_text = (
        "Training time of all trials and attempts; trials that run side by side each count. Below: the mean over "
        f"trials that ended, which screened ones have not.{pruned}"
    )
    return "Device time", common.device_time(spent.hours), note, help_text

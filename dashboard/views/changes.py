"""Suggested changes to a trial, each with a button that asks for confirmation."""

import streamlit as st

from dashboard import access, data
from dashboard.data import Snapshot
from dashboard.views import common, control_parts
from ppo_core.output import KL_UNIT, measured, plus_minus, short
from tuner.confirm.answer import launch_of
from tuner.judge.diagnose import Diagnosis, course_of, diagnose, enqueued, label, tried, try_it, with_repeats
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow
from tuner.study.rules import blame_of


def draw(store: Store, snapshot: Snapshot, number: int) -> None:
    """Draw the findings in a trial's curves, if any, each with its advised change."""
    trial = next((row for row in snapshot.view.trials if row.number == number), None)
    if trial is None or not (diagnoses := diagnose(course_of(store, trial, snapshot.view))):
        return
    common.heading("What to change")
    for diagnosis, is_repeat in with_repeats(diagnoses):
        if is_repeat:
            st.markdown(f"**{diagnosis.rule}.** {diagnosis.finding} The same change.")
        else:
            _advice(store, snapshot, trial, diagnosis)
    control_parts.draw_result()
    control_parts.draw_pending()


def go_on(store: Store, view: StudyView, trial: TrialRow) -> list[str]:
    """Return the command that goes on with a trial, if any: its launch, or after the guard the first untried change."""
    if not blame_of(trial.reason):
        return [data.command(launch_of(store, view, trial))]
    diagnoses = diagnose(course_of(store, trial, view))
    untried = (each for each in diagnoses if tried(view.trials, trial, each, view.spec) is None)
    return [data.command(try_it(view.spec, trial, each)) for each in untried][:1]


_WAITS = "The study is finished: it runs once you raise the budget or the number of trials, and run the study again."


def _advice(store: Store, snapshot: Snapshot, trial: TrialRow, diagnosis: Diagnosis) -> None:
    view, lead = snapshot.view, f"**{diagnosis.rule}.** {diagnosis.finding}"
    earlier = tried(view.trials, trial, diagnosis, view.spec)
    if earlier is not None:
        value = plus_minus(earlier.value, earlier.value_se)
        st.markdown(
            f"{lead} Tried already, with {diagnosis.name} = {short(earlier.config[diagnosis.name])}: trial "
            f"{earlier.number} has a value of {value} at {measured(earlier.kl)} {KL_UNIT}."
        )
        return
    st.markdown(f"{lead} Try {diagnosis.advice}.")
    if access.may_order():
        arguments = {"values": enqueued(trial, diagnosis), "label": label(trial, diagnosis)}
        control_parts.order_button(
            st.container(),
            f"Add to queue: {diagnosis.advice}",
            f"advice {diagnosis.rule}",
            "Runs next in this study." if view.state != "finished" else _WAITS,
            store,
            view,
            "enqueue",
            arguments=arguments,
        )
    else:
        common.show_commands(data.command(try_it(view.spec, trial, diagnosis)))

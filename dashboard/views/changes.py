"""Suggested changes for a trial, each with a button that asks for confirmation."""

import streamlit as st

from dashboard import access, data, steering
from dashboard.data import Snapshot
from dashboard.views import control_parts
from ppo_core.errors import PPOTunerError
from ppo_core.output import KL_UNIT, measured, plus_minus, short
from tuner.judge.diagnose import (
    Diagnosis,
    course_of,
    diagnose,
    enqueued,
    is_choice,
    label,
    tried,
    try_it,
    why_nothing,
    with_repeats,
)
from tuner.store import Store, TrialRow


def draw(store: Store, snapshot: Snapshot, number: int) -> None:
    """Draw the findings in a trial's curves, each with its advised change."""
    trial = next((row for row in snapshot.view.trials if row.number == number), None)
    if trial is None or not trial.episodes:
        return
    st.subheader(f"What to change in trial {number}", anchor=False)
    found = diagnose(course_of(store, trial, snapshot.view.spec))
    for one, is_repeat in with_repeats(found):
        if is_repeat:
            st.markdown(f"**{one.rule}.** {one.finding} The same change.")
        else:
            _advice(store, snapshot, trial, one)
    if not found:
        st.text(why_nothing(trial))
    elif is_choice(found):
        st.caption("Try one change at a time, the first one first, to see which one helps.")
    control_parts.draw_flash()
    control_parts.draw_asked()


def _advice(store: Store, snapshot: Snapshot, trial: TrialRow, one: Diagnosis) -> None:
    view = snapshot.view
    there = tried(view.trials, trial, one, view.spec)
    if there is not None:
        worth = plus_minus(there.value, there.value_se)
        st.markdown(
            f"**{one.rule}.** {one.finding} Tried already, with {one.name} = {short(there.config[one.name])}: trial "
            f"{there.number} has a value of {worth} at {measured(there.kl)} {KL_UNIT}."
        )
        return
    st.markdown(f"**{one.rule}.** {one.finding} Try {one.advice}.")
    if access.may_order():
        arguments = {"values": enqueued(trial, one), "label": label(trial, one)}
        refusal = None
        try:
            steering.propose(store, view, "enqueue", None, arguments)
        except PPOTunerError as problem:
            refusal = str(problem)
        text = f"Add to queue: {one.advice}"
        if control_parts.act_button(st.container(), text, f"advice {one.rule}", "Runs next in this study.", refusal):
            control_parts.confirm_order(store, view, "enqueue", None, arguments)
    st.code(data.command(try_it(view.spec, trial, one)), language=None)

"""The answer card of the Overview: what to launch, how sure that is, its settings, and its command."""

from collections.abc import Mapping, Sequence
from typing import Literal

import pandas as pd
import streamlit as st

from dashboard import data, diagnosis, safe_text
from dashboard.data import Snapshot
from dashboard.figures import title_of
from dashboard.health import Card
from dashboard.views import common
from dashboard.views.common import Figure
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, measured, plus_minus, short
from tuner.judge import results
from tuner.judge.answer import Answer, Badge
from tuner.judge.best import RULE
from tuner.judge.results import StudyView
from tuner.store import TrialRow
from tuner.study.status import Origin, Status


def draw(
    snapshot: Snapshot,
    found: Answer | None,
    baseline: float | None,
    running: Sequence[Card],
    leader: TrialRow | None,
) -> None:
    """Draw the study's answer as a card, and the next steps in it; `leader` leads while there is no answer yet."""
    with st.container(border=True, key="answer"):
        left, right = st.columns([3, 2], gap="medium")
        with left:
            _answer(snapshot.view, found, baseline, leader)
        with right:
            next_steps(snapshot, found, running)
            if found is not None:
                draw_changed(snapshot.view, found.trial)


def draw_changed(view: StudyView, best: TrialRow) -> None:
    """Draw the settings in which a trial differs from the reference."""
    changed = changed_settings(view, best)
    if isinstance(changed, str):
        st.text(changed)
    else:
        common.table(changed, key="changed settings")


def next_steps(snapshot: Snapshot, found: Answer | None, running: Sequence[Card]) -> None:
    """Draw what to do next."""
    st.subheader("Next steps", anchor=False)
    boxes = {"error": st.error, "warning": st.warning, "info": st.info}
    for one in diagnosis.next_steps(snapshot, found, running):
        boxes[one.level](one.text)
        if one.command:
            st.code(data.command(one.command), language=None, wrap_lines=True)


def _answer(view: StudyView, found: Answer | None, baseline: float | None, leader: TrialRow | None) -> None:
    st.subheader(
        "What to launch" if view.state == "finished" or view.confirming else "Best so far",
        anchor=False,
        help="What was confirmed on fresh seeds; else the trial with the highest eval reward whose eval KL is within "
        "the KL budget. ± is one standard error over the eval prompts, of one run.",
    )
    if found is None:
        st.info(_no_answer(view, leader))
        return
    _heading(found)
    common.figures(_figures(view, found, baseline))
    kl = found.trial.kl if found.confirmed is None or found.confirmed.kl is None else found.confirmed.kl.mean
    if kl is not None:
        st.progress(min(1.0, kl / view.spec.kl_budget), text=f"{kl / view.spec.kl_budget:.0%} of the KL budget")
    _certainty(view, found)
    kept = None if found.checkpoint is None or found.confirmed is not None else found.checkpoint.kept.path
    if kept is not None:
        st.text("Its checkpoint:")
        st.code(safe_text.one_line(str(kept), data.MOST_OF_A_COMMAND), language=None, wrap_lines=True)


def _figures(view: StudyView, found: Answer, baseline: float | None) -> tuple[Figure, ...]:
    """Return the answer's reward and KL, on fresh seeds if confirmed."""
    one, trial, budget = found.confirmed, found.trial, f"budget {view.spec.kl_budget:g}"
    gained = f"trial {found.number}, {found.badge}"
    reward = trial.value if one is None or one.reward is None else one.reward.mean
    kl = trial.kl if one is None or one.kl is None else one.kl.mean
    if baseline is not None and reward is not None and one is None:
        gained += f", {reward - baseline:+.2f} over SFT"
    if one is None and trial.end_kl is not None and trial.status is Status.COMPLETED:
        budget += f", end {trial.end_kl:.1f}"
    return (
        (
            "Reward to launch" if found.confirmed else "Best eval reward",
            "–" if reward is None else f"{reward:.2f}",
            gained,
            f"Reward of what to launch: on fresh seeds and the test prompts if it is confirmed. {RULE} Below: which "
            "trial, how sure that is, and how far its eval reward is over the SFT policy's.",
        ),
        (
            "Its KL",
            "–" if kl is None else f"{kl:.1f} nats",
            budget,
            f"KL in {METRICS['eval/kl'].unit}, of the same evaluations as the reward. Below: the KL budget, and the "
            "eval KL at the end of the trial.",
        ),
    )


def _no_answer(view: StudyView, leader: TrialRow | None) -> str:
    """Return why there is no answer yet, and what leads so far."""
    budget = f"the KL budget of {view.spec.kl_budget:g} {KL_UNIT}"
    if leader is None:
        return f"No trial has an evaluation within {budget} yet, except the SFT policy's."
    value, kl = plus_minus(leader.value, leader.value_se), measured(leader.kl)
    ended = "No trial that ended is within it" if view.ended else "No trial has ended yet"
    return f"{ended}. Trial {leader.number} leads: eval reward {value} at a KL of {kl} {KL_UNIT}, within {budget}."


def _heading(found: Answer) -> None:
    """Draw which trial and checkpoint it is, and how sure that is."""
    step = None if found.checkpoint is None or found.confirmed is not None else found.checkpoint.step
    at = "" if step is None else f", step {step}"
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(f"**Trial {found.number}{at}**", width="content")
        st.badge(found.badge.value, color=_COLOURS[found.badge], help=found.badge.meaning)
        common.trial_link(found.number, "Its page")


def what_to_launch(view: StudyView, found: Answer) -> None:
    """Draw a study's answer: what it reaches, how sure that is, and the command that launches it."""
    _heading(found)
    _certainty(view, found)


def _certainty(view: StudyView, found: Answer) -> None:
    st.text(found.reading)
    st.text(found.certainty if view.state == "finished" or view.confirming else f"{found.certainty} {_UNFINISHED}")
    for caution in found.cautions:
        st.text(caution)
    st.code(data.command(found.launch), language=None, wrap_lines=True)


_UNFINISHED = "The search is not finished."
_COLOURS: Mapping[Badge, Literal["green", "blue", "orange"]] = {
    Badge.ONE_SEED: "orange",
    Badge.CONFIRMED: "green",
    Badge.NOT_DISTINGUISHABLE: "blue",
    Badge.NEWER: "orange",
}


def changed_settings(view: StudyView, best: TrialRow) -> pd.DataFrame | str:
    """Return the settings that differ from the reference (or the first trial), or a sentence if none do."""
    first = next((row for row in view.trials if row.origin is Origin.REFERENCE), view.trials[0])
    name = "the reference" if first.origin is Origin.REFERENCE else f"trial {first.number}"
    changed = {one: pair for one, pair in results.differences([first, best]).items() if one != "seed"}
    if not changed:
        return f"Trial {best.number} is {name}." if best.number == first.number else f"Its settings are {name}'s."
    return pd.DataFrame(
        {
            "Changed setting": [title_of(one) for one in changed],
            f"Trial {best.number}": [safe_text.cell(short(new, 4)) for _, new in changed.values()],
            name.capitalize(): [safe_text.cell(short(old, 4)) for old, _ in changed.values()],
        }
    )

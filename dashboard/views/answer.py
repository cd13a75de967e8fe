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
from dashboard.views.common import KeyNumber
from ppo_core.metrics import METRICS
from ppo_core.output import KL_UNIT, decimals, fixed, measured, plus_minus, short
from tuner.confirm.result import places_of
from tuner.judge import results
from tuner.judge.answer import Answer, Badge
from tuner.judge.best import RULE
from tuner.judge.results import StudyView
from tuner.judge.rules import RULES
from tuner.store import Store, TrialRow
from tuner.study.status import Origin, Status


def draw(
    store: Store,
    snapshot: Snapshot,
    answer: Answer | None,
    baseline: float | None,
    running: Sequence[Card],
    leader: TrialRow | None,
) -> None:
    """Draw the study's answer as a card, and the next steps in it; `leader` leads while there is no answer yet."""
    view = snapshot.view
    with st.container(border=True, key="answer"):
        if answer is not None:
            _headline(view, answer, baseline)
        left, right = st.columns([3, 2], gap="medium")
        with left:
            if answer is None:
                _title(view)
                st.info(_no_answer(view, leader))
            else:
                _commands(answer)
                _kept(answer)
        with right:
            _next_steps(snapshot, answer, running)
        if answer is not None:
            st.caption(_changed_text(view, answer.trial))
            with st.expander("All its settings"):
                common.table(all_settings(view, answer.trial), key="settings to launch")
            _others(view, answer.number)


def _others(view: StudyView, number: int) -> None:
    """Draw how the other trials ended, by count; of those that were ended early, with a link to the latest."""
    ends: dict[str, list[TrialRow]] = {}
    for row in view.trials:
        if row.status.is_final and row.number != number:
            rule = RULES.get(row.reason.rule) if row.reason else None
            how = f"ended by the guard ({rule.label})" if rule else row.status.value
            ends.setdefault(how, []).append(row)
    counts = ", ".join(f"{len(rows)} {how}" for how, rows in ends.items())
    with st.container(horizontal=True, vertical_alignment="center"):
        if ends:
            others, done = len(view.trials) - 1, sum(map(len, ends.values()))
            so_far = "" if done == others else f", {done} so far"
            st.caption(f"Of the other {others} trials{so_far}: {counts}.", width="content")
        for rows in ends.values():
            if rows[-1].status in (Status.PRUNED, Status.FAILED):
                common.trial_link(rows[-1].number, f"Open trial {rows[-1].number}")


def draw_changed(view: StudyView, trial: TrialRow) -> None:
    """Draw the settings in which a trial differs from the reference."""
    changed = changed_settings(view, trial)
    if isinstance(changed, str):
        st.text(changed)
    else:
        common.table(changed, key="changed settings")


def _next_steps(snapshot: Snapshot, answer: Answer | None, running: Sequence[Card]) -> None:
    common.heading("Next steps")
    boxes = {"error": st.error, "warning": st.warning, "info": st.info}
    for advice in diagnosis.next_steps(snapshot, answer, running):
        boxes[advice.level](advice.text)
        if advice.command:
            common.show_commands(data.command(advice.command))


def _title(view: StudyView) -> None:
    common.heading(
        "What to launch" if view.state == "finished" or view.confirming else "Best so far",
        f"What was confirmed on fresh seeds; else the trial of the highest value. {common.VALUE_IS} ± is one standard "
        "error over the eval prompts, of one run.",
    )


def _headline(view: StudyView, answer: Answer, baseline: float | None) -> None:
    """Draw which trial it is and how sure that is, and its reward and KL beside that."""
    reward, kl = _reward_and_kl(answer)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        with st.container(horizontal=True, vertical_alignment="center", key="headline"):
            with st.container(width="content"):
                _title(view)
            _heading(answer)
        _sentences(answer)
    with right:
        common.key_numbers(_key_numbers(view, answer, reward, kl, baseline))


def _kept(answer: Answer) -> None:
    """Draw where the checkpoint to launch is kept, if it is that of a search trial on this machine."""
    if answer.confirmed is None and answer.checkpoint is not None and answer.checkpoint.kept.path is not None:
        st.text("Its checkpoint:")
        common.show_commands(safe_text.one_line(str(answer.checkpoint.kept.path), data.MAX_COMMAND_CHARS))


def _reward_and_kl(answer: Answer) -> tuple[float | None, float | None]:
    """Return the means on fresh seeds if confirmed, else the readings of the trial's best checkpoint."""
    confirmed = answer.confirmed
    reward, kl = (None if each is None else each.mean for each in (answer.reward, answer.kl))
    if confirmed is not None and confirmed.reward is not None:
        reward = confirmed.reward.mean
    if confirmed is not None and confirmed.kl is not None:
        kl = confirmed.kl.mean
    return reward, kl


def _key_numbers(
    view: StudyView, answer: Answer, reward: float | None, kl: float | None, baseline: float | None
) -> list[KeyNumber]:
    trial, is_confirmed = answer.trial, answer.confirmed is not None
    source, budget = f"{answer.badge}", f"budget {view.spec.kl_budget:g}"
    places = decimals([reward], [trial.value_se])
    if answer.confirmed is not None and answer.confirmed.reward is not None:
        places = places_of([answer.confirmed.reward])
        source = source if answer.confirmed.reward.low is None else answer.confirmed.reward.span
    if not is_confirmed and baseline is not None and reward is not None:
        source += f", {fixed(reward - baseline, places, signed=True)} over SFT"
    if not is_confirmed and trial.end_kl is not None and trial.status is Status.COMPLETED:
        budget += f", end {measured(trial.end_kl)}"
    return [
        KeyNumber(
            f"Reward of trial {trial.number}" if is_confirmed else "Highest value",
            "–" if reward is None else fixed(reward, places),
            source,
            f"Reward of what to launch: on fresh seeds and the test prompts if it is confirmed, else its value. "
            f"{common.VALUE_IS} {RULE} Below: its interval, or how far its value is over the SFT policy's.",
        ),
        KeyNumber(
            "Its KL",
            "–" if kl is None else f"{measured(kl)} nats",
            budget,
            f"KL in {METRICS['eval/kl'].unit}, of the same evaluations as the reward. Below: the KL budget, and the "
            "eval KL at the end of the trial.",
        ),
    ]


def _no_answer(view: StudyView, leader: TrialRow | None) -> str:
    """Return why there is no answer yet, and what leads so far."""
    budget = f"the KL budget of {view.spec.kl_budget:g} {KL_UNIT}"
    if leader is None:
        return f"No trial has an evaluation within {budget} yet, except the SFT policy's."
    value, kl = plus_minus(leader.value, leader.value_se), measured(leader.kl)
    ended = "No trial that ended is within it" if view.ended else "No trial has ended yet"
    return f"{ended}. Trial {leader.number} leads: value {value} at a KL of {kl} {KL_UNIT}, within {budget}."


def _heading(answer: Answer) -> None:
    """Draw which trial and checkpoint it is, and how sure that is."""
    step = ""
    if answer.confirmed is None and answer.checkpoint is not None and answer.checkpoint.step is not None:
        step = f", step {answer.checkpoint.step}"
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(f"**Trial {answer.number}{step}**", width="content")
        st.badge(answer.badge.value, color=_COLOURS[answer.badge], help=answer.badge.meaning)
        common.trial_link(answer.number, f"Open trial {answer.number}")


def what_to_launch(answer: Answer) -> None:
    """Draw a study's answer: the decision, the evidence, the doubt and the commands."""
    _heading(answer)
    _sentences(answer)
    _commands(answer)


def _sentences(answer: Answer) -> None:
    for text in filter(None, (answer.decision, answer.evidence, answer.gained, answer.doubt)):
        st.text(text)


def _commands(answer: Answer) -> None:
    """Draw the command that settles the doubt, if any, and the one that launches the answer, if it gained anything."""
    launch = {"Launch": data.command(answer.launch)} if answer.has_learned else {}
    if answer.remedy:
        common.show_captioned({"Settle the doubt": data.command(answer.remedy), **launch})
    else:
        common.show_commands(*launch.values())


_COLOURS: Mapping[Badge, Literal["green", "blue", "orange"]] = {
    Badge.ONE_SEED: "orange",
    Badge.CONFIRMED: "green",
    Badge.TIE: "blue",
}


def _reference(view: StudyView) -> tuple[TrialRow, str]:
    """Return the reference, or the first trial where there is none, and what it is called."""
    first = next((row for row in view.trials if row.origin is Origin.REFERENCE), view.trials[0])
    return first, "the reference" if first.origin is Origin.REFERENCE else f"trial {first.number}"


def all_settings(view: StudyView, trial: TrialRow) -> pd.DataFrame:
    """Return every hyperparameter of a trial, with the value of the reference (or the first trial) where it differs."""
    first, name = _reference(view)
    pairs = {setting: (trial.config[setting], first.config.get(setting)) for setting in trial.config}
    return pd.DataFrame(
        {
            "Setting": [title_of(setting) for setting in pairs],
            "Name": [safe_text.cell(setting) for setting in pairs],
            f"Trial {trial.number}": [safe_text.cell(short(own, 4)) for own, _ in pairs.values()],
            f"{name.capitalize()}, if different": [
                "" if own == other else safe_text.cell(short(other, 4)) for own, other in pairs.values()
            ],
        }
    )


def _changed_text(view: StudyView, trial: TrialRow) -> str:
    """Return `changed_settings` as a line of Markdown."""
    changed = changed_settings(view, trial)
    if isinstance(changed, str):
        return changed
    pairs = [
        f"{setting} **{safe_text.in_markdown(new)}** (was {safe_text.in_markdown(old)})"
        for setting, new, old in changed.itertuples(index=False)
    ]
    return f"Changed from {_reference(view)[1]}: {', '.join(pairs)}."


def changed_settings(view: StudyView, trial: TrialRow) -> pd.DataFrame | str:
    """Return the settings that differ from the reference (or the first trial), or a sentence if none do."""
    first, name = _reference(view)
    changed = {setting: pair for setting, pair in results.differences([first, trial]).items() if setting != "seed"}
    if not changed:
        return f"Trial {trial.number} is {name}." if trial.number == first.number else f"Its settings are {name}'s."
    return pd.DataFrame(
        {
            "Changed setting": [title_of(setting) for setting in changed],
            f"Trial {trial.number}": [safe_text.cell(short(new, 4)) for _, new in changed.values()],
            name.capitalize(): [safe_text.cell(short(old, 4)) for old, _ in changed.values()],
        }
    )

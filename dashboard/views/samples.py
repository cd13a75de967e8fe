"""What the trials write: the same prompts, side by side. Every text here is hostile until shown literally."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import appearance, data, untrusted
from dashboard.data import Snapshot
from dashboard.views import tokens
from ppo_core.metrics import METRICS
from ppo_core.report import TokenReadings
from tuner.store import Store, TrialRow

SIDE_BY_SIDE = 4
"""Trials that fit beside each other."""
PROMPTS_A_PAGE = 3
WHEN = ("last", "halfway", "before training")
LONG = 700
"""Characters from which a text scrolls in a box of its own, so that the others stay beside it."""


def section(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw the samples of the chosen trials, or of a few telling ones."""
    st.subheader("Samples on the same prompts", anchor=False)
    numbers = (chosen or tuple(snapshot.telling))[:SIDE_BY_SIDE]
    when = st.segmented_control("Evaluation", WHEN, default="last", required=True, key="when", bind="query-params")
    frame = at_evaluation(data.samples(store, snapshot, numbers), when)
    if frame.empty:
        st.info("These trials have no samples yet: they come with a trial's first evaluation.")
        return
    reading = tokens.choose()
    prompts = list(frame.groupby("prompt_index")["prompt"].first().items())
    pages = -(-len(prompts) // PROMPTS_A_PAGE)
    page = st.pagination(pages, key="prompts", bind="query-params") if pages > 1 else 1
    row_of = {row.number: row for row in snapshot.view.trials}
    shown = [row_of[number] for number in numbers if number in row_of]
    for index, prompt in prompts[(page - 1) * PROMPTS_A_PAGE : page * PROMPTS_A_PAGE]:
        own = frame[frame["prompt_index"] == index]
        with st.container(border=True):
            _prompt(int(index), str(prompt), own, shown)
            if reading is not None:
                _tokens(store, snapshot, own, shown, reading)
    st.caption(_caption(chosen))


def at_evaluation(samples: pd.DataFrame, when: str) -> pd.DataFrame:
    """Return each trial's samples of one of its evaluations: its first, its middle one, or its last."""
    kept = []
    for _, own in samples.groupby("trial"):
        steps = sorted(own["step"].unique())
        place = {"before training": 0, "halfway": len(steps) // 2, "last": -1}[when]
        kept.append(own[own["step"] == steps[place]])
    return pd.concat(kept) if kept else samples


def _caption(chosen: tuple[int, ...]) -> str:
    who = "The reference, the best within the budget and the last one pruned for KL; choose others at the top."
    if chosen:
        who = f"The first {SIDE_BY_SIDE} of the chosen trials." if len(chosen) > SIDE_BY_SIDE else "The chosen trials."
    return (
        f"{who} Reward that rises while the text repeats itself or leaves its prompt is reward hacking: look for it "
        "where the KL is high. Invisible characters are spelled out as ⟨U+…⟩."
    )


def _prompt(index: int, prompt: str, frame: pd.DataFrame, trials: list[TrialRow]) -> None:
    st.caption(f"Prompt {index}")
    st.text(untrusted.visible(prompt))
    for column, trial in zip(st.columns(len(trials)), trials, strict=True):
        with column:
            _heading(trial)
            own = frame[frame["trial"] == trial.number]
            for row in own.itertuples():
                _response(row)
            if own.empty:
                st.caption("no sample of this prompt")


def _tokens(store: Store, snapshot: Snapshot, frame: pd.DataFrame, trials: list[TrialRow], reading: str) -> None:
    """Draw the responses to one prompt token by token, each below its text, in one scale of colours."""
    found: dict[int, TokenReadings | None] = {
        row.trial: data.tokens(store, snapshot, row.trial, row.step, row.prompt_index) for row in frame.itertuples()
    }
    largest = tokens.largest(found.values(), reading)
    for column, trial in zip(st.columns(len(trials)), trials, strict=True):
        if trial.number in found:
            with column:
                index = int(frame["prompt_index"].iloc[0])
                tokens.draw(found[trial.number], reading, largest, key=f"tokens {trial.number} {index}")


def _heading(trial: TrialRow) -> None:
    number = trial.number
    line = f"border-top: 3px {appearance.dash(number).css} {appearance.colour(number)}; padding-top: 0.3rem"
    label = f"{appearance.mark(trial.status).glyph} {trial.shown_status}"
    st.html(f'<div style="{line}"><b>Trial {number:d}</b> {label}</div>')


def _response(row: Any) -> None:
    reward, length = METRICS["eval/reward"].unit, METRICS["eval/length"].unit
    st.caption(
        f"**{row.reward:.2f}** {reward} · KL **{row.kl:.1f}** nats · **{row.length:d}** {length} · step {row.step:d}"
    )
    if len(row.parts) > 1:
        st.text(_parts(row.parts))
    text = untrusted.visible(row.response)
    if len(text) > LONG:
        st.container(height=240).text(text)
    else:
        st.text(text)


def _parts(parts: Mapping[str, float | None]) -> str:
    """Return the reward's parts on one line; their names come from outside."""
    return " · ".join(
        f"{untrusted.one_line(name)} {'–' if value is None else f'{value:.2f}'}" for name, value in parts.items()
    )

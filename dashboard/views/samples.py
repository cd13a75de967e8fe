"""What the trials write: the same prompts, side by side. Every text here is hostile until shown literally."""

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import appearance, data, untrusted
from dashboard.data import Snapshot
from ppo_core.metrics import METRICS
from tuner.status import Status
from tuner.store import Store

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
    prompts = list(frame.groupby("prompt_index")["prompt"].first().items())
    pages = -(-len(prompts) // PROMPTS_A_PAGE)
    number = st.pagination(pages, key="prompts", bind="query-params") if pages > 1 else 1
    status_of = {row.number: row.status for row in snapshot.view.trials}
    shown = [(number, status_of[number]) for number in numbers if number in status_of]
    for index, prompt in prompts[(number - 1) * PROMPTS_A_PAGE : number * PROMPTS_A_PAGE]:
        _prompt(int(index), str(prompt), frame[frame["prompt_index"] == index], shown)
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


def _prompt(index: int, prompt: str, frame: pd.DataFrame, trials: list[tuple[int, Status]]) -> None:
    with st.container(border=True):
        st.caption(f"Prompt {index}")
        st.text(untrusted.visible(prompt))
        for column, (number, status) in zip(st.columns(len(trials)), trials, strict=True):
            with column:
                _heading(number, status)
                own = frame[frame["trial"] == number]
                for row in own.itertuples():
                    _response(row)
                if own.empty:
                    st.caption("no sample of this prompt")


def _heading(number: int, status: Status) -> None:
    line = f"border-top: 3px {appearance.dash(number).css} {appearance.colour(number)}; padding-top: 0.3rem"
    st.html(f'<div style="{line}"><b>Trial {number:d}</b> {appearance.status_label(status)}</div>')


def _response(row: Any) -> None:
    reward, length = METRICS["eval/reward"].unit, METRICS["eval/length"].unit
    st.caption(
        f"**{row.reward:.2f}** {reward} · KL **{row.kl:.1f}** nats · **{row.length:d}** {length} · step {row.step:d}"
    )
    text = untrusted.visible(row.response)
    if len(text) > LONG:
        st.container(height=240).text(text)
    else:
        st.text(text)

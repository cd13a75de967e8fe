"""What the trials write: the same prompts, side by side. Every text here is hostile until shown literally."""

from collections.abc import Mapping, Sequence
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
WHEN = ("before training", "halfway", "best in the budget", "last", "every")
"""Evaluations of a trial whose samples can be shown, beside each other's. `every`: up to `MOST_STEPS` of them."""
MOST_STEPS = 12
LONG = 700
"""Characters from which a text scrolls in a box of its own, so that the others stay beside it."""


def section(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw the samples of the chosen trials, or of a few telling ones."""
    st.subheader("Samples on the same prompts", anchor=False)
    numbers = (chosen or tuple(snapshot.telling))[:SIDE_BY_SIDE]
    every = data.samples(store, snapshot, numbers)
    if every.empty:
        st.info("These trials have no samples yet: they come with a trial's first evaluation.")
        return
    row = st.container(horizontal=True, vertical_alignment="bottom")
    when = row.segmented_control(
        "Evaluations",
        WHEN,
        selection_mode="multi",
        default=["last"],
        key="when",
        bind="query-params",
        help="Which of a trial's evaluations; several stand below each other. `best in the budget` is the one with "
        "the highest mean reward of the kept samples whose mean KL is within the budget.",
    )
    with row:
        reading = tokens.choose()
    if not when:
        st.info("Choose at least one evaluation.")
        return
    prompts = {int(index): str(text) for index, text in every.groupby("prompt_index")["prompt"].first().items()}
    picked = _choose_prompt(prompts)
    row_of = {row.number: row for row in snapshot.view.trials}
    trials = [row_of[number] for number in numbers if number in row_of]
    for index in _on_this_page(list(prompts)) if picked is None else [picked]:
        own = every[every["prompt_index"] == index]
        with st.container(border=True):
            st.caption(f"Prompt {index}")
            st.text(untrusted.visible(prompts[index]))
            for line in _lines(every, when, snapshot.view.spec.kl_budget):
                _side_by_side(own.merge(line, on=["trial", "step"]), trials)
                if reading is not None:
                    _tokens(store, snapshot, own.merge(line, on=["trial", "step"]), trials, reading)
    st.caption(_caption(chosen))


def at_evaluation(samples: pd.DataFrame, when: str, kl_budget: float = float("inf")) -> pd.DataFrame:
    """Return each trial's samples of one of its evaluations: its first, its middle one, its last, or its best.

    The best is that with the highest mean reward of the kept samples, of those whose mean KL is within the budget; a
    trial without one has none.
    """
    kept = []
    for _, own in samples.groupby("trial"):
        step = _step(own, when, kl_budget)
        kept.append(own[own["step"] == step])
    return pd.concat(kept) if kept else samples


def _step(own: pd.DataFrame, when: str, kl_budget: float) -> int:
    """Return the step of one trial's evaluation; -1: it has none such."""
    steps = sorted(own["step"].unique())
    if when == "best in the budget":
        means = own[own["step"] > 0].groupby("step")[["reward", "kl"]].mean()
        within = means.loc[means["kl"] <= kl_budget, "reward"].dropna()
        return -1 if within.empty else int(within.idxmax())
    return int(steps[{"before training": 0, "halfway": len(steps) // 2, "last": -1}[when]])


def _lines(samples: pd.DataFrame, when: Sequence[str], kl_budget: float) -> list[pd.DataFrame]:
    """Return the lines that stand below each other: each names `trial` and `step` of what is shown beside each other.

    With `every`, trials are in line with each other by how many evaluations they have had.
    """
    keys = samples[["trial", "step"]].drop_duplicates().sort_values(["trial", "step"])
    if "every" in when:
        turn = keys.groupby("trial").cumcount()
        places = sorted(turn.unique())
        shown = (
            places
            if len(places) <= MOST_STEPS
            else [places[i * (len(places) - 1) // (MOST_STEPS - 1)] for i in range(MOST_STEPS)]
        )
        return [keys[turn == place] for place in shown]
    chosen = [at_evaluation(samples, name, kl_budget) for name in WHEN if name in when]
    return [line[["trial", "step"]].drop_duplicates() for line in chosen]


def _choose_prompt(prompts: Mapping[int, str]) -> int | None:
    """Return the prompt that is chosen by its text; None: all, page by page. The link holds its index, not its text."""
    linked = st.query_params.get("prompt", "")
    if "prompt" not in st.session_state and linked.isdecimal() and int(linked) in prompts:
        st.session_state["prompt"] = int(linked)
    chosen: int | None = st.selectbox(
        "Prompt",
        list(prompts),
        index=None,
        placeholder=f"All {len(prompts)}. Type some of its text to find one",
        format_func=lambda index: f"{index}: {untrusted.one_line(prompts.get(index, ''), 90)}",
        key="prompt",
        persist_state="session",
    )
    if chosen is not None:
        st.query_params["prompt"] = str(chosen)
    elif "prompt" in st.query_params:
        del st.query_params["prompt"]
    return chosen


def _on_this_page(prompts: Sequence[int]) -> Sequence[int]:
    pages = -(-len(prompts) // PROMPTS_A_PAGE)
    page = st.pagination(pages, key="prompts", bind="query-params") if pages > 1 else 1
    return prompts[(page - 1) * PROMPTS_A_PAGE : page * PROMPTS_A_PAGE]


def _caption(chosen: tuple[int, ...]) -> str:
    who = "The reference, the best within the budget and the last one pruned for KL; choose others at the top."
    if chosen:
        who = f"The first {SIDE_BY_SIDE} of the chosen trials." if len(chosen) > SIDE_BY_SIDE else "The chosen trials."
    return (
        f"{who} Reward that rises while the text repeats itself or leaves its prompt is reward hacking: look for it "
        "where the KL is high. Invisible characters are spelled out as ⟨U+…⟩."
    )


def _side_by_side(frame: pd.DataFrame, trials: list[TrialRow]) -> None:
    """Draw the responses to one prompt, a trial a column."""
    for column, trial in zip(st.columns(len(trials)), trials, strict=True):
        with column:
            label = f"{appearance.mark(trial.status).glyph} {trial.shown_status}"
            st.html(appearance.heading(trial.number, label))
            own = frame[frame["trial"] == trial.number]
            for row in own.itertuples():
                _response(row)
            if own.empty:
                st.caption("no sample of this prompt")


def _tokens(store: Store, snapshot: Snapshot, frame: pd.DataFrame, trials: list[TrialRow], reading: str) -> None:
    """Draw the responses to one prompt token by token, each below its text, in one scale of colours."""
    found: dict[int, tuple[Any, TokenReadings | None]] = {
        row.trial: (row, data.tokens(store, snapshot, row.trial, row.step, row.prompt_index))
        for row in frame.itertuples()
    }
    rewards = [row.reward for row, _ in found.values()]
    largest = tokens.largest([own for _, own in found.values()], reading, rewards)
    for column, trial in zip(st.columns(len(trials)), trials, strict=True):
        if trial.number in found:
            row, own = found[trial.number]
            with column:
                key = f"tokens {trial.number} {row.step} {row.prompt_index}"
                tokens.draw(own, reading, largest, key=key, reward=row.reward)


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

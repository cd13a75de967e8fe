"""What the trials write: the same prompts, side by side. Every text here is hostile until shown literally."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import data, diagnosis, safe_text, style
from dashboard.data import Snapshot
from dashboard.views import common
from ppo_core.metrics import METRICS
from ppo_core.report import TokenReadings
from tuner import hacking
from tuner.store import Store, TrialRow

# A response token by token: how far each moved from the reference policy, and what the critic made of it.
#
# Tokens are hostile text like all of a response: they stand in a table's cells, which nothing interprets.

VALUE_ERROR = "value error"
READINGS = {
    "KL": ("kls", "Exact KL from the reference at the token's position, in nats."),
    "log-ratio": ("log_ratios", "log π - log π_ref of the token, in nats: over 0, the policy likes it more."),
    "advantage": ("advantages", "GAE of the evaluation's own rewards, before whitening."),
    "value": ("values", "What the critic predicts at the token."),
    VALUE_ERROR: (
        "",
        "The critic's value less the response's whole reward: over 0, the critic overestimates. With a "
        "discount or rewards per token even a perfect critic is not at 0.",
    ),
    "log-prob": ("logprobs", "Log-probability of the token under the policy, in nats."),
}
"""What is known of a token, by label: the field of `TokenReadings` (empty: it is reckoned), and what it means."""
COLOURED = ("KL", "log-ratio", "advantage", "value", VALUE_ERROR)
"""Readings that tokens can be coloured by."""
TOKEN = "token"
HEIGHT = 280

_OVER, _UNDER = "213, 94, 0", "0, 114, 178"
"""Vermilion and blue of Okabe and Ito (2008), distinct with the common colour-vision deficiencies."""
_DEEPEST = 0.65
"""Opacity of the largest reading: the text on it stays readable on a light and on a dark page."""


def choose() -> str | None:
    """Return the reading that tokens are coloured by, which is in the link; None: tokens are not shown."""
    return st.selectbox(
        "Tokens coloured by",
        COLOURED,
        index=None,
        placeholder="Off",
        width=170,
        key="tokens",
        bind="query-params",
        help="Shows each response token by token. Orange is above 0, blue below; the deeper, the larger among the "
        "responses to one prompt. Click a column's head to find the tokens that moved most.",
    )


def draw(tokens: TokenReadings | None, reading: str, largest: float, key: str, reward: float = math.nan) -> None:
    """Draw one response's tokens, coloured by `reading`; `largest` is what gets the deepest colour.

    `reward` is the response's, from which the critic's error follows.
    """
    if tokens is None:
        st.caption("no token data for this sample")
        return
    frame = table(tokens, first=reading, reward=reward)
    if reading not in frame.columns:
        st.caption(f"no {reading} for its tokens: this trial has no critic")
        return
    colours = shades(frame[reading], largest)
    styled = frame.style.apply(lambda column: colours, subset=[TOKEN, reading])
    columns = {
        name: st.column_config.NumberColumn(name, format="%.3f", width=75, help=READINGS[name][1])
        for name in frame.columns
        if name != TOKEN
    }
    st.dataframe(styled, key=key, height=HEIGHT, hide_index=True, placeholder="", column_config=columns)


def table(tokens: TokenReadings, first: str, reward: float = math.nan) -> pd.DataFrame:
    """Return one row per token: its text, safe to show and to export, and what is known of it, `first` in front."""
    names = sorted(READINGS, key=lambda name: name != first)
    known = {name: values for name in names if (values := _values(tokens, name, reward))}
    return pd.DataFrame({TOKEN: [safe_text.cell(text) for text in tokens.texts], **known})


def largest_reading(
    readings: Sequence[TokenReadings | None], reading: str, rewards: Sequence[float] | None = None
) -> float:
    """Return the largest size of a reading among responses, so that they share one scale; 0 if there is none.

    `rewards` are the responses', without which the critic's error is not known.
    """
    given = [math.nan] * len(readings) if rewards is None else rewards
    pairs = [(tokens, reward) for tokens, reward in zip(readings, given, strict=True) if tokens is not None]
    sizes = (abs(value) for tokens, reward in pairs for value in _values(tokens, reading, reward))
    return max(filter(math.isfinite, sizes), default=0.0)


def _values(tokens: TokenReadings, reading: str, reward: float) -> list[float]:
    """Return a reading of each token; empty: it is not known."""
    if reading != VALUE_ERROR:
        return list(getattr(tokens, READINGS[reading][0]))
    return [] if math.isnan(reward) else [value - reward for value in tokens.values]


def shades(values: Sequence[float], largest: float) -> list[str]:
    """Return each value's background as CSS: orange over 0, blue under, as deep as it is near `largest`."""
    return [_shade(float(value) / largest if largest else 0.0) for value in values]


def _shade(share: float) -> str:
    if not math.isfinite(share) or share == 0:
        return ""
    return f"background-color: rgba({_OVER if share > 0 else _UNDER}, {min(1.0, abs(share)) * _DEEPEST:.2f})"


# What the trials write: the same prompts, side by side. Every text here is hostile until shown literally.

SIDE_BY_SIDE = 4
"""Trials that fit beside each other."""
PROMPTS_A_PAGE = 3
WHEN = ("before training", "halfway", "best in the budget", "last", "every")
"""Evaluations of a trial whose samples can be shown, beside each other's. `every`: up to `MOST_STEPS` of them."""
MOST_STEPS = 12
LONG = 700
"""Characters from which a text scrolls in a box of its own, so that the others stay beside it."""


def section(store: Store, snapshot: Snapshot, numbers: tuple[int, ...]) -> None:
    """Draw the samples of the first of some trials."""
    st.subheader("Samples on the same prompts", anchor=False, help=_HELP)
    if len(numbers) > SIDE_BY_SIDE:
        st.caption(f"Of {SIDE_BY_SIDE} of the {len(numbers)} trials; the page Samples shows others.")
        numbers = numbers[:SIDE_BY_SIDE]
    every = data.samples(store, snapshot, numbers)
    if every.empty:
        st.info("These trials have no samples yet. The first evaluation writes them.")
        return
    row = st.container(horizontal=True, vertical_alignment="bottom")
    when = row.segmented_control(
        "Evaluations",
        WHEN,
        selection_mode="multi",
        default=["last"],
        key="when",
        bind="query-params",
        help="Which of a trial's evaluations; several stand below each other. `best in the budget` is the one that the "
        "trial's value is of.",
    )
    prompts = {int(index): str(text) for index, text in every.groupby("prompt_index")["prompt"].first().items()}
    with row:
        reading = choose()
        picked = _choose_prompt(prompts)
    if not when:
        st.info("Choose at least one evaluation.")
        return
    row_of = {row.number: row for row in snapshot.view.trials}
    trials = [row_of[number] for number in numbers if number in row_of]
    for index in _on_this_page(list(prompts)) if picked is None else [picked]:
        own = every[every["prompt_index"] == index]
        with st.container(border=True):
            st.caption(f"Prompt {index}")
            st.text(safe_text.visible(prompts[index]))
            for line in _lines(every, when, {row.number: row.value_step for row in trials}):
                _side_by_side(own.merge(line, on=["trial", "step"]), trials)
                if reading is not None:
                    _tokens(store, snapshot, own.merge(line, on=["trial", "step"]), trials, reading)


def at_evaluation(samples: pd.DataFrame, when: str, best: Mapping[int, int | None]) -> pd.DataFrame:
    """Return each trial's samples of one of its evaluations: its first, its middle one, its last, or its best.

    `best` has the step that each trial's value is of, by number: at step 0 or None it has no best.
    """
    kept = []
    for number, own in samples.groupby("trial"):
        kept.append(own[own["step"] == _step(own, when, best.get(int(number)))])
    return pd.concat(kept) if kept else samples


def _step(own: pd.DataFrame, when: str, best: int | None) -> int:
    """Return the step of one trial's evaluation; -1: it has none such."""
    if when == "best in the budget":
        return best or -1
    steps = sorted(own["step"].unique())
    return int(steps[{"before training": 0, "halfway": len(steps) // 2, "last": -1}[when]])


def _lines(samples: pd.DataFrame, when: Sequence[str], best: Mapping[int, int | None]) -> list[pd.DataFrame]:
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
    chosen = [at_evaluation(samples, name, best) for name in WHEN if name in when]
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
        width=260,
        placeholder=f"All {len(prompts)}; type to find one",
        format_func=lambda index: f"{index}: {safe_text.one_line(prompts.get(index, ''), 90)}",
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


_HELP = (
    f"Up to {SIDE_BY_SIDE} trials chosen in the sidebar, else the default selection. Reward that rises while the text "
    "repeats itself or leaves its prompt is reward hacking: look for it where the KL is high. Invisible characters are "
    "spelled out as ⟨U+…⟩."
)


def _side_by_side(frame: pd.DataFrame, trials: list[TrialRow]) -> None:
    """Draw the responses to one prompt, one column per trial."""
    for column, trial in zip(st.columns(len(trials)), trials, strict=True):
        with column:
            st.html(style.heading(trial.number, style.status_cell(trial)))
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
    largest = largest_reading([own for _, own in found.values()], reading, rewards)
    for column, trial in zip(st.columns(len(trials)), trials, strict=True):
        if trial.number in found:
            row, own = found[trial.number]
            with column:
                key = f"tokens {trial.number} {row.step} {row.prompt_index}"
                draw(own, reading, largest, key=key, reward=row.reward)


def _response(row: Any) -> None:
    reward, length = METRICS["eval/reward"].unit, METRICS["eval/length"].unit
    st.caption(
        f"**{row.reward:.2f}** {reward} · KL **{row.kl:.1f}** nats · **{row.length:d}** {length} · step {row.step:d}"
    )
    if len(row.parts) > 1:
        st.text(_parts(row.parts))
    text = safe_text.visible(row.response)
    if len(text) > LONG:
        st.container(height=240).text(text)
    else:
        st.text(text)


def _parts(parts: Mapping[str, float | None]) -> str:
    """Return the reward's parts on one line; their names come from outside."""
    return " · ".join(
        f"{safe_text.one_line(name)} {'–' if value is None else f'{value:.2f}'}" for name, value in parts.items()
    )


# Samples: the same prompt across trials and evaluations, what each reward was made of, and the tokens behind it.


def page(choice: common.Choice) -> None:
    """Draw the page."""
    common.of_a_study(choice, _study)


def _study(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    if not snapshot.view.trials:
        common.line(store, snapshot)
        text = "A trial writes samples at its first evaluation, before its first update."
        common.not_begun(snapshot, "No trials yet", text)
        return
    numbers = common.begun(snapshot, chosen or tuple(snapshot.default_trials), SIDE_BY_SIDE)
    common.line(store, snapshot, numbers)
    section(store, snapshot, numbers)
    _hacking(store, snapshot, numbers)


def _hacking(store: Store, snapshot: Snapshot, numbers: tuple[int, ...]) -> None:
    """Draw for each shown trial whether its reward rises while something worsens."""
    st.subheader(
        "Reward hacking: does reward rise while something else worsens?",
        anchor=False,
        help=f"{hacking.RULE} A reason to read the samples above, not a proof.",
    )
    steps = data.curves(store, snapshot, hacking.NEEDED, numbers=numbers)
    common.hacking_table(diagnosis.hacking_of(steps, snapshot.view.spec.kl_budget))

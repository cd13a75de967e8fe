"""The page Samples: responses to the same prompts, side by side. Every text here is hostile until shown literally."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import data, diagnosis, safe_text, style
from dashboard.data import Snapshot
from dashboard.safe_text import Piece
from dashboard.views import common
from ppo_core.metrics import METRICS
from ppo_core.report import TokenReadings
from tuner.judge import hacking
from tuner.store import Store
from tuner.study.status import Origin

# Marks in a response: tokens coloured by a reading, or words that differ from another response.

VALUE_ERROR = "value error"
READINGS = {
    "KL": "kls",
    "log-ratio": "log_ratios",
    "advantage": "advantages",
    "value": "values",
    VALUE_ERROR: "",
    "log-prob": "logprobs",
}
"""Token readings by label, with their field of `TokenReadings`; empty if computed from others."""
COLOURED = ("KL", "log-ratio", "advantage", "value", VALUE_ERROR)
"""Readings by which tokens can be coloured."""
REFERENCE, START, BEFORE = "changes from the reference", "changes from before training", "changes from the step before"
CHANGES = (REFERENCE, START, BEFORE)
"""Responses to compare words with."""

_OVER, _UNDER = "213, 94, 0", "0, 114, 178"
"""Vermilion and blue of Okabe and Ito (2008), distinct with the common colour-vision deficiencies."""
_DEEPEST = 0.65
"""Opacity of the largest reading; text on it stays readable on light and dark pages."""
_ADDED = "background-color: rgba(0, 158, 115, 0.3); text-decoration: underline"
_REMOVED = "background-color: rgba(213, 94, 0, 0.25); text-decoration: line-through"
_FOUND = "background-color: rgba(230, 159, 0, 0.5)"


def changed(text: str, base: str) -> list[Piece]:
    """Return a response with added and removed words marked, relative to `base`."""
    before, after = (re.findall(r"\s*\S+", one[: safe_text.WHOLE]) for one in (base, text))
    matcher = difflib.SequenceMatcher(None, [word.strip() for word in before], [word.strip() for word in after])
    pieces: list[Piece] = []
    for kind, low, high, first, last in matcher.get_opcodes():
        if kind != "equal" and high > low:
            pieces.append(("".join(before[low:high]), _REMOVED, "removed"))
        if last > first:
            css, said = ("", "") if kind == "equal" else (_ADDED, "added")
            pieces.append(("".join(after[first:last]), css, said))
    return pieces


def base_of(every: pd.DataFrame, row: Any, against: str, reference: int | None) -> str | None:
    """Return the response to compare with, or None."""
    own = every[(every["prompt_index"] == row.prompt_index) & (every["step"] <= row.step)].sort_values("step")
    own = own[own["trial"] == (reference if against == REFERENCE else row.trial)]
    if against != REFERENCE:
        own = own[own["step"] == 0] if against == START else own[own["step"] < row.step]
    return None if own.empty else str(own["response"].iloc[-1])


def tokens_of(tokens: TokenReadings, reading: str, largest: float, reward: float = math.nan) -> list[Piece]:
    """Return a response's tokens coloured by `reading`; `largest` gets the deepest colour.

    The tooltips have all readings; the critic's error needs the response's `reward`.
    """
    known = {name: values for name in READINGS if (values := _values(tokens, name, reward))}
    gap = "" if any(text[:1].isspace() for text in tokens.texts) else " "
    pieces: list[Piece] = []
    for place, (text, css) in enumerate(zip(tokens.texts, shades(known[reading], largest), strict=True)):
        said = ", ".join(f"{name} {values[place]:.3f}" for name, values in known.items())
        pieces += [(text, css, said), (gap, "", "")]
    return pieces


def found(text: str, wanted: str) -> list[Piece]:
    """Return a response with all matches of the search marked, ignoring case."""
    parts = re.split(f"({re.escape(wanted)})", text, flags=re.IGNORECASE) if wanted else [text]
    return [(part, _FOUND if place % 2 else "", "") for place, part in enumerate(parts)]


def largest_reading(
    readings: Sequence[TokenReadings | None], reading: str, rewards: Sequence[float] | None = None
) -> float:
    """Return a reading's largest magnitude among responses, for a common scale; 0 if there is none.

    The critic's error needs the responses' `rewards`.
    """
    given = [math.nan] * len(readings) if rewards is None else rewards
    pairs = [(tokens, reward) for tokens, reward in zip(readings, given, strict=True) if tokens is not None]
    sizes = (abs(value) for tokens, reward in pairs for value in _values(tokens, reading, reward))
    return max(filter(math.isfinite, sizes), default=0.0)


def _values(tokens: TokenReadings, reading: str, reward: float) -> list[float]:
    """Return a reading for each token; empty if unknown."""
    if reading != VALUE_ERROR:
        return list(getattr(tokens, READINGS[reading]))
    return [] if math.isnan(reward) else [value - reward for value in tokens.values]


def shades(values: Sequence[float], largest: float) -> list[str]:
    """Return each value's background as CSS: orange above 0, blue below, deepest at `largest`."""
    return [_shade(float(value) / largest if largest else 0.0) for value in values]


def _shade(share: float) -> str:
    if not math.isfinite(share) or share == 0:
        return ""
    return f"background-color: rgba({_OVER if share > 0 else _UNDER}, {min(1.0, abs(share)) * _DEEPEST:.2f})"


# Responses of trials to the same prompts, side by side. All texts are hostile: show them literally.

SIDE_BY_SIDE = 4
"""Most trials side by side."""
PROMPTS_A_PAGE = 3
AT_STEP = "at step"
WHEN = ("before training", "best in the budget", "last", AT_STEP, "every")
"""Choices of evaluation; `every`: up to `MOST_STEPS` of them."""
MOST_STEPS = 12
LONG = 700
"""Texts longer than this many characters scroll in a box until opened."""
ORDERS = {"prompt": "By prompt", "reward": "Highest reward", "kl": "Highest KL", "gap": "Largest gap in reward"}
"""Orders of prompts, by their shown responses."""


def section(store: Store, snapshot: Snapshot, numbers: tuple[int, ...]) -> None:
    """Draw samples of the trials, as many as fit."""
    st.subheader("Samples on the same prompts", anchor=False, help=_HELP)
    if len(numbers) > SIDE_BY_SIDE:
        st.caption(f"Of {SIDE_BY_SIDE} of the {len(numbers)} trials; the page Samples shows others.")
        numbers = numbers[:SIDE_BY_SIDE]
    reference = next((row.number for row in snapshot.view.trials if row.origin is Origin.REFERENCE), None)
    read = data.samples(store, snapshot, (*numbers, *([] if reference is None else [reference])))
    every = read[read["trial"].isin(numbers)]
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
        help="Which of a trial's evaluations; several stand below each other. `best in the budget` is the one behind "
        "the trial's value, `at step` the last one up to a step.",
    )
    prompts = {int(index): str(text) for index, text in every.groupby("prompt_index")["prompt"].first().items()}
    with row:
        mark = st.selectbox(
            "Mark",
            (*COLOURED, *CHANGES),
            index=None,
            placeholder="Nothing",
            width=165,
            key="mark",
            bind="query-params",
            help="A token's reading, orange above 0 and blue below, the deeper, the larger among the responses to one "
            "prompt; point at a token for all its readings. Or words that were added to another response (underlined) "
            "and removed from it (struck through).",
        )
        picked = _choose_prompt(prompts)
        more = st.popover("Find, order", icon=":material/search:")
        wanted = more.text_input("Find in responses", key="find", bind="query-params")
        order = more.selectbox("Order", list(ORDERS), key="order", bind="query-params", format_func=ORDERS.__getitem__)
    if not when:
        st.info("Choose at least one evaluation.")
        return
    at = _choose_step(sorted(int(step) for step in every["step"].unique())) if AT_STEP in when else 0
    row_of = {row.number: row for row in snapshot.view.trials}
    trials = [row_of[number] for number in numbers if number in row_of]
    lines = _lines(every, when, {row.number: row.value_step for row in trials}, at)
    shown = every.merge(pd.concat(lines).drop_duplicates(), on=["trial", "step"])
    shown = shown if picked is None else shown[shown["prompt_index"] == picked]
    has = shown[shown["response"].str.contains(wanted or "", case=False, regex=False)]
    indices = ordered(has, order)
    for index in _on_this_page(indices) if indices else []:
        with st.container(border=True):
            st.caption(f"Prompt {index}")
            st.text(safe_text.visible(prompts[index]))
            for line in lines:
                own = every[every["prompt_index"] == index].merge(line, on=["trial", "step"])
                readings = {
                    row.trial: data.tokens(store, snapshot, row.trial, row.step, row.prompt_index)
                    for row in own.itertuples()
                    if mark in COLOURED
                }
                largest = largest_reading([*readings.values()], mark, list(own["reward"])) if mark and readings else 0.0
                for column, trial in zip(st.columns(len(trials)), trials, strict=True):
                    with column:
                        st.html(style.heading(trial.number, style.status_cell(trial)))
                        there = own[own["trial"] == trial.number]
                        for row in there.itertuples():
                            base = base_of(read, row, mark, reference) if mark in CHANGES else None
                            _response(row, *_marked(row, mark, wanted, readings.get(row.trial), largest, base))
                        if there.empty:
                            st.caption("no sample of this prompt")
    st.caption(_said(shown, has if wanted else None))


def ordered(shown: pd.DataFrame, order: str) -> list[int]:
    """Return the prompts in one of `ORDERS`."""
    by = shown.groupby("prompt_index")
    if order == "prompt":
        return list(by.groups)
    measure = by["reward"].max() - by["reward"].min() if order == "gap" else by[order].max()
    return [int(index) for index in measure.sort_values(ascending=False, kind="stable").index]


def _said(shown: pd.DataFrame, has: pd.DataFrame | None) -> str:
    """Describe the responses in a sentence; `has` are those matching the search, if any."""
    said = [] if has is None else [f"{len(has)} of {len(shown)} responses have it."]
    for name, column in (("reward", "reward"), ("KL", "kl")):
        if shown[column].notna().any():
            top = shown.loc[shown[column].idxmax()]
            said.append(f"Highest {name}: {top[column]:.2f}, trial {top['trial']} on prompt {top['prompt_index']}.")
    return " ".join(said)


def _choose_step(steps: Sequence[int]) -> int:
    """Return the chosen step; each trial's last evaluation up to it is shown."""
    if len(steps) == 1:
        return steps[0]
    # A step from a link may not be among these trials'.
    if st.session_state.get("step", steps[-1]) not in steps or not {"step"} & {*st.session_state, *st.query_params}:
        st.session_state["step"] = steps[-1]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        step = int(st.select_slider("Step", steps, key="step", bind="query-params", width=320))
        place = steps.index(step)
        for label, icon, to in (("Previous", "left", place - 1), ("Next", "right", place + 1)):
            there = 0 <= to < len(steps)
            shown = f":material/chevron_{icon}:"
            st.button(label, icon=shown, disabled=not there, on_click=_set_step, args=(steps[to if there else place],))
    return step


def _set_step(step: int) -> None:
    st.session_state["step"] = step


def at_evaluation(samples: pd.DataFrame, when: str, best: Mapping[int, int | None], at: int = 0) -> pd.DataFrame:
    """Return each trial's samples of one evaluation: its first, last, best, or the last up to `at`.

    `best` maps a trial to the step of its value; none at step 0 or None.
    """
    kept = []
    for number, own in samples.groupby("trial"):
        kept.append(own[own["step"] == _step(own, when, best.get(int(number)), at)])
    return pd.concat(kept) if kept else samples


def _step(own: pd.DataFrame, when: str, best: int | None, at: int) -> int:
    """Return the step of a trial's chosen evaluation, or -1."""
    if when == "best in the budget":
        return best or -1
    steps = own["step"] if when != AT_STEP else own.loc[own["step"] <= at, "step"]
    return int(steps.min() if when == "before training" else steps.max()) if len(steps) else -1


def _lines(samples: pd.DataFrame, when: Sequence[str], best: Mapping[int, int | None], at: int) -> list[pd.DataFrame]:
    """Return the rows of the page: each lists `trial` and `step` shown side by side.

    With `every`, trials are aligned by their count of evaluations.
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
    chosen = [at_evaluation(samples, name, best, at) for name in WHEN if name in when]
    return [line[["trial", "step"]].drop_duplicates() for line in chosen]


def _choose_prompt(prompts: Mapping[int, str]) -> int | None:
    """Return the chosen prompt; None for all, page by page. The link has its index, not its text."""
    linked = st.query_params.get("prompt", "")
    if "prompt" not in st.session_state and linked.isdecimal() and int(linked) in prompts:
        st.session_state["prompt"] = int(linked)
    chosen: int | None = st.selectbox(
        "Prompt",
        list(prompts),
        index=None,
        width=190,
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


def _marked(
    row: Any, mark: str | None, wanted: str, tokens: TokenReadings | None, largest: float, base: str | None
) -> tuple[list[Piece], str]:
    """Return a marked response, and a note on the marks."""
    text, note = row.response[: safe_text.WHOLE], ""
    if len(row.response) > len(text):
        note = f"cut: {len(row.response):,} characters in all"
    if mark in CHANGES:
        if base is not None:
            return changed(row.response, base), note
        note = "nothing to compare with"
    elif mark and tokens is None:
        note = "no token data for this sample"
    elif mark and tokens is not None:
        if _values(tokens, mark, row.reward):
            return tokens_of(tokens, mark, largest, row.reward), note
        note = f"no {mark} for its tokens: this trial has no critic"
    return found(text, wanted), note


def _response(row: Any, pieces: Sequence[Piece], note: str) -> None:
    reward, length = METRICS["eval/reward"].unit, METRICS["eval/length"].unit
    st.caption(
        f"**{row.reward:.2f}** {reward} · KL **{row.kl:.1f}** nats · **{row.length:d}** {length} · step {row.step:d}"
    )
    if len(row.parts) > 1:
        st.text(_parts(row.parts))
    opens, kind = "", "response"
    if len(row.response) > LONG:
        opens, kind = f"<details><summary>All {len(row.response):,} characters</summary></details>", "response long"
    st.html(f'{opens}<div class="{kind}" dir="auto">{safe_text.marked(pieces)}</div>')
    if note:
        st.caption(note)


def _parts(parts: Mapping[str, float | None]) -> str:
    """Return the reward's parts on one line; their names are text from outside."""
    return " · ".join(
        f"{safe_text.one_line(name)} {'–' if value is None else f'{value:.2f}'}" for name, value in parts.items()
    )


# The page.


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
    """Draw signs of reward hacking for the shown trials."""
    st.subheader(
        "Reward hacking: does reward rise while something else worsens?",
        anchor=False,
        help=f"{hacking.RULE} A reason to read the samples above, not a proof.",
    )
    steps = data.curves(store, snapshot, hacking.NEEDED, numbers=numbers)
    common.hacking_table(diagnosis.hacking_of(steps, snapshot.view.spec.kl_budget))

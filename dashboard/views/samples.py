"""Samples: responses to the same prompts, side by side. Every text here is hostile until shown literally."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import analysis, data, diagnosis, safe_text, style
from dashboard.data import Snapshot
from dashboard.safe_text import Piece
from dashboard.views import common, sample_marks
from dashboard.views.sample_marks import CHANGES, COLOURED
from ppo_core.metrics import METRICS
from ppo_core.output import decimals, fixed, pluralize
from ppo_core.report import TokenReadings
from tuner.judge import hacking
from tuner.judge.hacking import Finding
from tuner.store import Store
from tuner.study.status import Origin

CHOICES = "Evaluations, marks, order"
"""Label of the popover with these choices."""
SIDE_BY_SIDE = 4
"""Most trials side by side."""
PROMPTS_PER_PAGE = 3
FIRST, BEST, LAST, AT_STEP, EVERY = WHEN = ("before training", "best in the budget", "last", "at step", "every")
"""Choices of evaluation; `every`: up to `MOST_STEPS` of them."""
MOST_STEPS = 12
LONG = 700
"""Texts longer than this many characters scroll in a box until opened."""
ORDERS = {"prompt": "By prompt", "reward": "Highest reward", "kl": "Highest KL", "gap": "Largest gap in reward"}
"""Orders of prompts, by their shown responses."""


@common.study_page("A trial writes samples at its first evaluation, before its first update.")
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    numbers = common.started(snapshot, chosen or tuple(snapshot.defaults), SIDE_BY_SIDE)
    common.watch(store, snapshot, numbers)
    steps = data.curves(store, snapshot, hacking.NEEDED, numbers=numbers)
    found = diagnosis.hacking_of(steps, snapshot.view.spec.kl_budget)
    findings = [diagnosis.with_fresh_seeds(store, snapshot.view, finding) for finding in found]
    draw(store, snapshot, numbers)
    _hacking(findings)


def _hacking(findings: Sequence[Finding]) -> None:
    """Draw signs of reward hacking, one column per trial as above, with worsened readings marked."""
    common.heading(
        "Does reward rise while something else worsens?",
        f"A reason to read the samples above, not a proof. {hacking.RULE} Lengths are in tokens.",
    )
    rows = diagnosis.hacking_rows(findings).rename(columns=diagnosis.HACKING_TITLES)
    signs = rows.set_index("trial").T.rename(columns="Trial {}".format).reset_index(names="Sign")
    common.table(signs, "hacking", {"Sign": st.column_config.TextColumn(width=130, pinned=True)}, marked=True)


def draw(store: Store, snapshot: Snapshot, numbers: common.Numbers) -> None:
    """Draw samples of at most `SIDE_BY_SIDE` trials."""
    common.heading("Samples", _HELP)
    view = snapshot.view
    row_of = {row.number: row for row in view.trials}
    trials = [row_of[number] for number in numbers]
    reference = next((row.number for row in view.trials if row.origin is Origin.REFERENCE), None)
    with_reference = data.samples(store, snapshot, (*numbers, *([] if reference is None else [reference])))
    episodes = data.curves(store, snapshot, analysis.EVALUATED, numbers=numbers, evaluations_only=True)
    samples = with_reference[with_reference["trial"].isin(numbers)].merge(
        episodes[["trial", "step", "episode"]], how="left", on=["trial", "step"]
    )
    if samples.empty:
        st.info("These trials have no samples: a trial writes some at each evaluation.")
        return
    prompts = {int(index): str(text) for index, text in samples.groupby("prompt_index")["prompt"].first().items()}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        prompt = _choose_prompt(prompts)
        more = st.popover(CHOICES, icon=":material/tune:")
    when = more.pills(
        "Evaluations", WHEN, selection_mode="multi", default=[BEST], key="when", bind="query-params", wrap=True,
        help="Which of a trial's evaluations; several stand below each other. `best in the budget` is the one behind "
        "the trial's value, or its last one if it has none from training; `at step` is the last one up to a step.",
    )  # fmt: skip
    mark = more.selectbox(
        "Mark", (*COLOURED, *CHANGES), index=None, placeholder="Nothing", key="mark", bind="query-params",
        help="A token's reading, orange above 0 and blue below; point at a token for all its readings. Or words added "
        "to another response (underlined) and removed from it (struck through).",
    )  # fmt: skip
    wanted = more.text_input("Find in responses", key="find", bind="query-params")
    order = more.selectbox("Order", list(ORDERS), key="order", bind="query-params", format_func=ORDERS.__getitem__)
    if not when:
        st.info("Choose at least one evaluation.")
        return
    step = _choose_step(samples) if AT_STEP in when else 0
    looks = common.looks(snapshot, numbers)
    last = {int(number): int(step) for number, step in samples.groupby("trial")["step"].max().items()}
    lines = _lines(samples, when, {row.number: row.value_step or last.get(row.number) for row in trials}, step)
    selected = samples.merge(pd.concat(lines).drop_duplicates(), on=["trial", "step"])
    if prompt is not None:
        selected = selected[selected["prompt_index"] == prompt]
    matching = selected[selected["response"].str.contains(wanted or "", case=False, regex=False)]
    indices = common.paginate(ordered(matching, order), PROMPTS_PER_PAGE, "prompts")
    on_page = selected[selected["prompt_index"].isin(indices)]
    places = _places(selected)
    tokens, largest = _shading(store, snapshot, on_page, mark) if mark in COLOURED else ({}, 0.0)
    for index in indices:
        with st.container(border=True):
            with st.container(key=f"said {index}"):
                st.caption(f"Prompt {index}")
                st.text(safe_text.visible(prompts[index]))
            for line in lines:
                responses = on_page[on_page["prompt_index"] == index].merge(line, on=["trial", "step"])
                for column, number, trial in zip(st.columns(len(trials)), numbers, trials, strict=True):
                    with column:
                        st.html(style.heading(number, looks[number]))
                        of_trial = responses[responses["trial"] == trial.number]
                        for row in of_trial.itertuples():
                            base = None
                            if mark in CHANGES:
                                base = sample_marks.base_of(with_reference, row, mark, reference)
                            is_last = BEST in when and not trial.value_step and row.step == last[trial.number]
                            readings = tokens.get(_key(row))
                            told = f" · step {row.step:d}" * (len(lines) > 1)
                            told += ", its last; none trained was within the budget" * is_last
                            _response(row, *_marked(row, mark, wanted, readings, largest, base), told, places)
                        if of_trial.empty:
                            st.caption("no sample of this prompt")
    if wanted:
        st.caption(f"In {len(matching)} of {pluralize(len(selected), 'response')}.")


_HELP = (
    f"Up to {SIDE_BY_SIDE} trials chosen in the sidebar, else the answer and the reference. Reward that rises while "
    "the text repeats itself or leaves its prompt is reward hacking: look for it where the KL is high. Invisible "
    "characters are spelled out as ⟨U+…⟩."
)


def _shading(
    store: Store, snapshot: Snapshot, on_page: pd.DataFrame, mark: str
) -> tuple[dict[tuple[int, int, int], TokenReadings | None], float]:
    """Draw the legend of a shade; return the token readings by `_key`, and the largest value, at which it is full."""
    tokens = {key: data.tokens(store, snapshot, *key) for key in map(_key, on_page.itertuples())}
    # A trial that blew up would leave the others without any shade.
    for scaled in (on_page[~on_page["trial"].isin(snapshot.kl_pruned)], on_page):
        readings_of = [tokens[_key(row)] for row in scaled.itertuples()]
        low, high = sample_marks.extremes(readings_of, mark, list(scaled["reward"]))
        if low or high:
            legend = sample_marks.legend(mark, low, high, is_capped=len(scaled) < len(on_page))
            st.html(f"<small>{safe_text.marked(legend)}</small>")
            return tokens, max(-low, high)
    return tokens, 0.0


def _key(row: Any) -> tuple[int, int, int]:
    return row.trial, row.step, row.prompt_index


def ordered(samples: pd.DataFrame, order: str) -> list[int]:
    """Return the prompts in one of `ORDERS`."""
    groups = samples.groupby("prompt_index")
    if order == "prompt":
        return list(groups.groups)
    measure = groups["reward"].max() - groups["reward"].min() if order == "gap" else groups[order].max()
    return [int(index) for index in measure.sort_values(ascending=False, kind="stable").index]


def _choose_step(samples: pd.DataFrame) -> int:
    """Return the chosen step; each trial's last evaluation up to it is shown."""
    steps = sorted(int(step) for step in samples["step"].unique())
    if len(steps) == 1:
        return steps[0]
    # A step from a link may not be among these trials'.
    if st.session_state.get("step", steps[-1]) not in steps or not {"step"} & {*st.session_state, *st.query_params}:
        st.session_state["step"] = steps[-1]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        step = int(st.select_slider("Step", steps, key="step", bind="query-params", width=320))
        place = steps.index(step)
        for label, icon, other in (("Previous", "left", place - 1), ("Next", "right", place + 1)):
            exists = 0 <= other < len(steps)
            st.button(
                label, icon=f":material/chevron_{icon}:", disabled=not exists, on_click=st.session_state.update,
                args=({"step": steps[other if exists else place]},),
            )  # fmt: skip
        st.text(_episodes(samples.loc[samples["step"] == step, "episode"]))
    return step


def _episodes(counts: pd.Series) -> str:
    """Return the episodes of evaluations in words: a range if the trials' batch sizes differ; empty: not known."""
    ends = [f"{end:,.0f}" for end in sorted({counts.min(), counts.max()}) if not pd.isna(end)]
    return f"{' to '.join(ends)} episodes" if ends else ""


def at_evaluation(samples: pd.DataFrame, when: str, best: Mapping[int, int | None], step: int = 0) -> pd.DataFrame:
    """Return each trial's samples of one evaluation: the one before training, its best, or its last up to `step`.

    `best` maps a trial to the step of its value; None: it has none.
    """
    if when == BEST:
        steps = samples["trial"].map({number: -1 if step is None else step for number, step in best.items()})
    else:
        until = {FIRST: 0, LAST: math.inf}.get(when, step)  # a fork has none before training
        steps = samples["step"].where(samples["step"] <= until).groupby(samples["trial"]).transform("max")
    return samples[samples["step"] == steps]


def _lines(samples: pd.DataFrame, when: Sequence[str], best: Mapping[int, int | None], step: int) -> list[pd.DataFrame]:
    """Return the rows of the page: each lists `trial` and `step` shown side by side.

    With `every`, trials are aligned by their count of evaluations.
    """
    if EVERY in when:
        keys = samples[["trial", "step"]].drop_duplicates().sort_values(["trial", "step"])
        place = keys.groupby("trial").cumcount()
        last = int(place.max())
        count = min(last + 1, MOST_STEPS)
        return [keys[place == i * last // max(1, count - 1)] for i in range(count)]
    chosen = [at_evaluation(samples, name, best, step) for name in WHEN if name in when]
    return [line[["trial", "step"]].drop_duplicates() for line in chosen]


def _choose_prompt(prompts: Mapping[int, str]) -> int | None:
    """Return the chosen prompt; None for all, page by page. The link has its index, not its text."""
    linked = st.query_params.get("prompt", "")
    if "prompt" not in st.session_state and linked.isdecimal() and int(linked) in prompts:
        st.session_state["prompt"] = int(linked)
    chosen: int | None = st.selectbox(
        "Prompt", list(prompts), index=None, width=190, key="prompt", persist_state="session",
        label_visibility="collapsed", placeholder=f"All {pluralize(len(prompts), 'prompt')}",
        format_func=lambda index: f"{index}: {safe_text.one_line(prompts.get(index, ''), 90)}",
    )  # fmt: skip
    if chosen is not None:
        st.query_params["prompt"] = str(chosen)
    elif "prompt" in st.query_params:
        del st.query_params["prompt"]
    return chosen


def _marked(
    row: Any, mark: str | None, wanted: str, tokens: TokenReadings | None, largest: float, base: str | None
) -> tuple[list[Piece], str]:
    """Return a marked response, and a note on the marks."""
    text, note = row.response[: safe_text.WHOLE], ""
    if len(row.response) > len(text):
        note = f"cut: {len(row.response):,} characters in all"
    if mark in CHANGES:
        if base is not None:
            return sample_marks.changes(row.response, base), note
        note = "nothing to compare with"
    elif mark:
        if tokens is None:
            note = "no token data for this sample"
        elif sample_marks.values_of(tokens, mark, row.reward):
            return sample_marks.coloured_tokens(tokens, mark, largest, row.reward), note
        else:
            note = f"no {mark} for its tokens: this trial has no critic"
    return sample_marks.matches(text, wanted), note


_PART = "part "


def _places(samples: pd.DataFrame) -> dict[str, int]:
    """Return the decimals of the samples' rewards and KLs, and of each part of the rewards."""
    names = dict.fromkeys(name for parts in samples["parts"] for name in parts)
    parts = {_PART + name: decimals(parts.get(name) for parts in samples["parts"]) for name in names}
    return {name: decimals(samples[name]) for name in ("reward", "kl")} | parts


def _response(row: Any, pieces: Sequence[Piece], note: str, told: str, places: Mapping[str, int]) -> None:
    """Draw a response below its readings; `told` is what else these say, and `note` is below it."""
    st.caption(
        f"**{fixed(row.reward, places['reward'])}** · KL **{fixed(row.kl, places['kl'])}**{told}",
        help=f"Reward, KL in nats; {row.length:d} {METRICS['eval/length'].unit}; of step {row.step:d}, "
        f"{_episodes(pd.Series([row.episode])) or 'episodes not known'}.",
    )
    if len(row.parts) > 1:  # their names are text from outside
        parts = (f"{safe_text.one_line(name)} {fixed(part, places[_PART + name])}" for name, part in row.parts.items())
        st.text(" · ".join(parts))
    summary, css = "", "response"
    if len(row.response) > LONG:
        summary, css = f"<details><summary>All {len(row.response):,} characters</summary></details>", "response long"
    st.html(f'{summary}<div class="{css}" dir="auto">{safe_text.marked(pieces)}</div>')
    if note:
        st.caption(note)

"""The page Samples: one prompt across trials and evaluations, its tokens, and nothing of it interpreted."""

import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some
from streamlit.testing.v1 import AppTest

from dashboard.views import sample_marks, samples
from ppo_core.report import TokenReadings
from tests.dashboard import shown
from tests.dashboard.fake_store import HOSTILE, PROMPTS
from tests.dashboard.shown import page

pytestmark = pytest.mark.slow


def said(app: AppTest) -> list[str]:
    return [caption.value for caption in app.caption]


def headings(app: AppTest) -> list[str]:
    """The trials' headings, without their lines."""
    return [html.split(">", 1)[1] for one in app.get("html") if "<b>Trial" in (html := one.proto.body)]


def steps_told(app: AppTest) -> list[int]:
    return [int(caption.help.split("of step ")[1].split(",")[0]) for caption in app.caption if "· KL" in caption.value]


def test_one_prompt_is_chosen_by_its_text_and_the_link_holds_its_number(built: Path) -> None:
    app = page("samples", built, trial=["0"], when="every")
    choice = app.selectbox(key="prompt")
    assert [option.split(": ", 1)[1] for option in choice.options] == list(PROMPTS)
    choice.set_value(3)
    shown.run(app)
    assert app.query_params["prompt"] == "3"
    assert steps_told(app) == [0, 6, 12, 18, 24, 30]
    assert [one.split("· step ")[1] for one in said(app) if "· KL" in one] == ["0", "6", "12", "18", "24", "30"]
    assert PROMPTS[3] in shown.texts(app) and PROMPTS[0] not in shown.texts(app)
    linked = page("samples", built, trial=["0"], prompt="3")
    assert PROMPTS[3] in shown.texts(linked) and PROMPTS[0] not in shown.texts(linked)
    assert len(steps_told(page("samples", built, trial=["0"], prompt="99"))) == 3


def test_the_best_evaluation_is_the_one_that_the_value_is_of() -> None:
    """The kept samples are few: the highest mean of theirs may be another evaluation."""
    frame = pd.DataFrame(
        [(0, 0, 9.0, 0.0), (0, 2, 5.0, 4.0), (0, 4, 2.0, 9.0), (1, 0, 1.0, 0.0), (1, 2, 1.0, 30.0)],
        columns=["trial", "step", "reward", "kl"],
    )
    kept = samples.at_evaluation(frame, "best in the budget", {0: 4, 1: 0})
    assert kept[["trial", "step"]].to_numpy().tolist() == [[0, 4], [1, 0]]
    assert samples.at_evaluation(frame, "best in the budget", {0: 4, 1: None})["trial"].tolist() == [0]
    forked = frame[(frame["trial"] == 0) | (frame["step"] > 0)]
    assert samples.at_evaluation(forked, "before training", {})["trial"].tolist() == [0], "a fork has none of its own"


def test_the_page_opens_with_the_checkpoint_to_launch(built: Path) -> None:
    app = page("samples", built, trial=["9", "8"])
    assert steps_told(app) == [18, 6] * 3, "its best, 12 steps before its end, and the last of trial 8, which failed"
    assert not any("· step" in caption for caption in said(app)), "of one evaluation the tooltip says which"
    without = [caption for caption in said(app) if ", its last; none trained was within the budget" in caption]
    assert len(without) == 3


# Tokens


def marked(app: AppTest) -> list[str]:
    """The responses of a page, as HTML."""
    return [one.proto.body for one in app.get("html") if 'class="response' in one.proto.body]


@pytest.mark.parametrize("reading", sample_marks.COLOURED)
def test_tokens_are_shaded_by_the_chosen_reading_and_say_all_of_them(built: Path, reading: str) -> None:
    [response] = marked(page("samples", built, trial=["0"], prompt="0", mark=reading))
    assert "background-color: rgba(" in response
    assert all(f"{name} " in response.split("title=")[1] for name in sample_marks.READINGS)


@pytest.mark.parametrize(
    ("trial", "mark", "said"),
    [
        ("3", "KL", "no token data for this sample"),
        ("4", "value error", "no value error for its tokens: this trial has no critic"),
        ("0", sample_marks.BEFORE, "nothing to compare with"),
    ],
)
def test_marks_that_are_not_known_are_said(built: Path, trial: str, mark: str, said: str) -> None:
    app = page("samples", built, trial=[trial], prompt="0", mark=mark, when="before training")
    assert "<span" not in marked(app)[0] and said in [caption.value for caption in app.caption]


def test_the_value_error_is_the_critics_value_less_the_reward() -> None:
    of = TokenReadings(("a", " b"), (-1.0, -1.0), (0.5, 0.5), (0.5, 0.5), (0.1, 0.1), (0.5, 2.0))
    pieces = sample_marks.coloured_tokens(of, "value error", 1.0, reward=1.5)
    assert "".join(text for text, *_ in pieces) == "a b"
    assert ["value error -1.000" in said or "value error 0.500" in said for _, _, said in pieces[::2]] == [True, True]
    assert sample_marks.extremes([of, None], "value error", [1.5, math.nan]) == (-1.0, 0.5)
    assert sample_marks.extremes([of], "value error") == (0.0, 0.0)


# Differences, what is looked for, orders and steps


@given(text=some.text(), base=some.text())
def test_a_difference_has_all_words_of_both_responses(text: str, base: str) -> None:
    pieces = sample_marks.changes(text, base)
    assert "".join(one for one, _, said in pieces if said != "removed").split() == text.split()
    removed = "".join(one for one, _, said in pieces if said == "removed").split()
    assert len([one for one, _, said in sample_marks.changes(text, text) if said]) == 0
    assert set(removed) <= set(base.split())


@pytest.mark.parametrize(
    ("against", "base"), [(sample_marks.REFERENCE, "R6"), (sample_marks.START, "T0"), (sample_marks.BEFORE, "T4")]
)
def test_a_response_is_held_against_that_of_the_reference_or_another_step(against: str, base: str) -> None:
    rows = [(0, 0, "R0"), (0, 6, "R6"), (0, 9, "R9"), (1, 0, "T0"), (1, 4, "T4"), (1, 8, "T8")]
    frame = pd.DataFrame(rows, columns=["trial", "step", "response"]).assign(prompt_index=3)
    assert sample_marks.base_of(frame, next(frame.iloc[[5]].itertuples()), against, 0) == base
    assert sample_marks.base_of(frame.iloc[[5]], next(frame.iloc[[5]].itertuples()), against, 0) is None


@pytest.mark.parametrize(
    ("order", "prompts"), [("prompt", [0, 1, 2]), ("reward", [1, 2, 0]), ("kl", [2, 0, 1]), ("gap", [0, 2, 1])]
)
def test_prompts_are_ordered_by_what_their_responses_have(order: str, prompts: list[int]) -> None:
    rows = [(0, 0.0, 5.0), (0, 3.0, 6.0), (1, 9.0, 1.0), (2, 4.0, 9.0), (2, 6.0, 2.0)]
    assert samples.ordered(pd.DataFrame(rows, columns=["prompt_index", "reward", "kl"]), order) == prompts


def test_only_responses_with_what_was_looked_for_are_shown_and_marked(built: Path) -> None:
    app = page("samples", built, trial=["0", "6"], find="GREAT " * 5)
    assert "In 1 of 8 responses." in [caption.value for caption in app.caption]
    assert [PROMPTS[1] in shown.texts(app), PROMPTS[0] in shown.texts(app)] == [True, False]
    assert any(f">{'great ' * 5}</span>" in response for response in marked(app))


def test_steps_go_back_and_forth(built: Path) -> None:
    app = page("samples", built, trial=["0"], when="at step", prompt="0", step="18")
    assert steps_told(app) == [18]
    next(button for button in app.button if button.label == "Previous").click()
    assert steps_told(shown.run(app)) == [12] and "768 episodes" in shown.texts(app)
    next(button for button in app.button if button.label == "Next").click()
    assert steps_told(shown.run(app)) == [18]


def test_a_long_response_is_there_in_full(built: Path) -> None:
    [response] = marked(page("samples", built, trial=["6"], prompt="1", when="last"))
    assert response.count("great") == 900 and "<summary>All 5,400 characters</summary>" in response


# Text from outside, and studies with nothing to show


def test_hostile_texts_are_shown_literally_and_nowhere_interpreted(built: Path) -> None:
    for mark in ("KL", sample_marks.START, ""):
        app = page("samples", built, trial=["2"], mark=mark, when="last")
        assert any("&lt;script&gt;" in response and "⟨U+202E⟩" in response for response in marked(app))
        assert not shown.kinds_with(app, "<script>") | shown.kinds_with(app, "\u202e")
    assert shown.kinds_with(app, "<b>the new phone</b>") == {"text", "selectbox"}
    assert shown.kinds_with(app, "<b>brief</b>") == {"text"}
    assert HOSTILE[:9] not in " ".join(app.query_params)


def test_hacking_is_judged_under_the_asked_budget(built: Path) -> None:
    def verdict(budget: str) -> str:
        app = page("samples", built, budget=budget, trial=["7"])
        signs = next(one.value for one in app.dataframe if "Sign" in one.value).set_index("Sign")["Trial 7"]
        return f"{signs['Verdict']}, KL {signs['Last eval KL (nats)']}"

    assert verdict("10").startswith("✓ no sign, KL 9")
    assert verdict("8").startswith("▲ suspect, KL ▲ 9")

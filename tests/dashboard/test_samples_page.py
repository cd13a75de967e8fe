"""The page Samples: one prompt across trials and evaluations, its tokens, and nothing of it interpreted."""

import math
from pathlib import Path

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import safe_text
from dashboard.views import samples
from ppo_core.report import TokenReadings
from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import HOSTILE, PROMPTS, STORED
from tests.dashboard.shown import GOOD, page

pytestmark = pytest.mark.slow


def steps_told(app: AppTest) -> list[int]:
    return [int(caption.value.split("step ")[1]) for caption in app.caption if "· step" in caption.value]


@pytest.mark.parametrize(("when", "step"), [("before training", 0), ("halfway", 18), ("last", 30)])
def test_samples_are_those_of_the_chosen_evaluation(
    built: Path, monkeypatch: pytest.MonkeyPatch, when: str, step: int
) -> None:
    assert steps_told(page("samples", built, monkeypatch, trial=["0"], when=when)) == [step] * 3


def test_several_evaluations_stand_below_each_other_in_their_order(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = page("samples", built, monkeypatch, trial=["0", "3"], when=["last", "before training"], prompt="1")
    assert steps_told(app) == [0, 0, 30, 15]


def test_one_prompt_is_chosen_by_its_text_and_the_link_holds_its_number(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = page("samples", built, monkeypatch, trial=["0"], when="every")
    choice = app.selectbox(key="prompt")
    assert [option.split(": ", 1)[1] for option in choice.options] == list(PROMPTS)
    choice.set_value(3)
    shown.run(app)
    assert app.query_params["prompt"] == "3"
    assert steps_told(app) == [0, 6, 12, 18, 24, 30]
    assert PROMPTS[3] in shown.texts(app) and PROMPTS[0] not in shown.texts(app)
    linked = page("samples", built, monkeypatch, trial=["0"], prompt="3")
    assert PROMPTS[3] in shown.texts(linked) and PROMPTS[0] not in shown.texts(linked)
    assert len(steps_told(page("samples", built, monkeypatch, trial=["0"], prompt="99"))) == 3


def test_the_best_evaluation_is_the_one_that_the_value_is_of() -> None:
    """The kept samples are few: the highest mean of theirs may be another evaluation."""
    frame = pd.DataFrame(
        [(0, 0, 9.0, 0.0), (0, 2, 5.0, 4.0), (0, 4, 2.0, 9.0), (1, 0, 1.0, 0.0), (1, 2, 1.0, 30.0)],
        columns=["trial", "step", "reward", "kl"],
    )
    kept = samples.at_evaluation(frame, "best in the budget", {0: 4, 1: 0})
    assert kept[["trial", "step"]].to_numpy().tolist() == [[0, 4]]


def test_nothing_chosen_is_said(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("samples", built, monkeypatch, trial=["0", "99"])
    app.segmented_control(key="when").set_value([])
    assert "Choose at least one evaluation." in shown.infos(shown.run(app))


def test_more_trials_than_fit_are_said(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("samples", built, monkeypatch, trial=["0", "1", "2", "3", "4"])
    assert shown.infos(app) == ["Shown are 4 of 5 trials. Choose others in the sidebar."]


# Tokens


@pytest.mark.parametrize("reading", samples.COLOURED)
def test_tokens_are_shown_by_the_chosen_reading(built: Path, monkeypatch: pytest.MonkeyPatch, reading: str) -> None:
    app = page("samples", built, monkeypatch, trial=["0"], prompt="0", tokens=reading)
    [table] = app.dataframe
    assert list(table.value.columns)[:2] == ["token", reading]
    assert set(table.value.columns) == {"token", *samples.READINGS}


@pytest.mark.parametrize(
    ("trial", "reading", "said"),
    [
        ("3", "KL", "no token data for this sample"),
        ("4", "value error", "no value error for its tokens: this trial has no critic"),
    ],
)
def test_tokens_that_are_not_known_are_said(
    built: Path, monkeypatch: pytest.MonkeyPatch, trial: str, reading: str, said: str
) -> None:
    app = page("samples", built, monkeypatch, trial=[trial], prompt="0", tokens=reading)
    assert not app.dataframe and said in [caption.value for caption in app.caption]


def test_the_value_error_is_the_critics_value_less_the_reward() -> None:
    of = TokenReadings(("a", "b"), (-1.0, -1.0), (0.5, 0.5), (0.5, 0.5), (0.1, 0.1), (0.5, 2.0))
    assert samples.table(of, first="value error", reward=1.5)["value error"].tolist() == [-1.0, 0.5]
    assert "value error" not in samples.table(of, first="KL").columns
    assert samples.largest_reading([of, None], "value error", [1.5, math.nan]) == 1.0
    assert samples.largest_reading([of], "value error") == 0.0


# Text from outside, and studies with nothing to show


def test_hostile_texts_are_shown_literally_and_nowhere_interpreted(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = page("samples", built, monkeypatch, trial=["2"], tokens="KL", when="last")
    assert safe_text.visible(STORED) in shown.texts(app)
    assert shown.kinds_with(app, "<script>") == {"text", "dataframe"}
    assert shown.kinds_with(app, "<b>the new phone</b>") == {"text", "selectbox"}
    assert shown.kinds_with(app, "<b>brief</b>") == {"text"}
    assert HOSTILE[:9] not in " ".join(app.query_params)


def test_without_trials_or_samples_it_says_what_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_store.build(tmp_path / "none.db", courses=()).close()
    assert shown.subheaders(page("samples", tmp_path / "none.db", monkeypatch)) == ["No trials yet"]
    fake_store.build(tmp_path / "some.db", courses=(GOOD,)).close()
    shown.change(tmp_path / "some.db", "DELETE FROM ppo_samples")
    app = page("samples", tmp_path / "some.db", monkeypatch)
    assert "These trials have no samples yet. The first evaluation writes them." in shown.infos(app)

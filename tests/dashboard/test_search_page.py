"""The page Search: refused where it would be chance, and what was ended early."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import Course
from tests.dashboard.shown import FAILED, GOOD, page

pytestmark = pytest.mark.slow


def test_under_ten_trials_importance_is_refused_and_the_rest_is_drawn(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = page("search", built, monkeypatch)
    assert [text for text in shown.infos(app) if text.endswith("importance needs 10, so 1 more is needed.")]
    assert [chart.key for chart in app.get("plotly_chart")] == ["slices of value"]
    app = page("search", built, monkeypatch, more="true")
    assert [chart.key for chart in app.get("plotly_chart")] == [
        "slices of value", "front of trials", "slice of kl", "pair", "parallel coordinates"
    ]  # fmt: skip
    assert "Different settings" not in shown.subheaders(app)


def test_with_enough_trials_importance_is_told_with_how_sure_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    levels = random.uniform(1, 9, 24)
    courses = tuple(
        Course(float(10 ** (level / 4 - 5)), float(random.uniform(0.02, 0.2)), float(level), batch=128,
               cliprange=float(random.uniform(0.1, 0.3)), epochs=int(random.integers(2, 9)))
        for level in levels
    )  # fmt: skip
    fake_store.build(tmp_path / "store.db", courses=courses).close()
    app = page("search", tmp_path / "store.db", monkeypatch, more="true")
    assert [chart.key for chart in app.get("plotly_chart")][:2] == ["importance for reward", "importance for KL"]
    told = [text for text in shown.texts(app) if text.startswith("With 24 trials")]
    assert len(told) == 2 and all("Policy learning rate" in text.split("out from chance")[0] for text in told)
    best, change = (one.value for one in app.markdown if one.value.startswith("Policy learning rate: "))
    assert best.startswith("Policy learning rate: the 5 best of 24 trials lie at ") and best.endswith(" next.")
    assert change.startswith("Policy learning rate: KL rises with it: the rank correlation over 24 trials is +")
    assert app.selectbox(key="setting").value == "learning_rate", "the one that mattered most comes first"
    drawn, options = figures_of(app), app.selectbox(key="setting").options
    ranked = {
        outcome: [
            label
            for title in drawn[f"importance for {outcome}"]["data"][0]["y"][::-1]
            if (label := title.partition(" (")[0]) in options
        ]
        for outcome in ("reward", "KL")
    }
    assert options == ranked["KL"] != ranked["reward"] == app.selectbox(key="across").options


def test_trials_are_read_at_the_rung_or_at_their_end_and_never_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_store.build_cut(tmp_path / "store.db").close()
    rung = page("search", tmp_path / "store.db", monkeypatch, more="true")
    assert rung.segmented_control(key="read at").value == "at screening"
    assert any(one.value.startswith("25 trials read at 10% to 13% of their episodes.") for one in rung.caption)
    assert [text for text in shown.texts(rung) if text.startswith("With 25 trials")], "all that came to the rung"
    assert "with their evaluations there" in rung.segmented_control(key="read at").help
    slices = figures_of(rung)
    band, *others = slices["front of trials"]["layout"]["shapes"]
    assert ([band["x0"], band["x1"]], others) == (pytest.approx([0.5, 3.0]), []), "the KL budget is for the end"
    ranked = next(table.value for table in rung.dataframe if "Outcome" in table.value)
    assert len(ranked) == 25 and ranked["Outcome"].value_counts()["promoted"] == 4
    assert shown.subheaders(rung)[:2] == [
        "What mattered for reward, and for KL", "Who was promoted, and did screening predict the end?"
    ]  # fmt: skip
    told = shown.texts(rung)
    promoted = "4 of the 25 trials screened were promoted ("
    assert [text for text in told if text.startswith(promoted) and "); 21 were not (" in text]
    assert {"**For the reward at screening**", "**For the KL at screening**"} <= {one.value for one in rung.markdown}
    assert any("Too few of the promoted trials have ended" in text for text in told)
    assert slices["slices of value"]["layout"]["annotations"][0]["text"] == "Eval reward at screening"
    front = slices["front of trials"]["layout"]
    assert front["yaxis"]["title"]["text"] == "Eval reward at screening"
    assert slices["slice of kl"]["layout"]["yaxis"]["title"]["text"] == "Eval KL at screening (nats per response)"
    end = page("search", tmp_path / "store.db", monkeypatch, more="true", **{"read at": "at their end"})
    assert any(info.startswith("2 trials ran to the end") for info in shown.infos(end))
    drawn = figures_of(end)["slice of kl"]
    assert {trace["name"] for trace in drawn["data"] if "name" in trace} == {"completed", "pruned", "failed"}
    assert drawn["layout"]["yaxis"]["title"]["text"] == "Eval KL at the end (nats per response)"
    for app in (rung, end):
        assert any("21 trials not promoted so far are not counted here." in text for text in shown.texts(app))
        assert not any("last two" in text for text in [*shown.texts(app), *(one.value for one in app.caption)])


def test_once_the_search_has_ended_screened_trials_count_as_ended_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tuple(course for place, course in enumerate(fake_store.CUT_COURSES) if place not in (8, 13, 14))
    fake_store.build_cut(tmp_path / "store.db", courses=done).close()
    app = page("search", tmp_path / "store.db", monkeypatch)
    assert not any("not counted here" in text for text in shown.texts(app))
    rules = next(table.value for table in app.dataframe if "rule" in table.value)
    assert rules[["rule", "trials"]].to_numpy().tolist()[0] == ["Screening", 21]
    assert [text for text in shown.texts(app) if text.startswith(f"{rules['trials'].sum()} trials ended early, which")]


def figures_of(app: AppTest) -> dict[str, Any]:
    return {chart.key: json.loads(chart.proto.spec) for chart in app.get("plotly_chart")}


def test_what_was_ended_early_and_what_it_saved(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("search", built, monkeypatch)
    assert (
        "3 trials ended early, which saved 2,560 episodes (11% of what these and the completed trials would have taken) "
        "and about 33 s."
    ) in shown.texts(app)
    [rules] = (table.value for table in app.dataframe)
    assert rules[["rule", "trials"]].to_numpy().tolist() == [["KL over the limit", 2], ["Not a number", 1]]
    assert not [heading for heading in shown.subheaders(app) if "promoted" in heading], "nothing was screened"


def test_two_hyperparameters_are_chosen_in_the_link(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page(
        "search", built, monkeypatch, across="cliprange", up="learning_rate", of="KL", setting="cliprange", more="true"
    )
    assert (app.selectbox(key="across").value, app.selectbox(key="up").value) == ("cliprange", "learning_rate")
    assert app.selectbox(key="setting").value == "cliprange"
    assert app.selectbox(key="setting").options[:2] == ["Policy learning rate", "Rollout batch"]
    assert "Clip range ε" in app.multiselect(key="axes").options
    app.selectbox(key="up").set_value("cliprange")
    assert "Choose two different hyperparameters." in shown.infos(shown.run(app))


@pytest.mark.parametrize("courses", [(GOOD,), (FAILED, FAILED), (GOOD, GOOD, FAILED)])
def test_few_or_failed_trials_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, courses: tuple[Course, ...]
) -> None:
    fake_store.build(tmp_path / "store.db", courses=courses).close()
    app = page("search", tmp_path / "store.db", monkeypatch)
    refused, slices, nothing_ended = shown.infos(app)
    assert "more are needed" in refused
    assert slices.startswith("These charts need two trials")
    assert nothing_ended.startswith("No trial was pruned or stopped")

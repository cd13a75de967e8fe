"""The page Reward and KL: what is drawn of each trial, and what the KL buys."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dashboard.views import reward_kl
from dashboard.views.sidebar import TRIALS
from tests.dashboard import fake_store, shown
from tests.dashboard.shown import GOOD, page
from tests.tuner import made_study
from tuner.confirm.plan import Plan
from tuner.confirm.result import confirmations
from tuner.judge.results import read_study

pytestmark = pytest.mark.slow


def drawn(path: Path, **link: str) -> list[dict[str, Any]]:
    """The traces of the figure."""
    [chart] = page("reward_kl", path, **link).get("plotly_chart")
    traces: list[dict[str, Any]] = json.loads(chart.proto.spec)["data"]
    return traces


def test_what_kl_buys_is_told_under_the_studys_own_budget(built: Path) -> None:
    app = page("reward_kl", built)
    assert app.slider(key="budget").value == 10
    bought = app.dataframe[0].value.set_index("within")
    assert bought.loc[10, ["reward", "trial", "step"]].tolist() == ["1.739 ± 0.035", 9, 18]
    assert bought.index.tolist() == [2.5, 5, 7.5, 10, 20]


def test_the_best_is_a_star_and_no_front_is_drawn(bounded: Path) -> None:
    names = {trace.get("name") for trace in drawn(bounded)}
    assert {"best checkpoint: trial 5, step 12", "other trials"} <= names
    assert "front of all evaluations" not in names
    stars = [trace.get("name") for trace in drawn(bounded, budget="5")]
    assert "best checkpoint: trial 9, step 12" in stars, "judged by what is stored"


def test_finalists_are_bold_with_their_means(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = fake_store.build_bounded(path, courses=fake_store.BOUNDED_DONE)
    made_study.confirm(store, fake_store.BOUNDED, Plan(top=2, seeds=3))
    [confirmation] = confirmations(store, read_study(store, fake_store.BOUNDED))
    finalists = {one.trial.number for one in confirmation.configurations}
    traces = drawn(path)
    bold = {trace["customdata"][0][0] for trace in traces if trace.get("line", {}).get("width") == 3}
    assert bold == finalists
    assert len([trace for trace in traces if "error_y" in trace]) == 3
    [others] = [trace for trace in traces if trace.get("name") == "other trials"]
    assert {point[0] for point in others["customdata"]} == set(range(len(fake_store.BOUNDED_DONE))) - finalists
    assert not [trace for trace in drawn(path, budget="3") if "error_y" in trace], "another KL budget"


def test_a_click_chooses_the_trial_of_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [{"customdata": [7, 3.0, 2, 128]}, {"customdata": [7, 4.0, 4, 256]}, {"x": 1.0}]
    state = {reward_kl.FIGURE: SimpleNamespace(selection=SimpleNamespace(points=points))}
    monkeypatch.setattr(reward_kl.st, "session_state", state)
    reward_kl._choose()
    assert state[TRIALS] == [7]


def test_each_study_begins_with_its_own_budget(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    for name in ("first", "second"):
        fake_store.build(path, courses=(GOOD,), name=name).close()
    shown.change(path, "UPDATE ppo_studies SET spec = json_set(spec, '$.kl.budget', 6.0) WHERE name = ?", "first")
    app = page("reward_kl", path, study="second")
    assert app.slider(key="budget").value == 10
    app.selectbox(key="study").set_value("first")
    assert shown.run(app).slider(key="budget").value == 6

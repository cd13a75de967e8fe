"""Curves on real stores, run by Streamlit's AppTest: what the page says, and that nothing raises."""

import json
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from tests.dashboard.fake_store import STUDY
from tests.dashboard.shown import charts, page, run, subheaders

pytestmark = pytest.mark.slow


def test_the_curves_of_a_study(built: Path) -> None:
    app = page("curves", built)
    assert subheaders(app) == ["Training KL", "Eval reward", "Score"]
    assert charts(app) == ["objective/kl_exact curves", "eval/reward curves", "objective/scores curves"]
    assert not app.caption, "headings explain themselves when pointed at"
    assert all("★ marks the one that gives the trial its value" in heading.help for heading in app.subheader[:2])


def names_in_colour(app: AppTest) -> set[str]:
    """The trials that the first chart's tooltip lists."""
    spec = json.loads(app.get("echarts_chart")[0].proto.spec)
    return {series["name"] for series in spec["series"] if series.get("symbol") == "none"}


def test_without_a_choice_answer_reference_and_what_runs_are_in_colour(built: Path) -> None:
    app = page("curves", built)
    assert names_in_colour(app) == {"Trial 0", "Trial 9", "Trial 13"}
    app.multiselect(key="trial").set_value([5, 2])
    assert names_in_colour(run(app)) == {"Trial 2", "Trial 5"}


def test_a_link_shows_what_it_names(built: Path) -> None:
    named = ["Policy: Entropy", "KL and reward: Training KL"]
    app = page("curves", built, study=STUDY, trial=["2", "5"], axis="step", scale="log", metric=named)
    assert charts(app) == ["policy/entropy_avg curves", "objective/kl_exact curves"]
    entropy, kl = (json.loads(chart.proto.spec) for chart in app.get("echarts_chart")[:2])
    assert (entropy["xAxis"]["name"], kl["yAxis"]["type"]) == ("Step (PPO iterations)", "log")


def test_metrics_that_no_trial_has_are_named_in_one_line_and_leave_no_gap(built: Path) -> None:
    named = ["Losses: all", "Policy: Entropy", "KL and reward: Training KL"]
    app = page("curves", built, study=STUDY, trial="9", metric=named)
    assert "Not measured in these trials: Policy loss, Value loss, KL loss." in [one.value for one in app.caption]
    assert subheaders(app) == ["Entropy", "Training KL"]


def test_trials_can_be_grouped_by_a_setting_and_charts_share_a_cursor(built: Path) -> None:
    by = HYPERPARAMETERS["cliprange"].label
    app = page("curves", built, by=by, group="true", linked="true", metric="Policy: all")
    assert len(charts(app)) == 1
    spec = json.loads(app.get("echarts_chart")[0].proto.spec)
    assert len(spec["grid"]) == 2, "those of the group that were measured"
    assert {series["name"] for series in spec["series"]} >= {"up to 0.2", "over 0.2"}

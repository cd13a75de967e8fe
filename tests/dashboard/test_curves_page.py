"""Curves on real stores, run by Streamlit's AppTest: what the page says, and that nothing raises."""

import json
from pathlib import Path

import pytest

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from tests.dashboard import fake_store
from tests.dashboard.fake_store import STUDY, Course
from tests.dashboard.shown import (
    Page,
    change,
    charts,
    page_of,
    run,
    subheaders,
    texts,
)
from tuner.study.status import Status

pytestmark = pytest.mark.slow


def test_the_curves_of_a_study(built: Path, curves: Page) -> None:
    app = run(curves(built))
    assert subheaders(app) == ["Training KL", "Eval reward", "Score"]
    assert charts(app) == ["objective/kl_exact curves", "eval/reward curves", "objective/scores curves"]
    [told] = [text for text in texts(app) if text.startswith("Trial 6: Training KL was 18.9 nats at step 21")]
    assert "the first step over the guard's limit of 15. " in told and " moved first, at step " in told


def test_the_curves_of_chosen_trials_are_before_the_others_in_grey(bounded: Path, curves: Page) -> None:
    app = curves(bounded)
    app.query_params["trial"] = ["0", "5"]
    run(app)
    [said] = [one.value for one in app.caption if one.value.startswith("In colour: ")]
    assert said.endswith("✕ pruned, ▲ failed, ■ stopped.")
    assert " Grey: the other 13 trials, a line or mark each. Points are evaluations: " in said
    told = [one.value for one in app.caption]
    assert any("standard error of a point, over the eval prompts, is about 0.035 (shaded)." in one for one in told)
    assert any(one.value.startswith("In colour: trials 0 (reference), 5 (best).") for one in app.caption)


def test_a_link_shows_what_it_names(built: Path, curves: Page) -> None:
    app = curves(built)
    named = {"trial": ["2", "5"], "axis": "step", "scale": "log"}
    app.query_params.update({"study": STUDY, "metric": ["Policy: Entropy", "KL and reward: Training KL"], **named})
    run(app)
    assert charts(app) == ["policy/entropy_avg curves", "objective/kl_exact curves"]
    entropy, kl = (json.loads(chart.proto.spec) for chart in app.get("echarts_chart")[:2])
    assert (entropy["xAxis"]["name"], kl["yAxis"]["type"]) == ("Step (PPO iterations)", "log")


def test_metrics_that_no_trial_has_are_named_in_one_line_and_leave_no_gap(built: Path, curves: Page) -> None:
    app = curves(built)
    named = ["Losses: all", "Policy: Entropy", "KL and reward: Training KL"]
    app.query_params.update({"study": STUDY, "trial": "9", "metric": named})
    assert "Not measured in these trials: Policy loss, Value loss, KL loss." in [one.value for one in run(app).caption]
    assert subheaders(app) == ["Entropy", "Training KL"]
    assert app.sidebar.caption[0].value == "Trial 9 ★: 1.739 · KL 9.56 · completed"


def test_the_captions_of_smoothed_curves_say_what_was_measured(built: Path, curves: Page) -> None:
    app = run(curves(built))
    told = [one.value for one in app.caption]
    assert any(" ends lowest, at " in text for text in told)
    app.slider(key="smooth").set_value(0.9)
    assert [one.value for one in run(app).caption] == told


def test_the_incident_is_of_the_latest_pruned_trial_that_has_an_answer(tmp_path: Path, curves: Page) -> None:
    at_once = Course(1.9e-3, 0.011, 200.0, Status.PRUNED, blow_up=1)
    app = page_of(tmp_path / "store.db", curves, (fake_store.COURSES[2], at_once))
    told = texts(run(app))
    assert any(text.startswith("Trial 0: Training KL was ") for text in told)
    app.multiselect(key="trial").set_value([1])
    assert any("before there were enough steps" in text for text in texts(run(app)))


def test_health_is_that_of_the_trials_in_colour(built: Path, curves: Page) -> None:
    app = curves(built)
    app.query_params.update({"study": STUDY, "view": "PPO health"})
    shown_first = run(app).dataframe[0].value["trial"].tolist()
    assert shown_first == sorted(shown_first) and {0, 9, 6, 13} < {*shown_first}, "the best that ended among them"
    app.multiselect(key="trial").set_value([5, 2])
    assert run(app).dataframe[0].value["trial"].tolist() == [2, 5]
    told = "KL too high: Eval KL ended at 29.4 nats/response, over the budget of 10. Try kl_coef = 0.0577 (was 0.011)."
    assert any(told in text.split("\n") for text in texts(app)), "the fix with its value"
    assert [link.proto.label for link in app.get("page_link")] == ["Trial 2"], "nothing is wrong with trial 5"
    assert charts(app) == []


def test_curves_of_a_study_without_trials_or_steps_say_what_to_wait_for(tmp_path: Path, curves: Page) -> None:
    assert subheaders(run(page_of(tmp_path / "none.db", curves, ()))) == ["No trials yet"]
    path = tmp_path / "begun.db"
    fake_store.build(path, courses=(Course(1e-4, 0.05, 4.0, Status.RUNNING, ends_at=0),)).close()
    change(path, "DELETE FROM ppo_steps")
    app = run(curves(path))
    assert "No trial has reported a step yet." in [info.value for info in app.info]


def test_trials_can_be_grouped_by_a_setting_and_charts_share_a_cursor(built: Path, curves: Page) -> None:
    app = curves(built)
    app.query_params.update(
        {"by": HYPERPARAMETERS["cliprange"].label, "group": "true", "linked": "true", "metric": "Policy: all"}
    )
    assert len(charts(run(app))) == 1
    spec = json.loads(app.get("echarts_chart")[0].proto.spec)
    assert len(spec["grid"]) == 2, "those of the group that were measured"
    assert {series["name"] for series in spec["series"]} >= {"up to 0.2", "over 0.2"}
    assert sum("; over 0.2" in caption.value or "Over 0.2 ends" in caption.value for caption in app.caption) == 2

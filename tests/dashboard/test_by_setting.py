"""KL under different β: which trials span a setting, what their lines are called, and the click that shows them."""

import json
from pathlib import Path

import pytest

from dashboard import analysis, data
from dashboard.charts import KL
from dashboard.data import Snapshot
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from tests.dashboard import fake_store
from tests.dashboard.fake_store import STUDY, Course
from tests.dashboard.shown import change, fork, page, run

pytestmark = pytest.mark.slow


def snapshot(path: Path) -> Snapshot:
    return data.snapshot(data.open_store(f"sqlite:///{path}"), STUDY)


def of(tmp_path: Path, *courses: Course) -> Snapshot:
    fake_store.build(tmp_path / "store.db", courses=courses).close()
    return snapshot(tmp_path / "store.db")


def test_beta_is_spanned_by_three_fixed_values_and_the_middle_target(built: Path) -> None:
    rows = snapshot(built).view.trials
    # Fixed β that did not fail, by value: 2 9 6 5 3 12 7 0 10 1; targets: 13 4 11.
    assert analysis.spanning(rows, "kl_coef") == (2, 3, 1, 4)
    assert [analysis.name(rows[number], "kl_coef") for number in (2, 3, 1, 4)] == [
        *("β 0.011", "β 0.032", "β 0.1"),
        "target 6.1",
    ]


def settings(now: Snapshot) -> list[str]:
    return analysis.settings(now.trials, now.view.trials)


def test_only_searched_numbers_that_vary_name_lines(built: Path, tmp_path: Path) -> None:
    names = settings(snapshot(built))
    assert names == [name for name in HYPERPARAMETERS if name in fake_store.SPEC.search]
    assert settings(of(tmp_path, Course(1e-4, 0.05, 4.0))) == []


def test_a_beta_that_only_a_fork_changed_names_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = fake_store.build(path, courses=(Course(1e-4, 0.05, 4.0),))
    fork(store, STUDY, 1, 0, 6, kl_coef=0.2)
    change(path, "UPDATE ppo_trials SET params = json_remove(params, '$.kl_coef') WHERE number = 0")
    change(path, "UPDATE ppo_trials SET episodes = 1920")
    assert settings(snapshot(path)) == ["kl_coef"]
    app = page("curves", path, study=STUDY)
    next(button for button in app.button if button.label == "KL by β").click()
    assert run(app).selectbox(key="by").value == "kl_coef"


def test_a_value_that_is_no_number_is_never_in_a_chart(tmp_path: Path) -> None:
    of(tmp_path, Course(1e-4, 0.05, 4.0))
    fake_store.build(tmp_path / "other.db", courses=(Course(1e-4, "<b>x</b>", 4.0),)).close()  # type: ignore[arg-type]
    row = snapshot(tmp_path / "other.db").view.trials[0]
    assert analysis.name(row, "kl_coef") == ""


def test_one_click_on_the_curves_shows_kl_by_beta(built: Path) -> None:
    app = page("curves", built, study=STUDY)
    next(button for button in app.button if button.label == "KL by β").click()
    run(app)
    assert app.multiselect(key="trial").value == [2, 3, 1, 4]
    assert app.selectbox(key="by").value == "kl_coef"
    first = app.get("echarts_chart")[0]
    names = [series["name"] for series in json.loads(first.proto.spec)["series"]]
    assert first.key == f"{KL} curves" and "Trial 3: β 0.032" in names
    also = "These trials differ in other settings, too: Policy learning rate, "
    assert also in app.subheader[0].help
    app.selectbox(key="by").set_value(None)
    assert also not in run(app).subheader[0].help

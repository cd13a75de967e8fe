"""KL under different β: which trials span a setting, what their lines are called, and the click that shows them."""

import json
from pathlib import Path

import pytest

from dashboard import analysis, data, style
from dashboard.charts import KL, Drawing, curve
from dashboard.data import Snapshot
from ppo_core.config.hyperparameters import HYPERPARAMETERS
from tests.dashboard import fake_store
from tests.dashboard.fake_store import STUDY, Course
from tests.dashboard.shown import change, fork, page, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "store.db"
    fake_store.build(path).close()
    return path


def snapshot(path: Path) -> Snapshot:
    return data.snapshot(data.open_store(f"sqlite:///{path}"), STUDY)


def of(tmp_path: Path, *courses: Course) -> Snapshot:
    fake_store.build(tmp_path / "store.db", courses=courses).close()
    return snapshot(tmp_path / "store.db")


def test_beta_is_spanned_by_its_lowest_middle_and_highest_fixed_value_and_the_middle_target(path: Path) -> None:
    rows = snapshot(path).view.trials
    # Fixed β that did not fail, by value: 2 9 6 5 3 12 7 0 10 1; targets: 13 4 11.
    assert analysis.spanning(rows, "kl_coef") == (2, 3, 1, 4)
    assert [analysis.name(rows[number], "kl_coef") for number in (2, 3, 1, 4)] == [
        *("β 0.011", "β 0.032", "β 0.1"),
        "target 6.1",
    ]


def settings(now: Snapshot) -> list[str]:
    return analysis.settings(now.trials, now.view.trials)


def test_only_searched_numbers_that_vary_name_lines(path: Path, tmp_path: Path) -> None:
    names = settings(snapshot(path))
    assert names == [name for name in HYPERPARAMETERS if name in fake_store.SPEC.search]
    assert settings(of(tmp_path, Course(1e-4, 0.05, 4.0))) == []


def test_a_beta_that_only_a_fork_changed_names_lines_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    store = fake_store.build(path, courses=(Course(1e-4, 0.05, 4.0),))
    fork(store, STUDY, 1, 0, 6, kl_coef=0.2)
    change(path, "UPDATE ppo_trials SET params = json_remove(params, '$.kl_coef') WHERE number = 0")
    change(path, "UPDATE ppo_trials SET episodes = 1920")
    assert settings(snapshot(path)) == ["kl_coef"]
    app = page("curves", path, monkeypatch, study=STUDY)
    next(button for button in app.button if button.label == "KL by β").click()
    assert run(app).selectbox(key="by").value == "kl_coef"


def test_a_value_that_is_no_number_is_never_in_a_chart(tmp_path: Path) -> None:
    of(tmp_path, Course(1e-4, 0.05, 4.0))
    fake_store.build(tmp_path / "other.db", courses=(Course(1e-4, "<b>x</b>", 4.0),)).close()  # type: ignore[arg-type]
    row = snapshot(tmp_path / "other.db").view.trials[0]
    assert analysis.name(row, "kl_coef") == ""


def test_a_named_line_carries_its_setting_at_its_end_and_in_the_tooltip(path: Path) -> None:
    now = snapshot(path)
    frame = data.curves(data.open_store(f"sqlite:///{path}"), now, (KL,))
    drawing = Drawing("episodes", by="kl_coef")
    named = curve(frame, now.trials, KL, looks=style.looks((3,)), drawing=drawing, levels={}, names={3: "β 0.032"})
    [line] = [series for series in named["series"] if series.get("name") == "Trial 3: β 0.032"]
    labels = [series["endLabel"]["formatter"] for series in named["series"] if "endLabel" in series]
    assert labels == ["3: β 0.032"]
    pruned = curve(frame, now.trials, KL, looks=style.looks((2,)), drawing=drawing, levels={}, names={2: "β 0.011"})
    [mark] = [
        point
        for series in pruned["series"]
        if series["name"] == "pruned"
        for point in series["data"]
        if point["name"] == "Trial 2"
    ]
    assert mark["label"]["formatter"].startswith("{number|2: β 0.011}")
    assert line["encode"]["y"] == "Trial 3: β 0.032"
    assert named["grid"]["right"] == 90


def test_one_click_on_the_curves_shows_kl_by_beta(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page("curves", path, monkeypatch, study=STUDY)
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


def test_a_study_with_one_beta_has_no_such_button(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of(tmp_path, Course(1e-4, 0.05, 4.0))
    app = page("curves", tmp_path / "store.db", monkeypatch, study=STUDY)
    assert [button.label for button in app.button if "β" in button.label] == []
    assert app.multiselect(key="trial").value == []

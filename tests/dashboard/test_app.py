"""The whole page on real stores, run by Streamlit's AppTest: what it says, and that nothing raises."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import untrusted
from tests.dashboard import fake_store
from tests.dashboard.fake_store import HOSTILE, STUDY, Course
from tuner.status import Status
from tuner.store import Store
from tuner.store.schema import SCHEMA_VERSION

APP = Path(__file__).parents[2] / "dashboard" / "app.py"
GOOD = Course(1e-4, 0.05, 4.0, batch=128)
FAILED = Course(1e-4, 0.05, 4.0, Status.FAILED, batch=128, ends_at=4)

Page = Callable[[Path], AppTest]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole fake study, which no test changes."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    fake_store.build(path).close()
    return path


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """Return the page on a store, not run yet."""

    def on(path: Path) -> AppTest:
        monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{path}")
        return AppTest.from_file(APP, default_timeout=60)

    return on


def run(app: AppTest) -> AppTest:
    app.run()
    assert not app.exception
    return app


def subheaders(app: AppTest) -> list[str]:
    return [element.value for element in app.subheader]


def texts(app: AppTest) -> list[str]:
    return [element.value for element in app.text]


def cards(app: AppTest) -> dict[str, tuple[str, str]]:
    return {metric.label: (metric.value, metric.delta) for metric in app.metric}


def kinds_with(app: AppTest, marker: str) -> set[str]:
    """The kinds of elements that hold `marker` anywhere in what is sent to the browser."""
    return {node.type for node in app.main if node.type != "main" and marker in str(node.proto)}


# A study


def test_a_study_is_shown_whole(built: Path, page: Page) -> None:
    app = run(page(built))
    assert subheaders(app) == [
        "KL from the reference policy",
        "Eval reward",
        "Score",
        "Trials",
        "Reward against KL",
        "Samples on the same prompts",
    ]
    assert cards(app) == {
        "Trials ended": ("13 of 14", "1 interrupted"),
        "Best in the budget": ("1.72", "trial 7, +1.30 on SFT"),
        "Its KL": ("9.0 nats", "budget 10 nats"),
        "Pruned for KL": ("2", "1 failed"),
    }
    assert [chart.key for chart in app.get("echarts_chart")] == [
        "objective/kl_exact curves",
        "eval/reward curves",
        "objective/scores curves",
    ]
    assert len(app.get("plotly_chart")) == 1
    assert app.dataframe[0].value["number"].tolist() == list(range(14))
    assert ":material/stop_circle: not running" in app.markdown[0].value
    assert texts(app)[0].startswith("Task reviews, begun ")
    assert app.query_params["study"] == STUDY


def test_a_running_study_says_so(tmp_path: Path, page: Page) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD, fake_store.COURSES[13]), held=True)
    app = run(page(tmp_path / "store.db"))
    assert ":material/play_arrow: running" in app.markdown[0].value
    assert "last sign of life" in texts(app)[0]
    assert cards(app)["Trials ended"] == ("1 of 14", "1 running")


def test_chosen_trials_are_tabled_and_compared(built: Path, page: Page) -> None:
    app = run(page(built))
    app.multiselect(key="trial").set_value([2, 8])
    run(app)
    assert app.dataframe[0].value["number"].tolist() == [2, 8]
    assert [html.body.split("<b>")[1].split("</b>")[0] for html in app.get("html")][:2] == ["Trial 2", "Trial 8"]


def test_a_link_shows_what_it_names(built: Path, page: Page) -> None:
    app = page(built)
    app.query_params.update({"study": STUDY, "trial": ["2"], "axis": "episodes", "scale": "log"})
    run(app)
    assert app.multiselect(key="trial").value == [2]
    assert app.dataframe[0].value["number"].tolist() == [2]
    spec = json.loads(app.get("echarts_chart")[0].proto.spec)
    assert (spec["xAxis"]["name"], spec["yAxis"]["type"]) == ("Episodes", "log")


def test_a_link_to_a_study_that_is_gone_shows_the_latest_and_says_so(built: Path, page: Page) -> None:
    app = page(built)
    app.query_params["study"] = "gone"
    run(app)
    assert [warning.value for warning in app.warning] == [
        "The study in the link is not in this store; this is its latest one."
    ]
    assert app.query_params["study"] == STUDY
    assert len(app.dataframe) == 1


def test_the_band_of_many_trials_is_explained_where_it_is_drawn(tmp_path: Path, page: Page) -> None:
    few = run(page_of(tmp_path / "few.db", page, (GOOD,) * 2))
    many = run(page_of(tmp_path / "many.db", page, (GOOD,) * 28))
    assert "grey band" not in few.caption[0].value
    assert "The grey band holds the middle 80% of the other trials." in many.caption[0].value
    assert "Other trials" in many.get("echarts_chart")[0].proto.spec


def page_of(path: Path, page: Page, courses: tuple[Course, ...]) -> AppTest:
    fake_store.build(path, courses=courses).close()
    return page(path)


@pytest.mark.parametrize("when", ["before training", "halfway", "last"])
def test_samples_are_shown_at_the_chosen_evaluation(built: Path, page: Page, when: str) -> None:
    app = page(built)
    app.query_params.update({"trial": ["0"], "when": when})
    run(app)
    step = {"before training": 0, "halfway": 18, "last": 30}[when]
    told = [caption.value for caption in app.caption if "· step" in caption.value]
    assert len(told) == 3
    assert all(caption.endswith(f"step {step}") for caption in told)


def tokens_on(app: AppTest, trial: int, reading: str) -> AppTest:
    app.query_params.update({"trial": [str(trial)], "tokens": reading})
    return run(app)


def test_tokens_are_shown_by_the_chosen_reading(built: Path, page: Page) -> None:
    app = tokens_on(page(built), 0, "log-ratio")
    shown = app.dataframe[1].value  # below the table of trials
    assert len(app.dataframe) == 4
    assert list(shown.columns) == ["token", "log-ratio", "KL", "advantage", "value", "log-prob"]
    response = next(text for text in texts(app) if text.endswith("says so ."))
    assert shown["token"].tolist() == response.split()
    assert shown["KL"].is_monotonic_increasing
    app.segmented_control(key="tokens").set_value(None)
    assert len(run(app).dataframe) == 1


@pytest.mark.parametrize(
    ("trial", "reading", "said"),
    [
        (3, "KL", "no token readings of this sample"),
        (4, "advantage", "no advantage of its tokens: this trial has no critic"),
    ],
)
def test_tokens_that_are_not_known_are_said(built: Path, page: Page, trial: int, reading: str, said: str) -> None:
    app = tokens_on(page(built), trial, reading)
    assert len(app.dataframe) == 1
    assert [caption.value for caption in app.caption].count(said) == 3


# Few or no trials


def test_a_study_without_trials_says_what_to_wait_for(tmp_path: Path, page: Page) -> None:
    app = run(page_of(tmp_path / "store.db", page, ()))
    assert subheaders(app) == ["No trials yet"]
    assert [code.value for code in app.code] == ["ppo-tuner run STUDY.toml"]
    assert not app.get("echarts_chart") and not app.dataframe


def test_one_trial_is_enough(tmp_path: Path, page: Page) -> None:
    app = run(page_of(tmp_path / "store.db", page, (GOOD,)))
    assert cards(app)["Best in the budget"][0] == "1.40"
    assert len(app.get("echarts_chart")) == 3
    assert len(app.get("plotly_chart")) == 1


def test_one_step_is_enough(tmp_path: Path, page: Page) -> None:
    begun = Course(1e-4, 0.05, 4.0, Status.RUNNING, ends_at=0)
    app = run(page_of(tmp_path / "store.db", page, (begun,)))
    assert cards(app)["Trials ended"] == ("0 of 14", "1 interrupted")
    assert cards(app)["Best in the budget"] == ("–", "no trial within it yet")
    assert [info.value for info in app.info] == [
        "No trial has a value yet: it comes with the end of the first trial that evaluated."
    ]


def test_a_chosen_trial_that_has_not_begun_is_said(tmp_path: Path, page: Page) -> None:
    app = page_of(tmp_path / "store.db", page, (GOOD,))
    app.query_params["trial"] = ["9"]
    run(app)
    assert [info.value for info in app.info] == [
        "None of the chosen trials has begun yet.",
        "These trials have no samples yet: they come with a trial's first evaluation.",
    ]


def test_where_all_failed_the_reasons_are_shown(tmp_path: Path, page: Page) -> None:
    app = run(page_of(tmp_path / "store.db", page, (FAILED, FAILED)))
    [error] = app.error
    assert error.value.startswith("Every trial that ended has failed")
    assert app.dataframe[0].value["reason"].str.contains("CUDA out of memory").all()
    assert cards(app)["Pruned for KL"] == ("0", "2 failed")


def test_where_no_trial_is_within_the_budget_a_way_on_is_told(tmp_path: Path, page: Page) -> None:
    app = run(page_of(tmp_path / "store.db", page, (Course(1e-3, 0.01, 13.0, batch=128),) * 14))
    [warning] = app.warning
    assert warning.value.startswith("No trial ended within the KL budget.")
    assert cards(app)["Best in the budget"] == ("–", "no trial within it yet")


# No store, or none that can be shown


def test_without_a_store_the_first_command_is_told(tmp_path: Path, page: Page) -> None:
    app = run(page(tmp_path / "none.db"))
    assert subheaders(app) == ["No store yet"]
    assert texts(app) == [f"there is no store at {tmp_path}/none.db yet; `ppo-tuner demo` makes one"]
    assert [code.value for code in app.code] == ["ppo-tuner demo"]
    assert not (tmp_path / "none.db").exists()


def test_an_empty_store_says_how_to_start(tmp_path: Path, page: Page) -> None:
    Store.open(f"sqlite:///{tmp_path}/store.db", create=True).close()
    app = run(page(tmp_path / "store.db"))
    assert subheaders(app) == ["No studies yet"]
    assert [code.value for code in app.code] == ["ppo-tuner demo", "ppo-tuner run STUDY.toml"]


def foreign(path: Path) -> None:
    change(path, "CREATE TABLE theirs (x)")


def garbage(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 100)


def other_version(path: Path) -> None:
    fake_store.build(path, courses=()).close()
    change(path, "UPDATE ppo_meta SET value = '99' WHERE key = 'schema_version'")


def damaged(path: Path) -> None:
    fake_store.build(path, courses=(GOOD,)).close()
    change(path, "DROP TABLE ppo_steps")


def change(path: Path, statement: str, *values: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement, values)
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (foreign, "holds no PPO Tuner store"),
        (garbage, "is no SQLite database"),
        (other_version, f"has schema version 99; this PPO Tuner reads version {SCHEMA_VERSION}"),
        (damaged, "no such table: ppo_steps"),
    ],
)
def test_a_database_that_cannot_be_shown_is_said(
    tmp_path: Path, page: Page, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(tmp_path / "store.db")
    app = run(page(tmp_path / "store.db"))
    assert [name for name in subheaders(app) if "cannot" in name] == ["This store cannot be shown"]
    assert sum(said in text for text in texts(app)) == 1


def test_a_store_that_appears_is_shown_at_the_next_look(tmp_path: Path, page: Page) -> None:
    app = run(page(tmp_path / "store.db"))
    fake_store.build(tmp_path / "store.db", courses=(GOOD,)).close()
    app.button(key="again No store yet").click()
    run(app)
    assert "Trials" in subheaders(app)


def test_a_study_of_another_version_is_said_and_the_others_stay_open(tmp_path: Path, page: Page) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=(GOOD,), name="fine").close()
    fake_store.build(path, courses=(), name="other").close()
    change(path, "UPDATE ppo_studies SET spec = json_set(spec, '$.task', ?) WHERE name = 'other'", "gone")
    app = run(page(path))
    assert subheaders(app) == ["This study cannot be shown"]
    assert any("gone" in text for text in texts(app))
    app.selectbox(key="study").set_value("fine")
    run(app)
    assert "Trials" in subheaders(app)


# Text from outside


def test_hostile_samples_are_shown_literally_and_nowhere_interpreted(built: Path, page: Page) -> None:
    app = page(built)
    app.query_params["trial"] = ["2"]
    run(app)
    assert untrusted.visible(HOSTILE) in texts(app)
    assert kinds_with(app, "<script>") == {"text"}
    assert kinds_with(app, "<b>the new phone</b>") == {"text"}
    assert kinds_with(app, "<b>brief</b>") == {"text"}
    assert sum("<b>brief</b> -0.10" in text for text in texts(app)) == 3


def test_hostile_tokens_stand_in_a_tables_cells_alone(built: Path, page: Page) -> None:
    app = tokens_on(page(built), 2, "KL")
    assert kinds_with(app, "<script>") == {"text", "dataframe"}
    words = [untrusted.cell(word) for word in HOSTILE.split()]
    assert app.dataframe[1].value["token"].tolist() == words
    assert "⟨U+202E⟩txt.exe⟨U+202C⟩" in words


def test_hostile_names_and_reasons_are_shown_literally(tmp_path: Path, page: Page) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=(fake_store.COURSES[2], FAILED)).close()
    evil = "<script>x</script> **b** \u202e"
    change(path, "UPDATE ppo_studies SET name = ?", evil)
    change(path, "UPDATE ppo_trials SET reason = json_set(reason, '$.rule', ?, '$.message', ?)", evil, evil)
    change(path, "UPDATE ppo_samples SET prompt = ?, response = ?", evil, evil)
    app = run(page(path))
    assert kinds_with(app, "<script>") == {"text", "dataframe", "selectbox"}
    assert untrusted.visible(evil) in texts(app)
    assert app.selectbox(key="study").options == [untrusted.one_line(evil)]
    assert app.dataframe[0].value["reason"].tolist() == [untrusted.cell(evil)] * 2


def test_the_pages_own_html_holds_no_text_from_the_store(built: Path, page: Page) -> None:
    bodies = [html.body for html in run(page(built)).get("html")]
    assert bodies[0] == (
        '<div style="border-top: 3px solid #0072B2; padding-top: 0.3rem"><b>Trial 0</b> ✓ completed</div>'
    )
    assert len(bodies) == 9

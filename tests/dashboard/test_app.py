"""The overview on real stores, run by Streamlit's AppTest: what they say, and that nothing raises."""

import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import data, safe_text
from dashboard.views import common, overview, trials_table
from dashboard.views import curves as curves_page
from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import STUDY, Course
from tests.dashboard.shown import (
    FAILED,
    GOOD,
    Page,
    cards,
    change,
    charts,
    fork,
    kinds_with,
    page_of,
    run,
    subheaders,
    texts,
)
from tests.waiting import SECONDS
from tuner.judge.answer import of_study
from tuner.judge.results import StudyView
from tuner.store import Lease, Store
from tuner.store.schema import SCHEMA_VERSION
from tuner.study.status import Role, Status

pytestmark = pytest.mark.slow

APP = Path(__file__).parents[2] / "dashboard" / "pages.py"


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake study with a budget; no test changes it."""
    path = tmp_path_factory.mktemp("bounded") / "store.db"
    fake_store.build_bounded(path).close()
    return path


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """Return the app on a store, not run yet: its first page is the overview."""

    def on(path: Path) -> AppTest:
        monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{path}")
        return AppTest.from_file(APP, default_timeout=SECONDS)

    return on


# A study


def table_of_trials(app: AppTest) -> pd.DataFrame:
    """The table of trials."""
    return table_with(app, "line")


def table_with(app: AppTest, column: str) -> pd.DataFrame:
    """The table that has a column of this name."""
    [found] = [table.value for table in app.dataframe if column in table.value]
    return found


def test_a_study_is_shown_whole(built: Path, page: Page) -> None:
    app = run(page(built))
    assert subheaders(app) == ["Best so far", "Next steps", "Training KL", "Eval reward", "Unfinished trials", "Trials"]
    assert charts(app) == ["objective/kl_exact curves", "eval/reward curves"]
    assert cards(app) == {
        "Trials ended": ("13 of 14", "1 interrupted"),
        "Pruned for KL": ("2", "1 other pruned, 1 failed"),
        "Highest value": ("1.739", "one seed, +1.319 over SFT"),
        "Its KL": ("9.56 nats", "budget 10, end 11.9"),
        "Device time": ("4 min", "19 s per ended trial"),
    }
    assert next(card.help for card in app.metric if card.label == "Device time").endswith("trials took 16% of it.")
    said = [one.value for one in (*app.markdown, *app.text)]
    assert "**Trial 9, step 18**" in said and ":orange-badge[one seed]" in said
    assert any(one.startswith("Best in budget, one seed: eval reward 1.739 ± 0.035 at KL 9.56 ± ") for one in said)
    assert {"Nothing yet: trial 9 leads.", "The search is not finished."} <= set(said)
    [changed] = [one.value for one in app.caption if one.value.startswith("Changed from the reference: ")]
    assert r"Policy learning rate **0\.00036** (was 0\.0001)" in changed
    others = "Of the other 13 trials, 12 so far: 8 completed, 2 ended by the guard (KL over the limit), 1 failed, 1 ended by the guard (Not a number)."
    assert others in [one.value for one in app.caption]
    links = [link.proto.label for link in app.get("page_link")]
    assert links[:4] == ["Open trial 9", "Open trial 6", "Open trial 8", "Open trial 10"]
    commands = [code.value for code in app.code]
    assert f"ppo-tuner train --from reviews 9 --storage sqlite:///{built}" in commands
    assert table_of_trials(app)["number"].tolist() == [9, 7, 6, 11, 5, 10, 12, 4, 3, 2, 0, 1, 8, 13], "by value"
    notes = table_of_trials(app).set_index("number")["note"]
    assert {number: note for number, note in notes.items() if note} == {
        0: "reference",
        2: "Training KL was over 15 nats per response for 3 steps: 29.4 at step 13",
        6: "Training KL was over 15 nats per response for 3 steps: 27 at step 23",
        8: "'=cmd() CUDA out of memory: 9.1 GiB asked for, 3.2 GiB free",
        9: "to launch, best in the search, ends over budget",
        10: "Training KL (objective/kl_exact) was not a number at step 14",
    }
    assert ":material/stop_circle: not running" in app.markdown[0].value
    assert texts(app)[0].startswith("reviews: 13 of 14 trials ended. Updated ")
    assert app.text[0].help.startswith("Task reviews")
    assert "No controller is running" in app.text[0].help
    assert [warning.value for warning in app.warning] == ["No controller runs this study. To resume it:"]
    assert app.query_params["study"] == STUDY


def test_a_study_with_a_budget_says_what_it_was_spent_on_and_what_it_found(bounded: Path, page: Page) -> None:
    app = run(page(bounded))
    assert cards(app) == {
        "Trials ended": ("13", "1 paused, 1 interrupted"),
        "Search budget": ("11.4 of 14 full trials", ""),
        "Pruned for KL": ("2", "1 failed"),
        "Highest value": ("1.744", "one seed, +1.324 over SFT"),
        "Its KL": ("9.68 nats", "budget 10, end 14.5"),
        "Device time": ("5 min", "22 s per ended trial"),
    }
    told = app.text[0].help.replace("\\", "")
    assert "A trial's value is the eval reward of the best checkpoint within the KL budget." in told
    assert "best so far" not in charts(app), "it reads every evaluation, so it waits until it is opened"
    app.session_state["cost"] = True
    spent = table_with(run(app), "on")
    assert set(spent["on"]) == {"completed", "pruned", "failed", "paused", "interrupted"}
    assert spent["share"].sum() == pytest.approx(100)
    assert charts(app)[-1] == "best so far"


def test_the_table_of_trials_says_where_a_value_is_from(bounded: Path, page: Page) -> None:
    app = run(page(bounded))
    shown = table_of_trials(app).set_index("number")
    assert shown["note"][5] == "to launch, best in the search, ends over budget" and shown["note"][7] == ""
    assert shown["status"].loc[[0, 1, 2]].tolist() == ["✓ completed", "✓ completed", "✕ pruned"]
    assert shown["status"][13] == "‖ paused"
    assert shown["end_reward"][5] > shown["value"][5]
    assert shown["end_kl"][5] == pytest.approx(14.51, abs=0.01)
    assert shown["note"][2].startswith("Training KL was over 60 nats"), "a reason is in sight"
    assert math.isnan(shown["value"][2]) and math.isnan(shown["kl"][2]), "no trained checkpoint is within the budget"
    [heading] = [heading for heading in app.subheader if heading.value == "Trials"]
    assert "Value and KL are of a trial's best checkpoint within the KL budget" in heading.help


def test_what_to_launch_is_worked_out_once_for_the_card_and_the_table_of_a_large_study(
    built: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(trials_table, "MOST_LIVE", 1)
    monkeypatch.setattr(overview, "of_study", lambda store, view: (calls.append(view), of_study(store, view))[1])
    app = run(page(built))
    assert len(calls) == 1
    assert table_of_trials(app).set_index("number")["note"][9].startswith("to launch")


def test_a_running_study_says_so(tmp_path: Path, page: Page) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD, fake_store.COURSES[13]), held=True)
    app = run(page(tmp_path / "store.db"))
    assert ":material/play_arrow: running" in app.markdown[0].value
    assert "Live pages refresh every 2 s" in app.text[0].help and "Its controller is process" in app.text[0].help
    assert cards(app)["Trials ended"] == ("1 of 14", "1 running")
    assert any("healthy" in markdown.value for markdown in app.markdown)


def test_while_the_first_trial_runs_the_page_names_it_as_the_one_that_leads(tmp_path: Path, page: Page) -> None:
    with closing(fake_store.build(tmp_path / "store.db", courses=(fake_store.COURSES[13],), held=True)):
        said = [info.value for info in run(page(tmp_path / "store.db")).info]
    assert any(text.startswith("No trial has ended yet. Trial 0 leads: value ") for text in said)
    assert "The first trials are running: nothing to do." in said


def test_what_is_stopping_or_queued_says_so(tmp_path: Path, page: Page) -> None:
    path, live = tmp_path / "store.db", fake_store.COURSES[13]
    with closing(fake_store.build(path, courses=(live, live, live), held=True)) as store:
        store.show_stopping(Lease(store.study(STUDY).id, 1))
        change(path, "UPDATE ppo_trials SET wanted = 'stop' WHERE number = 0")
        change(path, "UPDATE ppo_trials SET status = 'waiting' WHERE number = 2")
        change(path, "DELETE FROM ppo_steps WHERE trial_id = (SELECT id FROM ppo_trials WHERE number = 2)")
        app = run(page(path))
    assert ":material/stop: stopping" in app.markdown[0].value
    assert [cell.split()[1] for cell in table_of_trials(app)["status"]] == ["stopping", "running", "waiting"]
    assert any("queued " in text and "started" not in text for text in texts(app))


def test_a_paused_study_says_what_to_do(tmp_path: Path, page: Page) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=(GOOD,)).close()
    change(path, "UPDATE ppo_studies SET paused_at = 1")
    assert f"ppo-tuner resume reviews --storage sqlite:///{path}" in [code.value for code in run(page(path)).code]


def test_a_fork_says_so_and_searched_values_are_in_sight(tmp_path: Path, page: Page) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(GOOD,))
    fork(store, STUDY, 1, 0, 6)
    app = run(page(tmp_path / "store.db"))
    shown = table_of_trials(app)
    assert shown["note"].tolist() == ["to launch, reference, best in the search", "fork of 0"]
    [drawn] = [table for table in app.dataframe if "line" in table.value]
    widths = json.loads(drawn.proto.columns)
    before = list(shown.columns)[: list(shown.columns).index("params_learning_rate")]
    assert before[:4] == ["number", "status", "value", "kl"]
    assert sum(widths[name]["width"] for name in before[:4]) <= 300, "a phone 390 pixels wide has room for them"
    assert sum(widths[name]["width"] for name in before) < 800, "a page 1,400 pixels wide has room for some more"


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        (["pruned"], [2, 6, 10]),
        (["completed", "pruned"], [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]),
        (["completed", "fixed β"], [0, 1, 3, 5, 7, 9, 12]),
        (["ends within the KL budget"], [0, 1, 3, 4, 5, 7, 11, 12]),
    ],
)
def test_the_table_shows_the_trials_that_pass_its_filters(
    built: Path, page: Page, filters: list[str], numbers: list[int]
) -> None:
    app = page(built)
    app.query_params["show"] = filters
    assert sorted(table_of_trials(run(app))["number"]) == numbers


def test_a_trial_ends_within_the_budget_only_with_its_error(tmp_path: Path, page: Page) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD, GOOD)).close()
    change(tmp_path / "store.db", "UPDATE ppo_trials SET end_kl = 9.9, end_kl_se = 0.2 WHERE number = 1")
    app = page(tmp_path / "store.db")
    app.query_params["show"] = ["ends within the KL budget"]
    assert table_of_trials(run(app))["number"].tolist() == [0]


def test_a_link_to_a_study_that_is_gone_shows_the_latest_and_says_so(built: Path, page: Page) -> None:
    app = page(built)
    app.query_params["study"] = "gone"
    run(app)
    assert app.warning[0].value == "The study in the link is not in this store; this is its latest one."
    assert app.query_params["study"] == STUDY


# Few or no trials


def test_a_study_without_trials_says_what_to_wait_for(tmp_path: Path, page: Page) -> None:
    app = run(page_of(tmp_path / "store.db", page, ()))
    assert subheaders(app) == ["No trials yet"]
    assert [code.value for code in app.code] == [f"ppo-tuner run reviews --storage sqlite:///{tmp_path}/store.db"]
    assert len(app.dataframe) == 0


def of_each_tab(curves: Page, path: Path) -> list[int]:
    """The number of charts on each tab of the curves."""
    found = []
    for tab in curves_page.VIEWS:
        app = curves(path)
        app.query_params["view"] = tab
        found.append(len(charts(run(app))))
    return found


@pytest.mark.parametrize("course", [GOOD, FAILED])
def test_one_trial_is_enough(tmp_path: Path, page: Page, curves: Page, course: Course) -> None:
    app = run(page_of(tmp_path / "store.db", page, (course,)))
    assert cards(app).get("Highest value", ("–",))[0] == ("1.421" if course is GOOD else "–")
    assert of_each_tab(curves, tmp_path / "store.db") == [3, 0]


def test_where_all_failed_the_reasons_are_shown(tmp_path: Path, page: Page) -> None:
    app = run(page_of(tmp_path / "store.db", page, (FAILED, FAILED)))
    [error] = app.error
    assert error.value.startswith("Every trial that ended has failed")
    assert table_of_trials(app)["note"].str.contains("CUDA out of memory").all()
    assert cards(app)["Pruned for KL"] == ("0", "2 failed")


def test_where_no_trial_is_within_the_budget_a_way_on_is_told(tmp_path: Path, page: Page) -> None:
    app = run(page_of(tmp_path / "store.db", page, (Course(1e-3, 0.01, 400.0, Status.PRUNED, batch=128),) * 14))
    assert any(
        warning.value.startswith("No checkpoint of any trial was evaluated within the KL budget.")
        for warning in app.warning
    )
    assert "Highest value" not in cards(app)


# No store, or none that can be shown


def commands(app: AppTest, path: Path) -> list[str]:
    """Return the words of the `ppo-tuner` commands on the store at `path`."""
    where = f" --storage sqlite:///{path}"
    ours = [code.value for code in app.code if code.value.startswith("ppo-tuner ") and code.value.endswith(where)]
    return [command.removeprefix("ppo-tuner ").removesuffix(where) for command in ours]


def test_without_a_store_the_first_command_is_told(tmp_path: Path, page: Page) -> None:
    app = run(page(tmp_path / "none.db"))
    assert subheaders(app) == ["No store yet"]
    assert texts(app) == [f'no store at {tmp_path}/none.db; "ppo-tuner run" creates it, or name another with --storage']
    assert commands(app, tmp_path / "none.db") == ["demo", "estimate my-study.toml", "run my-study.toml"]
    assert [one.value for one in app.caption] == ["Try the demo", "Your own study: copy, estimate, run"]
    assert not (tmp_path / "none.db").exists()


def test_an_empty_store_says_how_to_start(tmp_path: Path, page: Page) -> None:
    Store.open(f"sqlite:///{tmp_path}/store.db", create=True).close()
    app = run(page(tmp_path / "store.db"))
    assert subheaders(app) == ["No studies yet"]
    assert commands(app, tmp_path / "store.db") == ["demo", "estimate my-study.toml", "run my-study.toml"]


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


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (foreign, "is not a PPO Tuner store"),
        (garbage, "failed: file is not a database"),
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


def test_a_study_of_another_version_is_said_and_the_others_stay_open(
    tmp_path: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=(GOOD,), name="fine").close()
    fake_store.build(path, courses=(), name="other").close()
    change(path, "UPDATE ppo_studies SET spec = json_set(spec, '$.seed', ?) WHERE name = 'other'", "gone")
    app = run(page(path))
    assert subheaders(app) == ["This study cannot be shown"]
    assert any("gone" in text for text in texts(app))
    app.selectbox(key="study").set_value("fine")
    run(app)
    assert "Trials" in subheaders(app)
    every = shown.page("studies", path, monkeypatch, study="fine")
    assert sorted(table_with(every, "state")["state"]) == ["not readable", "✓ finished"]


# Text from outside


def test_hostile_names_and_reasons_are_shown_literally(tmp_path: Path, page: Page) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=(fake_store.COURSES[2], FAILED)).close()
    evil = "<script>x</script> **b** \u202e"
    change(path, "UPDATE ppo_studies SET name = ?", evil)
    change(path, "UPDATE ppo_trials SET reason = json_set(reason, '$.rule', ?, '$.message', ?)", evil, evil)
    change(path, "UPDATE ppo_samples SET prompt = ?, response = ?", evil, evil)
    app = run(page(path))
    assert kinds_with(app, "<script>") == {"dataframe", "text", "code"}
    assert any(safe_text.one_line(evil) in text for text in texts(app))
    assert app.selectbox(key="study").options == [safe_text.one_line(evil)]
    assert table_of_trials(app)["note"].tolist() == [
        f"to launch, reference, best in the search; {safe_text.cell(evil)}",
        safe_text.cell(evil),
    ]


def test_a_link_to_what_a_study_does_not_have_is_answered(built: Path, page: Page) -> None:
    app = page(built)
    app.query_params.update({"trial": ["2", "99", "abc"], "budget": "-3"})
    run(app)
    assert [warning.value for warning in app.warning][:2] == [
        "The link names trial 99, abc, which this study does not have.",
        "The link names a KL budget of \\-3; this study allows 0.1 to 20.",
    ]
    good = page(built)
    good.query_params.update({"trial": ["2"], "budget": "8"})
    assert not any("The link names" in warning.value for warning in run(good).warning)


# The status line's bar, and the tab's title


def test_the_time_left_is_by_what_the_search_took_so_far() -> None:
    """A quarter took 600 device-seconds, so the rest takes 1,800: on two workers 15 minutes."""
    rows = [SimpleNamespace(seconds=200.0, role=Role.SEARCH)] * 3 + [SimpleNamespace(seconds=9e9, role=Role.CONFIRM)]

    def left(done: float, workers: int | None) -> str:
        view = SimpleNamespace(tally=SimpleNamespace(done=done), trials=rows, row=SimpleNamespace(workers=workers))
        return common.time_left(cast(StudyView, view))

    assert left(0.25, 2) == "About 15 min left"
    assert left(0.25, None) == "About 30 min left"
    assert (left(0.01, 1), left(1.0, 1)) == ("Time left: not known yet", "About to end")


def test_the_tab_says_the_state_and_how_often_the_guard_stopped_a_trial(built: Path) -> None:
    view = data.snapshot(data.open_store(f"sqlite:///{built}"), STUDY).view
    assert common.tab_title(view) == "… ✕2 reviews - PPO Tuner"

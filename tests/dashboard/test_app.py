"""The overview on real stores, run by Streamlit's AppTest: what they say, and that nothing raises."""

import math
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import data, safe_text
from dashboard.views import answer, common, trials_table
from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import STUDY, Course
from tests.dashboard.shown import FAILED, GOOD, change, charts, fork, kinds_with, run, subheaders, texts
from tests.dashboard.shown import app as page
from tests.tuner import made_study
from tuner.confirm.answer import study_answer
from tuner.confirm.plan import Plan
from tuner.confirm.result import confirmations
from tuner.judge.results import StudyView, read_study
from tuner.store import Lease
from tuner.study.status import Role, Status

pytestmark = pytest.mark.slow

# A study


def table_of_trials(app: AppTest) -> pd.DataFrame:
    """The table of trials."""
    return table_with(app, "line")


def table_with(app: AppTest, column: str) -> pd.DataFrame:
    """The table that has a column of this name."""
    [found] = [table.value for table in app.dataframe if column in table.value]
    return found


def test_a_study_is_shown_whole(built: Path) -> None:
    app = page(built)
    assert subheaders(app)[:5] == [
        r"Nothing yet\: trial 9 leads\.", "Training KL", "Eval reward", "Unfinished trials", "Trials"
    ]  # fmt: skip
    assert charts(app) == ["three numbers", "objective/kl_exact curves", "eval/reward curves"]
    assert not app.metric, "each number has one place"
    assert "Best in budget, one seed: eval reward 1.739 ± 0.035" in app.subheader[0].help
    assert [code.value for code in app.code] == [f"ppo-tuner run reviews --storage sqlite:///{built}"], "one command"
    assert not app.warning, "the card says it"
    assert table_of_trials(app)["number"].tolist() == [9, 7, 6, 11, 5, 10, 12, 4, 3, 2, 0, 1, 8, 13], "by reward"
    notes = table_of_trials(app).set_index("number")["note"]
    assert {number: note for number, note in notes.items() if note} == {
        0: "reference",
        2: "Training KL was over 15 nats per response for 3 steps: 29.4 at step 13",
        6: "Training KL was over 15 nats per response for 3 steps: 27 at step 23",
        8: "'=cmd() CUDA out of memory: 9.1 GiB asked for, 3.2 GiB free",
        9: "the leader, ends over budget",
        10: "Training KL (objective/kl_exact) was not a number at step 14",
    }
    assert ":material/stop_circle: not running" in app.markdown[0].value
    assert texts(app)[0].startswith("13 of 14 trials ended")
    assert app.markdown[0].help.startswith("Task reviews")
    assert "No controller is running" in app.markdown[0].help
    assert app.query_params["study"] == STUDY


def test_what_a_study_was_spent_on_is_read_once_it_is_opened(bounded: Path) -> None:
    app = page(bounded)
    assert "best so far" not in charts(app), "it reads every evaluation"
    app.session_state["cost"] = True
    spent = table_with(run(app), "on")
    assert set(spent["on"]) == {"completed", "pruned", "failed", "paused", "interrupted"}
    assert spent["share"].sum() == pytest.approx(100)
    assert charts(app)[-1] == "best so far"


def test_the_table_of_trials_has_one_number_a_trial(bounded: Path) -> None:
    app = page(bounded)
    shown = table_of_trials(app).set_index("number")
    assert {"end_reward", "end_kl", "value_se", "value"} & set(shown) == set()
    assert (shown["reward"][5], shown["seeds"][5]) == (pytest.approx(1.744, abs=0.001), 0)
    assert shown["status"].loc[[0, 1, 2]].tolist() == ["✓ completed", "✓ completed", "✕ pruned"]
    assert shown["status"][13] == "‖ paused"
    assert shown["note"][2].startswith("Training KL was over 60 nats"), "a reason is in sight"
    assert math.isnan(shown["reward"][2]) and math.isnan(shown["reward_kl"][2]), "no trained one is within the budget"


def test_the_number_of_what_ran_on_fresh_seeds_is_their_mean(tmp_path: Path) -> None:
    store = fake_store.build_bounded(tmp_path / "store.db", courses=fake_store.BOUNDED_DONE)
    made_study.confirm(store, fake_store.BOUNDED, Plan(top=1, seeds=3))
    [confirmation] = confirmations(store, read_study(store, fake_store.BOUNDED))
    shown = table_of_trials(page(tmp_path / "store.db")).set_index("number")
    for one in confirmation.read:
        assert one.reward is not None and one.kl is not None
        numbers = shown.loc[one.trial.number, ["reward", "reward_kl", "seeds"]].tolist()
        assert numbers == pytest.approx([one.reward.mean, one.kl.mean, 3])


def test_what_to_launch_is_worked_out_once_for_card_and_table(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(trials_table, "MOST_LIVE", 1)
    monkeypatch.setattr(answer, "study_answer", lambda store, view: (calls.append(view), study_answer(store, view))[1])
    app = page(built)
    assert len(calls) == 1
    assert table_of_trials(app).set_index("number")["note"][9].startswith("the leader")


def test_a_running_study_says_so(tmp_path: Path) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD, fake_store.COURSES[13]), held=True)
    app = page(tmp_path / "store.db")
    assert ":material/play_arrow: running" in app.markdown[0].value
    about = app.markdown[0].help
    assert "Live pages refresh every 2 s" in about and "Its controller is process" in about
    assert texts(app)[0].startswith("1 of 14 trials ended")
    assert any("healthy" in markdown.value for markdown in app.markdown)


def test_what_is_stopping_or_queued_says_so(tmp_path: Path) -> None:
    path, live = tmp_path / "store.db", fake_store.COURSES[13]
    with closing(fake_store.build(path, courses=(live, live, live), held=True)) as store:
        store.update_study(Lease(store.study(STUDY).id, 1), stopping_at=time.time())
        change(path, "UPDATE ppo_trials SET wanted = 'stop' WHERE number = 0")
        change(path, "UPDATE ppo_trials SET status = 'waiting' WHERE number = 2")
        change(path, "DELETE FROM ppo_steps WHERE trial_id = (SELECT id FROM ppo_trials WHERE number = 2)")
        app = page(path)
    assert ":material/stop: stopping" in app.markdown[0].value
    assert [cell.split()[1] for cell in table_of_trials(app)["status"]] == ["stopping", "running", "waiting"]
    assert any("queued " in text and "started" not in text for text in texts(app))


def test_a_fork_says_so_and_searched_values_are_in_sight(tmp_path: Path) -> None:
    store = fake_store.build(tmp_path / "store.db", courses=(GOOD,))
    fork(store, STUDY, 1, 0, 6)
    shown = table_of_trials(page(tmp_path / "store.db"))
    assert shown["note"].tolist() == ["the answer, reference", "fork of 0"] and "params_learning_rate" in shown


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        (["pruned"], [2, 6, 10]),
        (["completed", "pruned"], [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]),
        (["completed", "fixed β"], [0, 1, 3, 5, 7, 9, 12]),
        (["within budget"], [0, 1, 3, 4, 5, 7, 11, 12]),
    ],
)
def test_the_table_shows_the_trials_that_pass_its_filters(built: Path, filters: list[str], numbers: list[int]) -> None:
    assert sorted(table_of_trials(page(built, show=filters))["number"]) == numbers


def test_a_trial_ends_within_the_budget_only_with_its_error(tmp_path: Path) -> None:
    fake_store.build(tmp_path / "store.db", courses=(GOOD, GOOD)).close()
    change(tmp_path / "store.db", "UPDATE ppo_trials SET end_kl = 9.9, end_kl_se = 0.2 WHERE number = 1")
    shown = table_of_trials(page(tmp_path / "store.db", show=["within budget"]))
    assert shown["number"].tolist() == [0]


def test_a_link_to_a_study_that_is_gone_shows_the_latest_and_says_so(built: Path) -> None:
    app = page(built, study="gone")
    assert app.warning[0].value == "The study in the link is not in this store; this is its latest one."
    assert app.query_params["study"] == STUDY


# Few or no trials


@pytest.mark.parametrize("course", [GOOD, FAILED])
def test_one_trial_is_enough(tmp_path: Path, course: Course) -> None:
    fake_store.build(tmp_path / "store.db", courses=(course,)).close()
    assert ("three numbers" in charts(page(tmp_path / "store.db"))) == (course is GOOD)
    assert len(charts(shown.page("curves", tmp_path / "store.db"))) == 3


def test_where_no_trial_is_within_the_budget_a_way_on_is_told(tmp_path: Path) -> None:
    fake_store.build(tmp_path / "store.db", courses=(Course(1e-3, 0.01, 400.0, Status.PRUNED, batch=128),) * 14).close()
    app = page(tmp_path / "store.db")
    assert any(code.value.startswith("ppo-tuner best reviews --kl-budget 20 ") for code in app.code)
    assert "three numbers" not in charts(app)


# No store, or none that can be shown


def test_a_store_that_appears_is_shown_at_the_next_look(tmp_path: Path) -> None:
    app = page(tmp_path / "store.db")
    fake_store.build(tmp_path / "store.db", courses=(GOOD,)).close()
    app.button(key="again No store yet").click()
    run(app)
    assert "Trials" in subheaders(app)


def test_a_study_of_another_version_is_said_and_the_others_stay_open(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=(GOOD,), name="fine").close()
    fake_store.build(path, courses=(), name="other").close()
    change(path, "UPDATE ppo_studies SET spec = json_set(spec, '$.seed', ?) WHERE name = 'other'", "gone")
    app = page(path)
    assert subheaders(app) == ["This study cannot be shown"]
    assert any("gone" in text for text in texts(app))
    app.selectbox(key="study").set_value("fine")
    run(app)
    assert "Trials" in subheaders(app)
    every = shown.page("studies", path, study="fine")
    assert sorted(table_with(every, "state")["state"]) == ["not readable", "✓ finished"]


# Text from outside


def test_hostile_names_and_reasons_are_shown_literally(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    fake_store.build(path, courses=(fake_store.COURSES[2], FAILED)).close()
    evil = "<script>x</script> **b** \u202e"
    change(path, "UPDATE ppo_studies SET name = ?", evil)
    change(path, "UPDATE ppo_trials SET reason = json_set(reason, '$.rule', ?, '$.message', ?)", evil, evil)
    change(path, "UPDATE ppo_samples SET prompt = ?, response = ?", evil, evil)
    app = page(path)
    assert kinds_with(app, "<script>") <= {"dataframe", "text", "code"}
    assert app.selectbox(key="study").options == [safe_text.one_line(evil)]
    assert table_of_trials(app)["note"].tolist() == [
        f"the answer, reference; {safe_text.cell(evil)}",
        safe_text.cell(evil),
    ]


def test_a_link_to_what_a_study_does_not_have_is_answered(built: Path) -> None:
    app = page(built, trial=["2", "99", "abc"], budget="-3")
    assert [warning.value for warning in app.warning][:2] == [
        "The link names trial 99, abc, which this study does not have.",
        "The link names a KL budget of \\-3; this study allows 0.1 to 20.",
    ]
    good = page(built, trial=["2"], budget="8")
    assert not any("The link names" in warning.value for warning in good.warning)


# The status line's bar, and the tab's title


def test_the_time_left_is_by_what_the_search_took_so_far() -> None:
    """A quarter took 600 device-seconds, so the rest takes 1,800: on two workers 15 minutes."""
    rows = [SimpleNamespace(seconds=200.0, role=Role.SEARCH)] * 3 + [SimpleNamespace(seconds=9e9, role=Role.CONFIRM)]

    def left(done: float, workers: int | None) -> str:
        view = SimpleNamespace(
            tally=SimpleNamespace(done=done), trials=rows, row=SimpleNamespace(workers=workers), confirming=()
        )
        return common.time_left(cast(StudyView, view))

    assert left(0.25, 2) == "≈ 15 min left"
    assert left(0.25, None) == "≈ 30 min left"
    assert (left(0.01, 1), left(1.0, 1)) == ("", "")


def test_the_tab_says_the_state_and_how_often_the_guard_stopped_a_trial(built: Path) -> None:
    view = data.snapshot(data.open_store(f"sqlite:///{built}"), STUDY).view
    assert common.tab_title(view) == "■ ✕2 reviews - PPO Tuner"

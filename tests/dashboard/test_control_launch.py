"""Launching on the control page: a study file, a form or a stored study, each after a confirmation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboard import access, launching
from dashboard.views import control_launch
from tests.dashboard import fake_store
from tests.dashboard.control_page import TOKEN, confirm, page, press, run, texts
from tests.dashboard.fake_store import STUDY
from tests.waiting import SECONDS
from tuner.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be started."""
    calls: list[dict[str, Any]] = []

    def note(kind: str) -> Callable[..., Any]:
        def start(_self: object, what: object, **how: Any) -> Any:
            access.require_launch(how["token"])
            calls.append({"kind": kind, "what": what, **how})
            return launching.Launched(how["key"], "made", 1, Path("made.log"), None)  # type: ignore[arg-type]

        return start

    for kind in ("launch_file", "launch_form", "launch_stored"):
        monkeypatch.setattr(launching.Launcher, kind, note(kind))
    return calls


def test_a_file_is_launched_after_a_confirmation(folder: Path, started: list[dict[str, Any]]) -> None:
    """There is no store yet."""
    (folder / "studies").mkdir()
    (folder / "studies" / "mine.toml").write_text(
        'name = "mine"\ntask = "reviews"\ntrials = 3\n[search]\nlearning_rate = "advised"\n'
    )
    app = page(part="Launch")
    assert app.selectbox(key="file").options == ["studies/mine.toml"]
    app.selectbox(key="file").set_value("studies/mine.toml")
    press(app, "Launch")
    assert "In the store already" not in texts(app)
    assert 'Study "mine", task reviews' in texts(app) and "Searched: learning_rate" in texts(app)
    assert started == []
    confirm(app)
    assert [(call["kind"], call["what"], call["token"]) for call in started] == [
        ("launch_file", "studies/mine.toml", TOKEN)
    ]


def control_then_overview() -> None:
    import streamlit as st

    from dashboard.views import control, overview

    (overview if st.session_state.get("elsewhere") else control).page()


def test_a_launched_study_is_the_chosen_one_once_it_is_stored(
    folder: Path, store: Store, started: list[dict[str, Any]]
) -> None:
    content = 'name = "made"\ntask = "reviews"\ntrials = 3\n[search]\nlearning_rate = "advised"\n'
    (folder / "made.toml").write_text(content)
    app = AppTest.from_function(control_then_overview, default_timeout=SECONDS)
    app.query_params.update({"study": STUDY, "token": TOKEN})
    run(app)
    app.segmented_control(key="part").set_value("Launch")
    run(app)
    app.selectbox(key="file").set_value("made.toml")
    press(app, "Launch")
    confirm(app)
    assert 'Study "made" is running' in texts(app) and "as soon as the store holds it" in texts(app)
    assert app.session_state["study"] == STUDY  # the new one is not stored yet
    store.create_study("made", {**fake_store.SPEC.to_dict(), "name": "made"})
    run(app)
    app.session_state["elsewhere"] = True
    run(app)
    assert app.selectbox(key="study").value == "made"


def test_a_file_of_a_stored_study_is_said_to_go_on_with_it(
    folder: Path, store: Store, started: list[dict[str, Any]]
) -> None:
    content = f'name = "{STUDY}"\ntask = "reviews"\ntrials = 6\n[search]\nlearning_rate = "advised"\n'
    (folder / "again.toml").write_text(content)
    app = page(part="Launch")
    app.selectbox(key="file").set_value("again.toml")
    press(app, "Launch")
    assert "In the store already, with 2 trials ended: this resumes it" in texts(app)


def test_a_file_elsewhere_is_refused_on_the_page(folder: Path, started: list[dict[str, Any]]) -> None:
    app = page(part="Launch")
    app.text_input(key="path").set_value("../mine.toml")
    press(app, "Launch")
    assert "expected a path below" in texts(app) and started == []


def test_a_form_is_built_from_the_declarations_and_launched(started: list[dict[str, Any]]) -> None:
    app = page(part="Launch", launch="From a form")
    searched = app.multiselect(key="searched reviews").value
    app.multiselect(key="searched reviews").set_value(["learning_rate", "num_ppo_epochs"])
    app.multiselect(key="fixed reviews").set_value(["whiten_rewards", "total_episodes"])
    run(app)
    assert "learning_rate" in searched
    app.text_input(key="new name").set_value("formed")
    app.text_input(key="low reviews learning_rate").set_value("2e-5")
    app.selectbox(key="fixed reviews whiten_rewards").set_value("true")
    app.text_input(key="fixed reviews total_episodes").set_value("640")
    app.multiselect(key="new warm starts").set_value(["instructgpt", "trl"])
    press(app, "Launch")
    assert "whiten_rewards = True" in texts(app)
    assert "First: instructgpt, trl\n" in texts(app)
    assert 'Note: start "trl": learning_rate 3e-06 moved to 2e-05' in texts(app)
    confirm(app)
    [call] = started
    content = call["what"]
    assert (content["name"], content["task"], content["budget"]) == ("formed", "reviews", 12)
    assert "trials" not in content, "as many as the budget allows"
    assert (content["strategy"], content["objective"]) == ("early_cut", "best")
    assert content["search"]["learning_rate"] == {"low": 2e-5, "high": 3e-3, "scale": "log"}
    assert list(content["search"]) == ["learning_rate", "num_ppo_epochs"]
    assert content["fixed"] == {"whiten_rewards": True, "total_episodes": 640}
    assert content["warm_start"] == ["instructgpt", "trl"]


def test_a_form_without_a_budget_says_its_trials_and_what_a_strategy_means(started: list[dict[str, Any]]) -> None:
    app = page(part="Launch", launch="From a form")
    app.text_input(key="new name").set_value("formed")
    app.text_input(key="new budget").set_value("")
    app.text_input(key="new trials").set_value("6")
    assert "asha: pauses trials at 1/10 and 3/10 of their episodes, and promotes the best third each time" in (
        app.selectbox(key="new strategy").options
    )
    app.selectbox(key="new strategy").set_value("asha")
    app.selectbox(key="new objective").set_value("end")
    press(app, "Launch")
    told = texts(app)
    assert "6 trials, KL budget 6 and limit 15" in told
    assert "Strategy asha: pauses trials" in told and "Objective end: the mean of" in told
    confirm(app)
    content = started[0]["what"]
    assert (content["trials"], content["strategy"], content["objective"]) == (6, "asha", "end")
    assert "budget" not in content


def test_what_a_study_may_spend_is_told() -> None:
    spec = fake_store.CUT_SPEC
    assert control_launch.extent_text(spec) == "A budget of 8 trials of full length"
    assert control_launch.extent_text(replace(spec, trials=30)) == (
        "A budget of 8 trials of full length in at most 30 trials"
    )


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("new budget", "0.5", "budget = 0.5 is not allowed; expected at least 1"),
        ("new budget", "", "budget or trials is missing"),
        ("new trials", "many", "trials = 'many' is not allowed; expected a number"),
        ("low reviews learning_rate", "1", "must be below high"),
        ("limit reviews", "1", "limit = 1 is below budget"),
        ("new name", "a b", "letters, digits, dots"),
    ],
)
def test_a_form_with_a_mistake_names_it(started: list[dict[str, Any]], key: str, value: str, told: str) -> None:
    app = page(part="Launch", launch="From a form")
    app.text_input(key="new name").set_value("formed")
    app.text_input(key=key).set_value(value)
    press(app, "Launch")
    assert told in texts(app) and started == []


def test_a_task_of_ones_own_is_not_even_read_without_the_token(folder: Path) -> None:
    (folder / "task.py").write_text("import pathlib\npathlib.Path('was-run').touch()\n")
    app = page("", part="Launch", launch="From a form")
    app.text_input(key="task path").set_value("task.py")
    run(app)
    assert "the token is missing" in texts(app) and not (folder / "was-run").exists()


def test_a_stored_study_is_run_again_from_its_page(store: Store, started: list[dict[str, Any]]) -> None:
    app = page(part="Steer")
    press(app, "study run")
    assert "ppo-tuner run reviews" in texts(app) and started == []
    confirm(app)
    assert [(call["kind"], call["what"]) for call in started] == [("launch_stored", "reviews")]


def test_a_server_beyond_this_machine_says_that_launching_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "is_local", lambda: False)
    app = page(part="Launch")
    assert app.info[0].value.startswith("Launching is off")
    assert st.get_option("server.address") in (None, "127.0.0.1")

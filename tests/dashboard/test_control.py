"""The control page: what it asks to be confirmed, what it places, once, and what it refuses."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboard import access, launching, steering, views
from dashboard.views import common, control, control_launch, control_parts
from ppo_core import checkpoint
from tests.dashboard import fake_store
from tests.dashboard.fake_store import HOSTILE, STUDY, Course
from tests.waiting import SECONDS
from tuner import study_folder
from tuner.environment import READ_ONLY_VARIABLE
from tuner.results import StudyView, read_study
from tuner.status import Origin, Role, Status
from tuner.store import Lease, NewTrial, Order, Store

pytestmark = pytest.mark.slow

TOKEN = "a token"
DONE = Course(1e-4, 0.05, 4.0, batch=128)
COURSES = (
    DONE,
    Course(2e-4, 0.05, 4.0, Status.FAILED, batch=128, ends_at=4),
    Course(3.0e-4, 5.2, 5.3, Status.RUNNING, adaptive=True, ends_at=5),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's folder; the server has a token and listens on this machine alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(access, "_token", TOKEN)
    monkeypatch.setattr(access, "is_local", lambda: True)
    monkeypatch.delenv(READ_ONLY_VARIABLE, raising=False)
    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{tmp_path / 'store.db'}")
    launching.launcher.cache_clear()
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Store:
    """A study with a trial that completed, one that failed and one that was interrupted; nothing runs it."""
    return fake_store.build(folder / "store.db", courses=COURSES)


@pytest.fixture
def view(store: Store) -> StudyView:
    return read_study(store, STUDY)


def orders(store: Store) -> list[Order]:
    return store.orders(store.study(STUDY))


def control_page() -> None:
    from dashboard.views import control

    control.page()


def page(token: str = TOKEN, **link: str) -> AppTest:
    app = AppTest.from_function(control_page, default_timeout=SECONDS)
    app.query_params.update(link | ({"token": token} if token else {}))
    return run(app)


def run(app: AppTest) -> AppTest:
    app.run()
    assert not app.exception
    return app


def press(app: AppTest, label: str) -> AppTest:
    """Press the button of this key, or else of this label."""
    found = [button for button in app.button if button.key == label] or [b for b in app.button if b.label == label]
    found[0].proto.disabled = False  # as for a client that does not mind
    found[0].click()
    return run(app)


def texts(app: AppTest) -> str:
    return "\n".join(text.value for text in app.text)


def badges(app: AppTest) -> str:
    return "\n".join(markdown.value for markdown in app.markdown)


def test_the_checkpoints_to_fork_at_are_those_in_the_trials_folder(folder: Path, store: Store) -> None:
    assert steering.fork_episodes(read_study(store, STUDY), 0) == []
    for step, episode in ((4, 512), (8, 1024)):
        path = checkpoint.step_folder(folder / "runs" / STUDY / "0", step)
        checkpoint.write(path, {}, state={}, extra={"episode": episode})
    lease = store.acquire(STUDY)
    store.update_study(lease, folder=str(folder / "runs" / STUDY))
    store.release(lease)
    assert steering.fork_episodes(read_study(store, STUDY), 0) == []  # not marked as this study's
    (folder / "runs" / STUDY / "study.json").write_text(
        f'{{"study": "{STUDY}", "created_at": {store.study(STUDY).created_at!r}}}'
    )
    assert study_folder._read_owner(folder / "runs" / STUDY)
    view = read_study(store, STUDY)
    assert steering.fork_episodes(view, 0) == [1024, 512]
    app = page(part="New trial", way="Fork at a checkpoint")
    app.selectbox(key="from").set_value(0)
    run(app)
    assert app.selectbox(key="at 0").options == ["1024", "512"]
    offered = app.multiselect(key="forked 0").options
    assert "kl_coef (KL coefficient β)" in offered and not any(name.startswith("batch_size") for name in offered)
    app.selectbox(key="at 0").set_value(512)
    app.multiselect(key="forked 0").set_value(["kl_coef"])
    run(app)
    app.text_input(key="fork 0 kl_coef").set_value("0.2")
    app.text_input(key="fork 0 label").set_value(HOSTILE)
    press(app, "Fork")
    assert 'Fork trial 0 of study "reviews"' in texts(app) and "kl_coef = 0.2" in texts(app)
    press(app, "Place the order")
    [order] = orders(store)
    assert (order.kind, order.trial) == ("fork", 0)
    assert order.arguments["values"] == {"kl_coef": "0.2"} and order.arguments["episode"] == 512
    assert "\u202e" not in order.arguments["label"]


def test_a_fork_at_the_last_episode_is_offered_with_more_of_them(folder: Path, store: Store) -> None:
    for step, episode in ((8, 1024), (15, 1920)):
        path = checkpoint.step_folder(folder / "runs" / STUDY / "0", step)
        checkpoint.write(path, {}, state={}, extra={"episode": episode})
    lease = store.acquire(STUDY)
    store.update_study(lease, folder=str(folder / "runs" / STUDY))
    store.release(lease)
    (folder / "runs" / STUDY / "study.json").write_text(
        f'{{"study": "{STUDY}", "created_at": {store.study(STUDY).created_at!r}}}'
    )
    app = page(part="New trial", way="Fork at a checkpoint", **{"from": "0"})
    assert "at the trial's last episode, 1,920" in "".join(text.value for text in app.markdown)
    press(app, "Fork")
    press(app, "Place the order")
    assert [order.arguments for order in orders(store)] == [{"values": {"total_episodes": "3840"}}]
    app.selectbox(key="at 0").set_value(1024)
    run(app)
    assert app.multiselect(key="forked 0").value == []
    assert "last episode" not in "".join(text.value for text in app.markdown)


# The page


def test_an_order_to_a_study_that_runs_does_not_say_that_nothing_runs_it(store: Store) -> None:
    store.acquire(STUDY)
    app = press(press(page(part="Steer"), "study pause"), "Place the order")
    assert "Order 1 is placed: Pause study" in texts(app) and "nothing runs" not in texts(app)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """Seconds between two looks, by the function that draws."""
    seen: dict[str, float | None] = {}
    fragment = st.fragment

    def note(function: Callable[..., Any], *, run_every: float | None = None) -> Any:
        seen[function.__name__] = run_every
        return fragment(function, run_every=run_every)

    monkeypatch.setattr(st, "fragment", note)
    return seen


@contextmanager
def living() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that was launched here for the study, which lives until it is told something."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        launched = launching.Launched("key", STUDY, process.pid, Path("made.log"), process)
        launching.launcher()._launched.append(launched)
        yield process


@pytest.mark.parametrize("part", ["Steer", "New trial"])
def test_the_page_looks_again_while_something_runs_the_study(
    store: Store, looks: dict[str, float | None], part: str
) -> None:
    lines = {"_trial_line", "_log"} | ({"_look"} if part == "Steer" else set())
    link = {"part": part, "steer": "2", "from": "2"}
    app = page(**link)
    assert {name: looks[name] for name in lines} == dict.fromkeys(lines)
    lease = store.acquire(STUDY)
    run(app)
    assert {name: looks[name] for name in lines} == dict.fromkeys(lines, 2)
    assert "Trial 2 is running, at 320 of 1,920 episodes." in texts(app)
    if part == "Steer":
        assert "reviews: 2 of 14 trials ended." in texts(app) and ":material/play_arrow: running" in badges(app)
        button = next(button for button in app.button if button.key == "study run")
        assert button.disabled and button.help == "A controller is running already."
        store.release(lease)
        run(app)
        assert "reviews: 2 of 14 trials ended." in texts(app) and ":material/stop_circle: not running" in badges(app)
        assert not next(button for button in app.button if button.key == "study run").disabled


def test_a_forked_trial_counts_among_all_as_on_the_command_line(store: Store, view: StudyView) -> None:
    lease = store.acquire(STUDY)
    config, params = view.trials[0].config, view.trials[0].params
    store.add_trial(lease, NewTrial(3, Origin.FORKED, {**config, "seed": 8}, params, threads=1, role=Role.FORK))
    assert "2 of 15 trials ended" in common.status_text(read_study(store, STUDY), 0.0)


def trial_line(drawn: str) -> None:
    import streamlit as st

    from dashboard.views import control_parts

    st.session_state["drawn"] = st.session_state.get("drawn", 0) + 1
    control_parts._trial_line("reviews", 2, ("interrupted" if st.session_state["drawn"] > 1 else drawn, None))


@pytest.mark.parametrize(("drawn", "times"), [("interrupted", 1), ("running", 2)])
def test_a_trial_that_stands_otherwise_has_the_whole_page_drawn_again(store: Store, drawn: str, times: int) -> None:
    app = run(AppTest.from_function(trial_line, default_timeout=SECONDS, kwargs={"drawn": drawn}))
    assert app.session_state["drawn"] == times
    assert texts(app) == "Trial 2 is interrupted, at 320 of 1,920 episodes."


def test_after_a_launch_the_page_looks_until_the_study_is_held(store: Store, looks: dict[str, float | None]) -> None:
    with living() as process:
        app = page(part="Steer")
        assert looks.pop("_process_line") == 2 and "this page updates by itself" in texts(app)
        lease = store.acquire(STUDY)
        run(app)
        assert looks["_look"] == 2 and "_process_line" not in looks and "running" in badges(app)
        store.release(lease)
        process.communicate(b"\n")
    run(app)
    assert "_process_line" not in looks and looks["_look"] is None


def process_line() -> None:
    import streamlit as st

    from dashboard.views import control

    if st.session_state.get("drawn"):
        st.text("drawn again")
    else:
        st.session_state["drawn"] = True
        control._process_line("reviews")


def test_a_process_is_waited_for_until_it_holds_the_study_or_is_gone(store: Store) -> None:
    def shown() -> str:
        return texts(run(AppTest.from_function(process_line, default_timeout=SECONDS)))

    assert shown() == "drawn again"
    with living() as process:
        assert "this page updates by itself" in shown()
        store.acquire(STUDY)
        assert shown() == "drawn again"
        process.communicate(b"\n")


def test_what_a_trials_status_rules_out_is_disabled_and_says_why(store: Store) -> None:
    app = page(part="Steer", steer="0")
    buttons = {button.label: button for button in app.button if (button.key or "").startswith("trial ")}
    assert all(button.disabled for button in buttons.values())
    assert buttons["Prune"].help == r"trial 0 is completed\; prune does not apply to it"
    app.selectbox(key="steer").set_value(1)
    run(app)
    enabled = [button.label for button in app.button if (button.key or "").startswith("trial ") and not button.disabled]
    assert enabled == ["Retry"]


def test_an_order_is_placed_after_a_confirmation_that_names_study_and_trial(store: Store) -> None:
    app = page(part="Steer")
    app.selectbox(key="steer").set_value(2)
    run(app)
    assert "Trial 2 is interrupted, at 320 of 1,920 episodes." in texts(app)
    press(app, "trial prune")
    assert 'Prune trial 2 of study "reviews": it ends now, for good' in texts(app)
    assert orders(store) == []
    press(app, "Cancel")
    assert orders(store) == [] and "Place the order" not in [button.label for button in app.button]
    press(app, "trial prune")
    press(app, "Place the order")
    [order] = orders(store)
    assert (order.kind, order.trial, order.arguments) == ("prune", 2, {})
    waits = "nothing runs the study; to carry it out: ppo-tuner run reviews --storage sqlite:"
    assert f"Order 1 is placed, and waits: {waits}" in texts(app) and "Or press Run under Steer" in texts(app)
    assert app.dataframe[0].value["outcome"][0].startswith(waits)
    run(app)  # as when the page draws itself anew: what was done is still told
    assert len(orders(store)) == 1 and "Order 1 is placed" in texts(app)


def test_a_trial_chosen_by_number_stays_it_when_others_come(store: Store) -> None:
    app = page(part="Steer")
    app.selectbox(key="steer").set_value(1)
    run(app)
    lease = store.acquire(STUDY)
    fake_store._run(store, lease, 3, DONE)
    store.release(lease)
    press(app, "trial retry")
    assert 'Retry trial 1 of study "reviews"' in texts(app)


def test_what_would_be_refused_is_told_on_the_page(store: Store) -> None:
    app = page(part="Steer")
    press(app, "study resume")
    assert "the study is not paused" in texts(app)
    app.text_input(key="set kl_budget").set_value("nine")
    press(app, "Change")
    assert "kl_budget = 'nine' is not allowed" in texts(app)
    assert "Place the order" not in [button.label for button in app.button]


def test_settings_are_changed_by_an_order(store: Store) -> None:
    app = page(part="Steer")
    app.text_input(key="set trials").set_value("20")
    app.text_input(key="set kl_budget").set_value("9")
    press(press(app, "Change"), "Place the order")
    assert orders(store)[0].arguments == {"changes": {"trials": 20, "kl_budget": 9.0}}


def test_a_budget_may_be_any_number(folder: Path) -> None:
    store = fake_store.build_cut(folder / "store.db", courses=fake_store.CUT_COURSES[:2])
    app = page(part="Steer", study=fake_store.CUT)
    assert app.text_input(key="set budget").placeholder == "8 (unchanged)"
    app.text_input(key="set budget").set_value("9.5")
    press(press(app, "Change"), "Place the order")
    assert store.orders(store.study(fake_store.CUT))[0].arguments == {"changes": {"budget": 9.5}}


def test_who_paused_a_trial_is_told(folder: Path) -> None:
    store = fake_store.build_cut(folder / "store.db", courses=(fake_store.CUT_COURSES[0], fake_store.CUT_COURSES[13]))
    rested, paused = read_study(store, fake_store.CUT).trials
    assert control_parts.trial_text(rested) == "Trial 0 is paused at rung (score 1.87), at 192 of 1,920 episodes."
    assert control_parts.trial_text(paused) == "Trial 1 is paused, at 128 of 1,920 episodes."


def test_a_copy_has_the_trials_values_and_the_changed_ones(store: Store) -> None:
    app = page(part="New trial")
    app.selectbox(key="from").set_value(2)
    run(app)
    fields = {field.label: field.value for field in app.text_input}
    assert fields["Policy learning rate: 1e-05 to 0.003"] == "0.0003"
    assert fields["Rollout batch (episodes): 64 to 128, a power of two"] == "64"
    assert fields["KL coefficient β (reward per nat): 0.01 to 0.3"] == ""
    app.text_input(key="copy 2 learning_rate").set_value("0.5")
    press(app, "Enqueue")
    assert "learning_rate = 0.5 is not allowed: 1e-05 to 0.003 in this study" in texts(app)
    app.text_input(key="copy 2 learning_rate").set_value("5e-4")
    press(press(app, "Enqueue"), "Place the order")
    values = orders(store)[0].arguments["values"]
    assert values["learning_rate"] == "5e-4" and values["kl_target"] == "5.2" and "kl_coef" not in values


@pytest.mark.parametrize("token", ["", "another"])
def test_without_the_token_the_page_asks_for_it_and_places_nothing(store: Store, token: str) -> None:
    app = page(token, part="Steer")
    assert all(button.disabled for button in app.button if button.label != "Use this token")
    press(app, "study pause")
    assert "Place the order" not in [button.label for button in app.button]
    app.text_input[0].set_value("a guess")
    press(app, "Use this token")
    assert "That is not this server's token." in texts(app)
    app.text_input[0].set_value(TOKEN)
    press(app, "Use this token")
    press(app, "study pause")
    press(app, "Place the order")
    assert [order.kind for order in orders(store)] == ["pause"]


@pytest.mark.parametrize("why", ["read-only", "the token is not this server's"])
def test_a_confirmation_is_refused_in_the_action_itself(
    store: Store, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The dialog was opened while it was allowed."""
    app = press(page(part="Steer"), "study pause")
    if why == "read-only":
        monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    else:
        monkeypatch.setattr(access, "_token", "that of a later server")
    press(app, "Place the order")
    assert orders(store) == [] and why in texts(app)


def test_a_read_only_page_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    app = page(part="Steer")
    assert "This dashboard is read-only" in texts(app)
    assert all(button.disabled for button in app.button)


def test_orders_are_listed_with_their_outcomes_and_no_formula(store: Store, view: StudyView) -> None:
    lease = store.acquire(STUDY)
    store.decide(lease, store.place_order(view.row, "pause", 2, {}), lambda _: "=cmd() \u202edone")
    store.refuse(lease, store.place_order(view.row, "fork", 0, {"values": {"kl_coef": "<b>"}}), "no")
    store.place_order(view.row, "stop", None, {})
    held = control.rows(orders(store), store.study(STUDY))
    assert held["state"].tolist() == ["… waiting", "✕ refused", "✓ done"]
    assert held["what"].tolist() == ["stop", "fork trial 0 (kl_coef = <b>)", "pause trial 2"]
    assert held["outcome"].tolist() == ["the controller has not read it yet", "no", "'=cmd() ⟨U+202E⟩done"]
    store.release(Lease(lease.study_id, lease.token))
    left = control.rows(orders(store), store.study(STUDY))
    assert left["outcome"][2].startswith("nothing runs the study; to carry it out: ppo-tuner run reviews")


# Launching


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
    confirm = next(button for button in app.button if (button.key or "").startswith("confirm"))
    confirm.click()
    run(app)
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
    next(button for button in app.button if (button.key or "").startswith("confirm")).click()
    run(app)
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
    assert "only paths below" in texts(app) and started == []


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
    next(button for button in app.button if (button.key or "").startswith("confirm")).click()
    run(app)
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
    next(button for button in app.button if (button.key or "").startswith("confirm")).click()
    run(app)
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
        ("new budget", "0.5", "budget = 0.5 is not allowed: at least 1"),
        ("new budget", "", "budget or trials is missing"),
        ("new trials", "many", "trials = 'many' is not allowed: a number"),
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
    next(button for button in app.button if (button.key or "").startswith("confirm")).click()
    run(app)
    assert [(call["kind"], call["what"]) for call in started] == [("launch_stored", "reviews")]


def test_a_server_beyond_this_machine_says_that_launching_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "is_local", lambda: False)
    app = page(part="Launch")
    assert app.info[0].value.startswith("Launching is off")
    assert st.get_option("server.address") in (None, "127.0.0.1")


def test_a_password_is_on_no_part_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_TUNER_STORAGE", "postgresql://me:hunter2@127.0.0.1:1/nothing?connect_timeout=1")
    for link in ({"part": "New trial"}, {"part": "Launch"}, {"part": "Launch", "launch": "From a form"}):
        app = page(**link)
        assert "hunter2" not in "".join(str(node.proto) for node in app.main if node.type != "main")


VIEWS = sorted(path.stem for path in Path(views.__file__).parent.glob("*.py") if "\ndef page()" in path.read_text())


@pytest.mark.parametrize("name", VIEWS)
def test_a_password_is_on_no_view(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def any_view(name: str) -> None:
        import importlib

        importlib.import_module(f"dashboard.views.{name}").page()

    monkeypatch.setenv("PPO_TUNER_STORAGE", "postgresql://me:hunter2@127.0.0.1:1/nothing?connect_timeout=1")
    app = run(AppTest.from_function(any_view, default_timeout=SECONDS, kwargs={"name": name}))
    assert "me:***@127.0.0.1" in texts(app)
    assert "hunter2" not in "".join(str(node.proto) for node in app.main if node.type != "main")

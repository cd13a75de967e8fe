"""The control page: what it asks to be confirmed, what it places, once, and what it refuses."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboard import access, views
from dashboard.views import common, control
from tests.dashboard import fake_store
from tests.dashboard.control_page import TOKEN, badges, orders, page, press, texts
from tests.dashboard.fake_store import BOUNDED, STUDY
from tests.dashboard.shown import change, codes, run, subheaders
from tests.tuner import made_study
from tests.waiting import SECONDS
from tuner.confirm.plan import Plan
from tuner.environment import READ_ONLY_VARIABLE
from tuner.judge.results import StudyView, read_study
from tuner.store import Lease, NewTrial, Store
from tuner.study.status import Origin, Role

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("folder")]


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


@pytest.mark.parametrize("part", ["Steer", "New trial"])
def test_the_page_looks_again_while_a_study_runs(store: Store, looks: dict[str, float | None], part: str) -> None:
    lines = {"_trial_line", "_log"} | ({"refresh"} if part == "Steer" else set())
    link = {"part": part, "steer": "2", "from": "2"}
    app = page(**link)
    assert {name: looks[name] for name in lines} == dict.fromkeys(lines)
    lease = store.acquire(STUDY)
    run(app)
    assert {name: looks[name] for name in lines} == dict.fromkeys(lines, 2)
    assert "Trial 2 is running, at 320 of 1,920 episodes." in texts(app)
    if part == "Steer":
        assert "2 of 14 trials ended" in texts(app) and ":material/play_arrow: running" in badges(app)
        store.release(lease)
        run(app)
        assert "2 of 14 trials ended" in texts(app) and ":material/stop_circle: not running" in badges(app)


def test_a_forked_trial_counts_among_all_as_on_the_command_line(store: Store, view: StudyView) -> None:
    lease = store.acquire(STUDY)
    config, params = view.trials[0].config, view.trials[0].params
    store.add_trial(lease, NewTrial(3, Origin.FORKED, {**config, "seed": 8}, params, threads=1, role=Role.FORK))
    assert "2 of 15 trials ended" in common.status_text(read_study(store, STUDY), "")


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


@pytest.mark.parametrize(("finished_at", "words"), [(None, ["run"]), (1.0, ["confirm"])])
def test_a_study_that_nothing_runs_shows_the_commands_that_go_on_with_it(
    folder: Path, store: Store, looks: dict[str, float | None], finished_at: float | None, words: list[str]
) -> None:
    lease = store.acquire(STUDY)
    store.update_study(lease, finished_at=finished_at)
    store.release(lease)
    app = page(part="Steer")
    commands = [f"ppo-tuner {word} {STUDY} --storage sqlite:///{folder / 'store.db'}" for word in words]
    assert codes(app)[: len(words)] == commands and looks.pop("_until_run") == 2
    store.acquire(STUDY)
    run(app)
    assert not set(commands) & set(codes(app)) and "_until_run" not in looks


@pytest.mark.parametrize("read", [None, 1])
def test_after_a_confirmation_its_runs_are_shown_and_resumed(folder: Path, read: int | None) -> None:
    store = fake_store.build_bounded(folder / "store.db", courses=fake_store.BOUNDED_DONE)
    made_study.confirm(store, BOUNDED, Plan(top=1, seeds=3), read)
    app = page(part="Steer")
    assert codes(app)[0].split()[1] == ("train" if read is None else "confirm")
    [happened] = [each.value for each in app.dataframe if "when" in each.value]
    assert happened["reason"].iloc[0].startswith("confirms trial ")


def test_a_live_study_shows_what_runs_waits_and_was_paused(folder: Path) -> None:
    with closing(fake_store.build_bounded(folder / "store.db", held=True)) as store:
        study = store.study(BOUNDED)
        lease = Lease(study.id, study.lease_token)
        paused = next(row for row in store.trials(study) if row.number == 13)
        first = store.trials(study)[0]
        new = NewTrial(15, Origin.SAMPLED, {**first.config, "seed": 9}, first.params, 1, parent=5, role=Role.CONFIRM)
        store.add_trial(lease, new)
        change(
            folder / "store.db",
            "UPDATE ppo_trials SET started_at = started_at - 3600, ended_at = ended_at - 3600 WHERE number = 12",
        )
        change(folder / "store.db", "UPDATE ppo_trials SET started_at = started_at + 60, label = 'mine' WHERE id = ?",
               str(paused.id))  # fmt: skip
        app = page(part="Steer")
    assert subheaders(app)[-2:] == ["Running and queued", "What happened"]
    [runs] = [each.value for each in app.dataframe if "what" in each.value]
    assert runs.drop(columns="kl").to_dict("split")["data"] == [
        [14, "✓ healthy", "1,088 of 1,920", "18 s, 14 s left", "sampled"],
        [15, "… starting", "0 of 1,920", "0 s", "confirms trial 5, seed 9"],
        [13, "‖ paused", "128 of 1,920", "3 s", "mine, sampled"],
    ]
    assert runs["kl"].round(1).fillna(-1).tolist() == [9.0, -1, 0.9]
    [happened] = [each.value.set_index("trial") for each in app.dataframe if "when" in each.value]
    assert {13, 15} <= set(happened.index) and 12 not in happened.index, "it ended an hour ago"
    assert len(happened) == 12


def test_a_finished_study_is_to_be_run_for_actions_that_wait_alone(folder: Path, store: Store, view: StudyView) -> None:
    lease = store.acquire(STUDY)
    store.set_finished(lease)
    store.release(lease)
    run_it = f"ppo-tuner run {STUDY} --storage sqlite:///{folder / 'store.db'}"
    assert run_it not in codes(page(part="Steer"))
    store.place_order(view.row, "set", None, {"changes": {"trials": 20}})
    app = page(part="Steer")
    assert "To carry out the 1 order that waits, in a terminal:" in badges(app) and codes(app)[0] == run_it


def until_run() -> None:
    import streamlit as st

    from dashboard import data
    from dashboard.views import control

    st.session_state["drawn"] = st.session_state.get("drawn", 0) + 1
    if st.session_state["drawn"] == 1:
        control._until_run(
            "reviews", data.open_store(data.storage()).study("reviews").lease_token - st.session_state["runs"]
        )


@pytest.mark.parametrize(("runs", "times"), [(0, 1), (1, 2)])
def test_the_whole_page_is_drawn_again_after_a_run_that_no_look_saw(store: Store, runs: int, times: int) -> None:
    for _ in range(runs):
        store.release(store.acquire(STUDY))
    app = AppTest.from_function(until_run, default_timeout=SECONDS)
    app.session_state["runs"] = runs
    assert run(app).session_state["drawn"] == times


def offered(app: AppTest, start: str) -> list[str]:
    return [button.label for button in app.button if (button.key or "").startswith(start) and not button.disabled]


def test_only_what_a_trials_status_allows_is_offered(store: Store) -> None:
    app = page(part="Steer", steer="0")
    said = "It has ended: nothing to pause, stop, resume or retry. New trial copies or forks it."
    assert offered(app, "trial ") == [] and said in texts(app)
    app.selectbox(key="steer").set_value(1)
    run(app)
    assert offered(app, "trial ") == ["Retry"] and said not in texts(app)


def test_a_finished_study_offers_no_pause_and_says_what_is_possible(folder: Path) -> None:
    done = tuple(course for course in fake_store.COURSES[:3])
    fake_store.build(folder / "store.db", courses=done, held=True).close()
    said = "Finished: nothing to pause, stop or retry."
    app = page(part="Steer")
    assert offered(app, "study ") == ["Pause", "Stop study"] and said not in texts(app)
    change(folder / "store.db", "UPDATE ppo_studies SET finished_at = 1, lease_renewed_at = NULL")
    app = page(part="Steer")
    assert offered(app, "study ") == [] and said in texts(app)


def test_an_order_is_placed_after_a_confirmation_that_names_it(store: Store) -> None:
    app = page(part="Steer")
    app.selectbox(key="steer").set_value(2)
    run(app)
    assert "Trial 2 is interrupted, at 320 of 1,920 episodes." in texts(app)
    press(app, "trial stop")
    assert 'Stop trial 2 of study "reviews": it ends after this step, for good' in texts(app)
    assert orders(store) == []
    press(app, "Cancel")
    assert orders(store) == [] and "Do it" not in [button.label for button in app.button]
    press(app, "trial stop")
    press(app, "Do it")
    [order] = orders(store)
    assert (order.kind, order.trial, order.arguments) == ("stop", 2, {})
    waits = "nothing runs the study; to carry it out: ppo-tuner run reviews --storage sqlite:"
    assert f"Order 1 waits: {waits}" in texts(app)
    assert app.dataframe[0].value["outcome"][0].startswith(waits)
    run(app)  # as when the page draws itself anew: what was done is still told
    assert len(orders(store)) == 1 and "Order 1 waits: " in texts(app)


def test_what_would_be_refused_is_told_on_the_page(store: Store) -> None:
    app = page(part="Steer")
    assert offered(app, "study ") == ["Pause", "Retry all failed"], "it is not paused, and nothing runs it"
    app.text_input(key="set kl_budget").set_value("nine")
    press(app, "Change")
    assert "kl.budget = 'nine' is not allowed" in texts(app)
    assert "Do it" not in [button.label for button in app.button]


def test_settings_are_changed_by_an_order(store: Store) -> None:
    app = page(part="Steer")
    app.text_input(key="set trials").set_value("20")
    app.text_input(key="set kl_budget").set_value("9")
    press(press(app, "Change"), "Do it")
    assert orders(store)[0].arguments == {"changes": {"trials": 20, "kl_budget": 9.0}}


def test_a_budget_may_be_any_number_or_a_time(folder: Path) -> None:
    store = fake_store.build_bounded(folder / "store.db", courses=fake_store.BOUNDED_COURSES[:2])
    app = page(part="Steer", study=fake_store.BOUNDED)
    assert app.text_input(key="set budget").placeholder == "14"
    app.text_input(key="set budget").set_value("9.5")
    press(press(app, "Change"), "Do it")
    app.text_input(key="set budget").set_value("2h")
    press(press(app, "Change"), "Do it")
    placed = [order.arguments for order in store.orders(store.study(fake_store.BOUNDED))]
    assert placed == [{"changes": {"budget": 9.5}}, {"changes": {"budget": "2h"}}]


@pytest.mark.parametrize(
    ("typed", "is_held", "command"),
    [
        ({}, False, "run reviews-bounded --budget N"),
        ({"budget": "9.5", "workers": "2"}, False, "run reviews-bounded --budget 9.5 --workers 2"),
        ({"kl_budget": "4"}, False, "set reviews-bounded --kl-budget 4"),
        ({"budget": "9.5"}, True, "set reviews-bounded --budget 9.5"),
    ],
)
def test_beside_the_settings_is_the_command_that_changes_them_as_typed(
    folder: Path, typed: dict[str, str], is_held: bool, command: str
) -> None:
    fake_store.build_bounded(folder / "store.db", courses=fake_store.BOUNDED_COURSES[:2], held=is_held).close()
    app = page(part="Steer")
    for name, text in typed.items():
        app.text_input(key=f"set {name}").set_value(text)
    assert codes(run(app))[-1] == f"ppo-tuner {command} --storage sqlite:///{folder / 'store.db'}"


@pytest.mark.parametrize("token", ["", "another"])
def test_without_the_token_the_page_asks_for_it_and_places_nothing(store: Store, token: str) -> None:
    app = page(token, part="Steer")
    assert all(button.disabled for button in app.button if button.label != "Use this token")
    press(app, "study pause")
    assert "Do it" not in [button.label for button in app.button]
    app.text_input[0].set_value("a guess")
    press(app, "Use this token")
    assert "That is not this server's token." in texts(app)
    app.text_input[0].set_value(TOKEN)
    press(app, "Use this token")
    press(app, "study pause")
    press(app, "Do it")
    assert [order.kind for order in orders(store)] == ["pause"]


@pytest.mark.parametrize("why", ["read-only", "the token is not this server's"])
def test_a_confirmation_is_refused_in_the_action(store: Store, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """The dialog was opened while it was allowed."""
    app = press(page(part="Steer"), "study pause")
    if why == "read-only":
        monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    else:
        monkeypatch.setattr(access, "_token", "that of a later server")
    press(app, "Do it")
    assert orders(store) == [] and why in texts(app)


def test_orders_are_listed_with_their_outcomes_and_no_formula(store: Store, view: StudyView) -> None:
    lease = store.acquire(STUDY)
    store.decide(lease, store.place_order(view.row, "pause", 2, {}), lambda _: "=cmd() \u202edone")
    store.refuse(lease, store.place_order(view.row, "fork", 0, {"values": {"kl_coef": "<b>"}}), "no")
    store.place_order(view.row, "stop", None, {})
    held = control.order_rows(orders(store), store.study(STUDY))
    assert held["state"].tolist() == ["… waiting", "✕ refused", "✓ done"]
    assert held["what"].tolist() == ["stop", "fork trial 0 (kl_coef = <b>)", "pause trial 2"]
    assert held["outcome"].tolist() == ["the controller has not read it yet", "no", "'=cmd() ⟨U+202E⟩done"]
    store.release(Lease(lease.study_id, lease.token))
    left = control.order_rows(orders(store), store.study(STUDY))
    assert left["outcome"][2].startswith("nothing runs the study; to carry it out: ppo-tuner run reviews")


VIEWS = sorted(path.stem for path in Path(views.__file__).parent.glob("*.py") if "\ndef page(" in path.read_text())


@pytest.mark.parametrize("name", VIEWS)
def test_a_password_is_on_no_view(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def any_view(name: str) -> None:
        import importlib

        from dashboard.views import common

        importlib.import_module(f"dashboard.views.{name}").page(common.choose())

    monkeypatch.setenv("PPO_TUNER_STORAGE", "postgresql://me:hunter2@127.0.0.1:1/nothing?connect_timeout=1")
    app = run(AppTest.from_function(any_view, default_timeout=SECONDS, kwargs={"name": name}))
    assert "me:***@127.0.0.1" in texts(app)
    assert "hunter2" not in "".join(str(node.proto) for node in app.main if node.type != "main")

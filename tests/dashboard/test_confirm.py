"""The answer's card, its picture, and what a confirmation read: before, in the middle of and after it."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from dashboard import data, safe_text
from dashboard.views import confirm as view
from dashboard.views import sidebar
from dashboard.views.confirm import Measurement
from tests.dashboard import fake_store, shown
from tests.dashboard.fake_store import BOUNDED
from tests.dashboard.shown import page
from tests.tuner import made_study
from tuner.confirm.answer import study_answer
from tuner.confirm.plan import Plan
from tuner.confirm.result import confirmations
from tuner.environment import to_copy
from tuner.judge.results import read_study, under_budget
from tuner.store import Store


def confirm(store: Store, plan: Plan, read: int | None = None) -> None:
    made_study.confirm(store, BOUNDED, plan, read)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fake_store.build_bounded(tmp_path / "store.db", courses=fake_store.BOUNDED_DONE).close()
    return tmp_path / "store.db"


def opened(path: Path) -> Store:
    return Store.open(f"sqlite:///{path}")


def test_the_trials_to_choose_from_leave_out_confirming_runs(path: Path) -> None:
    with closing(opened(path)) as store:
        trials = [row.number for row in data.snapshot(store, BOUNDED).view.trials]
        confirm(store, Plan(seeds=1))
        snapshot = data.snapshot(store, BOUNDED)
    assert sidebar._numbers(snapshot) == trials
    study = replace(snapshot.view.spec, trials=len(trials) + 2, budget=None)
    to_start = [len(trials) + len(snapshot.view.confirming) + more for more in (0, 1)]
    assert sidebar._numbers(replace(snapshot, view=replace(snapshot.view, spec=study))) == [*trials, *to_start]


def configurations(app: AppTest) -> pd.DataFrame:
    """The table of what was confirmed."""
    [table] = [one.value for one in app.dataframe if "configuration" in one.value]
    return table


def test_before_a_confirmation_the_card_has_the_command_for_it(path: Path) -> None:
    app = page("answer", path)
    assert shown.codes(app)[0] == f"ppo-tuner confirm {BOUNDED} --storage sqlite:///{path}"
    assert "20 runs of 1,920 episodes will confirm trial 5, trial 6, trial 7 and the reference" in app.subheader[0].help


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("UPDATE ppo_studies SET finished_at = NULL", "run"),
        ("UPDATE ppo_studies SET finished_at = NULL, paused_at = 1", "resume"),
    ],
)
def test_a_search_that_has_not_ended_is_to_finish_first(path: Path, statement: str, word: str) -> None:
    shown.change(path, statement)
    assert shown.codes(page("answer", path)) == [f"ppo-tuner {word} {BOUNDED} --storage sqlite:///{path}"]


def test_device_time_tells_confirming_runs_from_the_search(path: Path) -> None:
    store = opened(path)
    confirm(store, Plan(top=1, seeds=3))
    store.close()
    shown.change(path, "UPDATE ppo_trials SET seconds = 100 WHERE role = 'confirm'")
    app = page("answer", path)
    app.session_state["cost"] = True
    spent = next(one.value for one in shown.run(app).dataframe if "on" in one.value).set_index("on")
    assert spent.loc["confirming runs", ["trials", "seconds"]].tolist() == [6, 600]
    assert spent["share"].sum() == pytest.approx(100)


def test_a_confirmation_is_shown_with_its_verdict_intervals_and_command(path: Path) -> None:
    store = opened(path)
    confirm(store, Plan(top=2, seeds=3))
    (found,) = confirmations(store, read_study(store, BOUNDED))
    store.close()
    app = page("answer", path)
    assert found.best is not None and app.subheader[0].value == safe_text.in_markdown(found.verdict)
    assert shown.codes(app) == [
        f"ppo-tuner train --from {BOUNDED} {found.best.trial.number} --storage sqlite:///{path}"
    ]
    table = configurations(app)
    assert table["configuration"].tolist()[0] == f"trial {found.best.trial.number}"
    assert table["seeds"].tolist() == [3, 3, 3] and len(table) == 3
    assert table["reward over the reference"].tolist().count("–") == 1, "of the reference itself"
    assert table["best over this one"].tolist()[0] == "–", "of the best itself"
    assert set(table["complete in budget"]) <= {"0 of 3", "1 of 3", "2 of 3", "3 of 3"}
    assert "three numbers" in shown.charts(app)


def test_the_picture_of_what_nothing_confirmed_has_two_errors(path: Path) -> None:
    with closing(opened(path)) as store:
        snapshot = data.snapshot(store, BOUNDED)
        answer = study_answer(store, snapshot.view)
        assert answer is not None and answer.kl is not None and answer.kl.se is not None
        best, reference = view.rows_of(store, snapshot, answer)
    assert (best.label, reference.label) == ("trial 5", "reference (0)")
    _, kl, lengths = best.measurements
    assert (kl.low, kl.high) == pytest.approx((answer.kl.mean - 2 * answer.kl.se, answer.kl.mean + 2 * answer.kl.se))
    assert len(lengths.dots) == 1 and reference.measurements[0] == Measurement()


def test_a_tie_has_the_command_of_the_reference_alone(path: Path) -> None:
    store = opened(path)
    confirm(store, Plan(top=1, seeds=3))
    store.close()
    shown.change(path, "UPDATE ppo_test_readings SET reward = 1 + 0.03 * (trial_id % 3) WHERE step > 0")
    app = page("answer", path)
    assert [code.split(" --storage")[0] for code in shown.codes(app)] == [f"ppo-tuner train --from {BOUNDED} 0"]


def test_a_confirmation_under_way_is_shown_as_far_as_it_is(path: Path) -> None:
    store = opened(path)
    confirm(store, Plan(top=1, seeds=3), read=0)
    store.close()
    app = page("answer", path)
    assert configurations(app)["note"].tolist() == ["3 not evaluated yet", "3 not evaluated yet"]


@pytest.mark.parametrize("budget", [None, 3.0, 14.0])
def test_the_card_has_one_answer_under_any_budget(path: Path, budget: float | None) -> None:
    """What the card, other pages' line and commands print agrees, whatever was confirmed for the study's own budget."""
    store = opened(path)
    confirm(store, Plan(top=2, seeds=3))
    study = read_study(store, BOUNDED)
    found = study_answer(store, study if budget is None else under_budget(store, study, budget))
    store.close()
    assert found is not None and (found.confirmed is None) == (budget is not None)
    link = {} if budget is None else {"budget": f"{budget:g}"}
    app = page("answer", path, **link)
    assert app.subheader[0].value == safe_text.in_markdown(found.decision)
    assert shown.codes(app) == [f"{to_copy(found.launch)} --storage sqlite:///{path}"]
    other = page("runs", path, **link)
    assert found.decision in [one.proto.label for one in other.get("page_link")]

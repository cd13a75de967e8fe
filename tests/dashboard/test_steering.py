"""Orders as the dashboard places them: once a confirmation, with the right to it, and while they fit."""

from typing import Any

import pytest

from dashboard import steering
from dashboard.access import NotPermitted
from ppo_core.errors import ConfigError, StudyError
from tests.dashboard import fake_store
from tests.dashboard.control_page import COURSES, TOKEN, orders
from tests.dashboard.fake_store import STUDY
from tuner.environment import READ_ONLY_VARIABLE
from tuner.judge.results import StudyView
from tuner.store import OrderState, Store


def test_a_confirmation_places_one_order_however_often_it_is_given(store: Store, view: StudyView) -> None:
    proposal = steering.propose(store, view, "stop", 2)
    assert orders(store) == []
    first = steering.place(store, proposal, TOKEN)
    assert (first.kind, first.trial, first.state) == ("stop", 2, OrderState.WAITING)
    assert steering.place(store, proposal, TOKEN) == first
    assert orders(store) == [first]
    assert steering.place(store, steering.propose(store, view, "stop", 2), TOKEN).id != first.id


@pytest.mark.parametrize("why", ["no token", "wrong token", "read-only"])
def test_placing_asks_for_a_right(store: Store, view: StudyView, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    proposal = steering.propose(store, view, "pause")
    if why == "read-only":
        monkeypatch.setenv(READ_ONLY_VARIABLE, "1")
    with pytest.raises(NotPermitted):
        steering.place(store, proposal, {"no token": "", "wrong token": "x"}.get(why, TOKEN))
    assert orders(store) == []


def test_a_proposal_is_of_one_study_and_holds_as_long_as_it_fits(store: Store, view: StudyView) -> None:
    study, trial = steering.propose(store, view, "pause"), steering.propose(store, view, "stop", 2)
    lease = store.acquire(STUDY)
    store.finish_trial(lease, view.trials[2].id, fake_store._outcome(store, view.trials[2], COURSES[0], None))
    with pytest.raises(ConfigError, match="trial 2 is completed; stop does not apply to it"):
        steering.place(store, trial, TOKEN)
    store.delete_study(lease)
    store.create_study(STUDY, view.row.spec)
    with pytest.raises(StudyError, match='study "reviews" was deleted and created again meanwhile'):
        steering.place(store, steering.Proposal(study.study_id + 100, STUDY, "pause"), TOKEN)
    assert orders(store) == []


@pytest.mark.parametrize(
    ("kind", "trial", "arguments", "told"),
    [
        ("stop", 0, {}, "trial 0 is completed"),
        ("set", None, {"changes": {"trials": 0}}, "a whole number of at least 1"),
    ],
)
def test_what_would_be_refused_is_told_before_it_is_placed(
    store: Store, view: StudyView, kind: str, trial: int | None, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises((ConfigError, StudyError), match=told):
        steering.propose(store, view, kind, trial, arguments)

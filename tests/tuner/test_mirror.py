import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from ppo_core.declaration import HyperValue
from ppo_core.errors import StoreError
from tests.tuner.trial_rows import make_spec, pruned, running, trial_row
from tuner.projection import Mirror
from tuner.spec import StudySpec
from tuner.status import Reason, Status
from tuner.store import Outcome, Store, TrialRow

Params = dict[str, HyperValue]
SPEC = make_spec()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[str]:
    """A database that already holds our tables."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    Store.open(url, create=True).close()
    yield url


def finished_rows() -> list[TrialRow]:
    reference: Params = {**SPEC.reference_params(), "num_ppo_epochs": 2}
    adaptive: Params = {name: value for name, value in reference.items() if name != "kl_coef"}
    adaptive |= {"kl_control": "adaptive", "kl_target": 6.0, "vf_coef": 0.75}
    return [
        trial_row(0, origin="reference", params=reference, value=1.5, kl=8.0),
        trial_row(1, params=adaptive, value=2.0, kl=14.0),
        pruned(2, params=reference, value=2.5, kl=12.0, reading=20.0, episodes=640),
        trial_row(3, params=adaptive, status=Status.FAILED, value=None, kl=None, reason=Reason("error", "lost")),
        trial_row(4, params=adaptive, value=1.75, kl=9.0),
        trial_row(5, params=adaptive, status=Status.STOPPED, value=1.25, kl=2.0),
    ]


def loaded(storage: str) -> optuna.Study:
    return optuna.load_study(study_name="mine", storage=storage)


def mirrored(storage: str) -> list[tuple[int, str, float | None]]:
    return [(trial.number, trial.state.name, trial.value) for trial in loaded(storage).trials]


EXPECTED = [
    (0, "COMPLETE", 1.5),
    (1, "COMPLETE", 2.0),
    (2, "PRUNED", 2.5),
    (3, "FAIL", None),
    (4, "COMPLETE", 1.75),
    (5, "PRUNED", 1.25),
]


def test_optuna_reads_what_we_stored(storage: str) -> None:
    Mirror(storage, "mine").update(finished_rows(), SPEC)
    assert mirrored(storage) == EXPECTED
    study = loaded(storage)
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert study.best_trial.number == 4  # trial 1's value is higher, and its KL over the budget
    reference, adaptive, stopped = study.trials[0], study.trials[1], study.trials[2]
    assert reference.params == finished_rows()[0].params
    assert adaptive.params == finished_rows()[1].params
    assert reference.distributions["vf_coef"] == optuna.distributions.FloatDistribution(0.1, 1.0)
    assert reference.distributions["batch_size"] == optuna.distributions.IntDistribution(32, 128, log=True)
    assert stopped.constraints == {"kl": pytest.approx(0.693147)}
    assert stopped.intermediate_values == {640: 2.5}
    assert stopped.duration is not None
    assert stopped.duration.total_seconds() == 10.0
    attrs = {name: stopped.user_attrs[name] for name in ("status", "origin", "rule", "reason", "kl")}
    assert attrs == {
        "status": "pruned",
        "origin": "sampled",
        "rule": "kl_limit",
        "reason": "made up: kl_limit",
        "kl": 12.0,
    }


def test_trials_are_written_in_order_up_to_the_first_unfinished_one(storage: str) -> None:
    mirror = Mirror(storage, "mine")
    rows = finished_rows()
    mirror.update([], SPEC)
    assert mirrored(storage) == []
    mirror.update([rows[0], running(1, {}), *rows[2:4]], SPEC)
    assert mirrored(storage) == EXPECTED[:1]
    mirror.update([rows[3], rows[1], rows[0], replace(rows[2], status=Status.PAUSED)], SPEC)
    assert mirrored(storage) == EXPECTED[:2]
    mirror.update(rows, SPEC)
    assert mirrored(storage) == EXPECTED


def test_writing_again_writes_nothing(storage: str) -> None:
    Mirror(storage, "mine").update(finished_rows(), SPEC)
    written = loaded(storage)
    ids = [trial._trial_id for trial in written.trials]
    for _ in range(2):
        Mirror(storage, "mine").update(finished_rows(), SPEC)
    assert (loaded(storage)._study_id, [trial._trial_id for trial in loaded(storage).trials]) == (
        written._study_id,
        ids,
    )


@pytest.mark.parametrize("same_mirror", [True, False])
def test_a_copy_that_was_deleted_or_spoilt_is_made_anew(storage: str, same_mirror: bool) -> None:
    mirror = Mirror(storage, "mine")
    mirror.update(finished_rows(), SPEC)
    optuna.delete_study(study_name="mine", storage=storage)
    mirror = mirror if same_mirror else Mirror(storage, "mine")
    mirror.update(finished_rows()[:4], SPEC)
    assert mirrored(storage) == EXPECTED[:4]
    loaded(storage).add_trial(optuna.trial.create_trial(value=9.0))
    mirror.update(finished_rows(), SPEC)
    assert mirrored(storage) == EXPECTED
    others = [replace(row, id=row.id + 1000, value=None if row.value is None else 0.5) for row in finished_rows()]
    mirror.update(others, SPEC)
    assert {value for _, _, value in mirrored(storage)} == {0.5, None}


def test_changed_ranges_make_the_copy_anew(storage: str) -> None:
    Mirror(storage, "mine").update(finished_rows()[:3], SPEC)
    search = {**SPEC.to_dict()["search"], "vf_coef": {"low": 0.2, "high": 2.0, "scale": "log"}}
    Mirror(storage, "mine").update(finished_rows(), make_spec(search=search))
    assert mirrored(storage) == EXPECTED
    distributions = {trial.distributions["vf_coef"] for trial in loaded(storage).trials}
    assert distributions == {
        optuna.distributions.FloatDistribution(0.1, 2.0, log=True),
        optuna.distributions.FloatDistribution(0.2, 2.0, log=True),
    }


def test_both_live_in_one_database(storage: str) -> None:
    """Our store opens after Optuna's tables were made, and both go on writing."""
    Mirror(storage, "mine").update(finished_rows()[:1], SPEC)
    store = Store.open(storage, create=True)
    study = store.create_study("mine", SPEC.to_dict())
    lease = store.acquire("mine")
    mirror = Mirror(store.url, "mine")
    for number in range(3):
        row = store.add_trial(lease, number, origin="sampled", config={}, params={"kl_control": "fixed"}, threads=1)
        store.finish_trial(lease, row.id, Outcome(Status.COMPLETED, None, float(number), 0.1, 5.0, -0.7))
        mirror.update(store.trials(study), SPEC)
    assert mirrored(storage) == [(0, "COMPLETE", 0.0), (1, "COMPLETE", 1.0), (2, "COMPLETE", 2.0)]
    assert StudySpec.from_dict(store.study("mine").spec, "stored") == SPEC
    mirror.close()
    store.close()


def test_a_database_that_only_optuna_uses_is_not_ours(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    optuna.create_study(storage=url, study_name="theirs")
    with pytest.raises(StoreError, match="holds no PPO Tuner store"):
        Store.open(url, create=True)


def test_a_study_of_the_users_own_is_not_overwritten(storage: str) -> None:
    own = optuna.create_study(storage=storage, study_name="mine")
    own.add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(StoreError, match=r'"mine" .* was not written: .*another study of that name'):
        Mirror(storage, "mine").update(finished_rows(), SPEC)
    assert len(loaded(storage).trials) == 1


def test_what_fails_in_optunas_tables_is_one_store_error(storage: str) -> None:
    mirror = Mirror(storage, "mine")
    mirror.update(finished_rows()[:1], SPEC)
    mirror.close()
    with sqlite3.connect(storage.removeprefix("sqlite:///")) as database:
        database.execute("DROP TABLE trial_params")
        database.execute("CREATE TABLE trial_params (x INTEGER)")
    with pytest.raises(StoreError) as raised:
        mirror.update(finished_rows(), SPEC)
    assert str(raised.value).startswith('the copy of study "mine" for Optuna\'s own tools could not be written: ')
    assert "\n" not in str(raised.value)
    assert mirrored_states(storage) == [TrialState.COMPLETE]


def mirrored_states(storage: str) -> list[TrialState]:
    with sqlite3.connect(storage.removeprefix("sqlite:///")) as database:
        return [TrialState[state] for (state,) in database.execute("SELECT state FROM trials ORDER BY number")]

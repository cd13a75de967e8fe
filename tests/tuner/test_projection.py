import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from ppo_core.declaration import HyperValue
from ppo_core.errors import StoreError
from tests.tuner.trial_rows import pruned, trial_row
from tuner.projection import Mirror, Projection
from tuner.spec import StudySpec
from tuner.status import Reason, Status
from tuner.store import Outcome, Store, TrialRow

Params = dict[str, HyperValue]


def make_spec(sampler: str = "tpe", startup_trials: int = 2, **changes: Any) -> StudySpec:
    names = ("learning_rate", "batch_size", "num_ppo_epochs", "kl_coef", "kl_target")
    content = {
        "name": "mine",
        "task": "reviews",
        "trials": 20,
        "search": {**dict.fromkeys(names, "advised"), "vf_coef": {"low": 0.5, "high": 1.0}},
        "sampler": {"name": sampler, "startup_trials": startup_trials},
        **changes,
    }
    return StudySpec.from_dict(content, "spec")


SPEC = make_spec()


def running(number: int, params: Mapping[str, HyperValue]) -> TrialRow:
    return trial_row(number, status=Status.RUNNING, params=dict(params), value=None, kl=None)


def ended(row: TrialRow, how: str, value: float) -> TrialRow:
    """The row of a running trial after it ended."""
    made = {
        "completed": trial_row(row.number, value=value, kl=8.0 * value),
        "kl_limit": pruned(row.number, "kl_limit", 20.0, value=value),
        "nonfinite": pruned(row.number, "nonfinite", None, value=value),
        "nothing_learned": pruned(row.number, "nothing_learned", 0.0, value=0.0, kl=0.0),
        "failed": trial_row(row.number, status=Status.FAILED, value=None, kl=None),
        "stopped": trial_row(row.number, status=Status.STOPPED, value=value, episodes=10 * row.number),
    }[how]
    return replace(made, params=row.params)


HOW = ("completed", "kl_limit", "nonfinite", "nothing_learned", "failed", "stopped")
EVENT = st.tuples(st.integers(0, 5), st.sampled_from(HOW), st.floats(0, 2))


@settings(max_examples=15, deadline=None)
@given(st.lists(EVENT, min_size=8, max_size=12), st.sampled_from(["tpe", "random"]))
def test_rows_known_one_by_one_and_rows_read_at_once_give_the_same_proposals(
    events: list[tuple[int, str, float]], sampler: str
) -> None:
    """Up to three trials run at a time, and end in any order."""
    spec = make_spec(sampler)
    fed = Projection(spec, [])
    rows: dict[int, TrialRow] = {}
    for which, how, value in events:
        number = len(rows)
        rebuilt = Projection(spec, [replace(row) for row in reversed(rows.values())])
        params = fed.propose(number)
        assert rebuilt.propose(number) == params
        fed.note_running(number, params)
        rows[number] = running(number, params)
        under_way = [row for row in rows.values() if row.status is Status.RUNNING]
        if len(under_way) == 3:
            row = ended(under_way[which % 3], how, value)
            rows[row.number] = row
            fed.tell(row)


def feed(spec: StudySpec, values: Mapping[int, float], count: int = 8) -> Projection:
    projection = Projection(spec, [])
    for number in range(count):
        params = spec.reference_params() if number == 0 else projection.propose(number)
        projection.note_running(number, params)
        if number in values:
            projection.tell(ended(running(number, params), "completed", values[number]))
    return projection


def test_a_proposal_depends_on_the_seed_the_number_and_the_history_alone() -> None:
    history = dict.fromkeys(range(6), 0.5)
    first = feed(SPEC, history).propose(8)
    assert feed(SPEC, history).propose(8) == first
    projection = feed(SPEC, history)
    assert [projection.propose(8), projection.propose(8)] == [first, first]
    assert feed(make_spec(seed=1), history).propose(8) != first
    assert feed(SPEC, {**history, 3: 1.0}).propose(8) != first  # the sampler has learned
    assert feed(make_spec("random"), {**history, 3: 1.0}).propose(8) == feed(make_spec("random"), history).propose(8)


def test_proposals_differ_and_make_valid_configurations() -> None:
    projection = Projection(SPEC, [])
    proposals: list[Params] = []
    for number in range(12):
        proposals.append(projection.propose(number))
        SPEC.config(proposals[-1])
        projection.tell(ended(running(number, proposals[-1]), "completed", float(number)))
    assert len({tuple(params.values()) for params in proposals}) == 12
    assert {params["kl_control"] for params in proposals} == {"fixed", "adaptive"}
    for params in proposals:
        assert ("kl_coef" in params, "kl_target" in params) == (
            (True, False) if params["kl_control"] == "fixed" else (False, True)
        )


def test_tpe_begins_after_the_startup_trials_that_were_told() -> None:
    """Before, it proposes what random search does, whatever runs or failed meanwhile."""
    spec = make_spec(startup_trials=3)

    def proposal(*hows: str, startup_trials: int = 3) -> Params:
        projection = Projection(make_spec(startup_trials=startup_trials), [])
        for number, how in enumerate(hows):
            params: Params = {**spec.reference_params(), "learning_rate": 1e-4 * (number + 1), "vf_coef": 0.7}
            projection.note_running(number, params)
            if how != "running":
                projection.tell(ended(running(number, params), how, 1.0))
        return projection.propose(len(hows))

    at_random = proposal(*["running"] * 5)
    assert proposal("completed", "stopped", "failed", "failed", "running") == at_random
    assert proposal("completed", "stopped", "completed", "failed", "running") != at_random
    assert proposal(*["completed"] * 5, startup_trials=6) == at_random


def test_a_running_trial_is_kept_away_from() -> None:
    """With the constant liar a running trial counts as a bad one until it is told."""
    search = {"search": {"learning_rate": "advised"}}
    spec = make_spec(startup_trials=1, **search)
    rows = [
        trial_row(number, params={"learning_rate": rate}, value=value, kl=5.0)
        for number, (rate, value) in enumerate([(1e-3, 1.0), (2e-5, 0.0), (3e-5, 0.1)])
    ]
    crowd = [running(number, {"learning_rate": 1e-3}) for number in range(3, 15)]
    other = [running(number, {"learning_rate": 2e-5}) for number in range(3, 15)]
    assert Projection(spec, rows + crowd).propose(15) != Projection(spec, rows + other).propose(15)


def learn(spec: StudySpec, told: str) -> list[float]:
    """The learning rates proposed after ten trials, of which the fast ones ended in `told` with the best values."""
    rows = []
    for number in range(10):
        rate = 1e-5 * 1.8**number
        row = running(number, {"learning_rate": rate})
        rows.append(ended(row, told if number >= 5 else "completed", 0.1 * number))
    return [
        float(Projection(spec, [*rows, *(running(10 + i, {}) for i in range(ahead))]).propose(10 + ahead)["learning_rate"])  # type: ignore[arg-type]
        for ahead in range(20)
    ]  # fmt: skip


def test_the_sampler_goes_where_the_value_is_and_flees_where_the_kl_was() -> None:
    spec = make_spec(startup_trials=1, search={"learning_rate": "advised"})
    border = 1e-5 * 1.8**4.5
    high = sorted(learn(spec, "completed"))
    low = sorted(learn(spec, "kl_limit"))
    assert high[10] > border > low[10]


def test_trial_0_outside_a_range_is_left_out_there_and_counts_elsewhere() -> None:
    """TRL's vf_coef is 0.1, and this study searches 0.5 to 1."""
    reference = SPEC.reference_params()
    assert reference["vf_coef"] == 0.1
    rows = [trial_row(0, params=reference, value=3.0)]
    rows += [trial_row(n, params={**reference, "vf_coef": 0.5 + n / 10, "learning_rate": 1e-5 * n}) for n in (1, 2, 3)]
    proposal = Projection(SPEC, rows).propose(4)
    assert 0.5 <= float(proposal["vf_coef"]) <= 1.0  # type: ignore[arg-type]
    otherwise = [replace(rows[0], params={**reference, "vf_coef": 0.2}), *rows[1:]]
    assert Projection(SPEC, otherwise).propose(4) == proposal
    elsewhere = [replace(rows[0], params={**reference, "learning_rate": 3e-3}), *rows[1:]]
    assert Projection(SPEC, elsewhere).propose(4) != proposal


def test_trials_of_earlier_ranges_and_dimensions_are_no_obstacle() -> None:
    rows = [trial_row(n, params={"learning_rate": 1e-6, "gamma": 0.5 + n / 10}) for n in range(4)]
    proposal = Projection(SPEC, rows).propose(4)
    assert proposal == Projection(SPEC, [trial_row(n, status=Status.FAILED) for n in range(4)]).propose(4)
    SPEC.config(proposal)


def test_numbers_without_gaps() -> None:
    projection = Projection(SPEC, [])
    with pytest.raises(ValueError, match="trial 1 cannot be proposed: the next one is 0"):
        projection.propose(1)
    with pytest.raises(ValueError, match="trial 1 cannot be noted before trial 0"):
        projection.note_running(1, {})


# The mirror


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
    with pytest.raises(StoreError, match='"mine" .* was not written: .*another study of that name'):
        Mirror(storage, "mine").update(finished_rows(), SPEC)
    assert len(loaded(storage).trials) == 1


def test_what_fails_in_optunas_tables_is_one_store_error(storage: str) -> None:
    mirror = Mirror(storage, "mine")
    mirror.update(finished_rows()[:1], SPEC)
    mirror.close()
    with sqlite3.connect(storage.removeprefix("sqlite:///")) as database:
        database.execute("DROP TABLE trial_params")
        database.execute("CREATE TABLE trial_params (nothing INTEGER)")
    with pytest.raises(StoreError) as raised:
        mirror.update(finished_rows(), SPEC)
    assert str(raised.value).startswith('the copy of study "mine" for Optuna\'s own tools could not be written: ')
    assert "\n" not in str(raised.value)
    assert mirrored_states(storage) == [TrialState.COMPLETE]


def mirrored_states(storage: str) -> list[TrialState]:
    with sqlite3.connect(storage.removeprefix("sqlite:///")) as database:
        return [TrialState[state] for (state,) in database.execute("SELECT state FROM trials ORDER BY number")]

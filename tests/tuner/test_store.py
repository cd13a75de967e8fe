"""The store: leases, attempts, and what numbers a column cannot hold."""

import functools
import math
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ppo_core.errors import StudyError
from ppo_core.report import Sample, StepReport, TokenReadings
from tests.processes import spawned
from tests.tuner import stores
from tests.tuner.stores import pretend
from tests.waiting import until
from tuner.store import LEASE_SECONDS, Lease, NewTrial, Outcome, Store, TrialRow, processes
from tuner.store.trials import copy_steps
from tuner.study.status import Origin, Reason, Status, Wanted


@pytest.fixture(params=stores.CASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return stores.empty(request.param, tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    made = Store.open(url, create=True)
    made.create_study("a", {"trials": 3})
    yield made
    made.close()


def add_trial(store: Store, lease: Lease, number: int = 0) -> TrialRow:
    return store.add_trial(lease, NewTrial(number, Origin.SAMPLED, config={"seed": 1}, params={"lam": 0.9}, threads=2))


def test_a_lease_is_given_once_until_it_is_released(store: Store) -> None:
    lease = store.acquire("a")
    assert store.study("a").has_controller
    with pytest.raises(StudyError, match=f'study "a" is run by process {os.getpid()} on {socket.gethostname()}'):
        store.acquire("a")
    store.update_study(lease, stopping_at=time.time())
    assert store.study("a").is_stopping
    store.release(lease)
    assert not store.study("a").has_controller and not store.study("a").is_stopping
    assert store.acquire("a").token == lease.token + 1
    assert not store.study("a").is_stopping


def test_a_dead_processs_lease_is_taken_over_at_once_and_can_write_no_more(store: Store) -> None:
    old = store.acquire("a")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    pretend(store, lease_pid=gone.pid)
    new = store.acquire("a")
    with pytest.raises(StudyError, match="lost the study's lease"):
        add_trial(store, old)
    assert add_trial(store, new).number == 0
    store.release(old)
    assert store.study("a").has_controller


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_living_lease_holds_when_clocks_are_set(store: Store, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    store.acquire("a")
    now, began = time.time, psutil.Process().create_time()
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: began + 3600 * hours)  # it reckons from the boot
    assert store.study("a").has_controller
    with pytest.raises(StudyError, match=r"stop that one first$"):
        store.acquire("a")


@pytest.mark.parametrize(
    "elsewhere",
    [{"lease_pid_space": space} for space in ("another-boot pid:[4026531836]", "another container", None)]
    + [{"lease_host": "elsewhere"}],
)
@pytest.mark.parametrize(("age", "held"), [(LEASE_SECONDS - 30, True), (LEASE_SECONDS + 1, False)])
def test_a_process_elsewhere_holds_its_lease_as_long_as_it_renews_it(
    store: Store, elsewhere: dict[str, str | None], age: float, held: bool
) -> None:
    store.acquire("a")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    renewed = store.study("a").lease_renewed_at
    assert renewed is not None
    pretend(store, lease_pid=gone.pid, lease_renewed_at=renewed - age, **elsewhere)
    assert store.study("a").has_controller is held
    if held:
        with pytest.raises(StudyError, match=r"stop that one first, or wait ([12]?\d|30) s if it is dead$"):
            store.acquire("a")
    else:
        assert store.acquire("a").token == 2


def test_another_hosts_lease_is_read_by_that_hosts_clock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.acquire("a")
    pretend(store, lease_host="elsewhere")
    seen = store.study("a")
    monkeypatch.setattr(time, "time", lambda: 0.0 if seen.read_at is None else seen.read_at + 10 * LEASE_SECONDS)
    assert seen.has_controller  # what was read stays as it was
    if not store.url.drivername.startswith("sqlite"):
        assert store.study("a").has_controller  # and PostgreSQL's clock is not this host's


def test_of_many_that_want_a_lease_at_once_one_gets_it(url: str) -> None:
    Store.open(url, create=True).create_study("a", {})
    gate, given, refused = threading.Barrier(6), [], []

    def want() -> None:
        store = Store.open(url)
        gate.wait()
        try:
            given.append(store.acquire("a"))
        except StudyError as error:
            refused.append(str(error))
        store.close()

    run_at_once(want)
    assert len(given) == 1 and len(refused) == 5


def test_a_store_made_by_many_at_once_is_made_once(url: str) -> None:
    gate, made = threading.Barrier(6), []

    def make() -> None:
        gate.wait()
        store = Store.open(url, create=True)
        made.append(store.create_study("a", {}).id)
        store.close()

    run_at_once(make)
    assert len(made) == 6 and len(set(made)) == 1


def run_at_once(target: object) -> None:
    threads = [threading.Thread(target=target) for _ in range(6)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_store_whose_making_was_cut_off_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.store import schema

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    path = str(tmp_path / "store.db")
    monkeypatch.setattr(schema.meta, "insert", cut)
    with pytest.raises(KeyboardInterrupt):
        Store.open(path, create=True)
    monkeypatch.undo()
    assert Store.open(path, create=True).studies() == []


def test_an_attempt_drops_what_lies_after_its_checkpoint(store: Store) -> None:
    lease = store.acquire("a")
    trial = add_trial(store, lease)
    assert store.last_step(trial.id) is None
    store.begin_attempt(lease, store.trial(store.study("a"), 0), None)
    for step in range(5):
        samples = (Sample(0, "p", f"r{step}", 1.0, 2.0, 3),)
        store.add_step(lease, trial.id, StepReport(step, 16 * step, {"objective/kl_exact": 0.5 * step}, samples), 2.0)
    for step in (0, 1):
        store.add_test_reading(lease, trial.id, step, None, "gone")
    assert store.last_step(trial.id) == 4 and store.trial(store.study("a"), 0).episodes == 64
    store.begin_attempt(lease, store.trial(store.study("a"), 0), 2)
    assert [row["step"] for row in store.steps([trial.id], [])] == [0, 1, 2]
    assert [row["response"] for row in store.samples([trial.id])] == ["r0", "r1", "r2"]
    row = store.trial(store.study("a"), 0)
    assert (row.attempts, row.episodes, row.seconds) == (2, 32, 10.0)  # what was lost was paid for all the same
    store.begin_attempt(lease, store.trial(store.study("a"), 0), None)
    assert store.last_step(trial.id) is None and store.trial(store.study("a"), 0).episodes == 0
    assert list(store.test_readings([trial.id])) == [(trial.id, 0)], "the SFT policy's, which is the same"


def test_a_fork_has_its_parents_steps_and_episodes_up_to_where_it_begins(store: Store) -> None:
    lease = store.acquire("a")
    parent, fork, other = (add_trial(store, lease, number) for number in range(3))
    for trial, last in ((parent, 4), (other, 9)):
        for step in range(last + 1):
            store.add_step(lease, trial.id, StepReport(step, 16 * step, {"objective/scores": 1.5 * step}), 1.0)
    store._change(functools.partial(copy_steps, parent_id=parent.id, fork=fork, last=2))
    assert [row.episodes for row in store.trials(store.study("a"))] == [64, 32, 144]
    read = store.steps([fork.id], ("objective/scores",))
    assert [(row["step"], row["episode"], row["objective/scores"]) for row in read] == [
        (0, 0, 0.0), (1, 16, 1.5), (2, 32, 3.0)
    ]  # fmt: skip


def test_a_new_sqlite_store_lets_readers_read_while_it_is_written(tmp_path: Path) -> None:
    Store.open(f"sqlite:///{tmp_path}/s.db", create=True).close()
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_numbers_that_are_not_finite_leave_their_columns_empty(store: Store) -> None:
    lease = store.acquire("a")
    trial = add_trial(store, lease)
    metrics = {"eval/reward": math.nan, "eval/kl": math.inf, "objective/scores": 1.5, "own": 2.5}
    store.add_step(lease, trial.id, StepReport(0, 0, metrics, (Sample(0, "p", "r", math.nan, 1.0, 2),)), 1.0)
    (row,) = store.steps([trial.id], ["eval/reward", "eval/kl", "objective/scores"])
    assert (row["eval/reward"], row["eval/kl"], row["objective/scores"]) == (None, None, 1.5)
    assert store.steps([trial.id], [], evaluations_only=True) == []
    assert store.samples([trial.id])[0]["reward"] is None
    assert store.own_metrics(trial.id) == {0: {"own": 2.5}}


def test_a_samples_parts_and_on_request_tokens_come_back(store: Store) -> None:
    lease = store.acquire("a")
    trial = add_trial(store, lease)
    tokens = TokenReadings(
        ("a\n", "\u202e"), (-0.123456, -1e-9), (1234.56, 0.0), (0.1, math.inf), (0.5, -0.5), (1.0, 2.0)
    )
    with_all = Sample(0, "p", "r", 1.0, 2.0, 2, {"kind": 0.123456, "brief": math.nan}, tokens)
    store.add_step(lease, trial.id, StepReport(0, 0, {}, (with_all, Sample(1, "q", "s", 1.0, 2.0, 3))), 1.0)
    first, second = store.samples([trial.id])
    assert first["parts"] == {"kind": 0.123456, "brief": None} and second["parts"] == {}
    assert "tokens" not in first
    first, second = store.samples([trial.id], with_tokens=True)
    assert first["tokens"]["kls"] == [0.1, None] and second["tokens"] is None
    read = store.sample_tokens(trial.id, 0, 0)
    assert read is not None and read.texts == tokens.texts
    assert (read.logprobs, read.log_ratios) == ((-0.1235, -1e-9), (1235.0, 0.0))
    assert read.kls[0] == 0.1 and math.isnan(read.kls[1])
    assert (read.advantages, read.values) == (tokens.advantages, tokens.values)
    assert store.sample_tokens(trial.id, 0, 1) is None and store.sample_tokens(trial.id, 1, 0) is None


def test_a_trial_that_nobody_runs_is_interrupted_until_held_again(store: Store) -> None:
    lease = store.acquire("a")
    for number in (0, 1):
        trial = add_trial(store, lease, number)
    store.finish_trial(lease, trial.id, Outcome(Status.COMPLETED))

    def shown() -> list[str]:
        rows = store.trials(store.study("a"))
        assert [row.status for row in rows] == [Status.RUNNING, Status.COMPLETED]
        assert store.trial(store.study("a"), 0).shown_status == rows[0].shown_status
        return [row.shown_status for row in rows]

    assert shown() == ["running", "completed"]
    store.release(lease)
    assert shown() == ["interrupted", "completed"]
    store.acquire("a")
    assert shown() == ["running", "completed"]


@pytest.mark.parametrize(
    ("wanted", "status", "is_aside"),
    [(None, Status.WAITING, True), (Wanted.PAUSE, Status.PAUSED, True), (Wanted.STOP, Status.RUNNING, False)],
)
def test_a_trial_without_a_worker_waits_or_does_what_was_ordered(
    store: Store, wanted: Wanted | None, status: Status, is_aside: bool
) -> None:
    lease, reason = store.acquire("a"), Reason("outage", "no answer")
    trial = add_trial(store, lease)
    store.begin_attempt(lease, store.trial(store.study("a"), 0), None)
    stores.execute(store, "UPDATE ppo_trials SET wanted = " + ("NULL" if wanted is None else f"'{wanted.value}'"))
    assert store.set_aside(lease, trial.id, Outcome(Status.PAUSED), reason) is is_aside
    row = store.trial(store.study("a"), 0)
    assert (row.status, row.reason) == (status, reason if status is Status.WAITING else None)


def test_a_process_is_known_by_what_no_clock_changes() -> None:
    mine = processes.this_process()
    assert processes.is_alive(mine) is True
    assert processes.is_alive(replace(mine, started=mine.started + 1)) is False, "a later process of that id"
    for elsewhere in (replace(mine, host="another"), replace(mine, space="another")):
        assert processes.is_alive(elsewhere) is None
    with spawned([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ended:
        theirs = replace(mine, pid=ended.pid, started=processes._state_and_start(ended.pid)[1])  # type: ignore[index]
        assert processes.is_alive(theirs) is True
        ended.kill()
        until(lambda: processes.is_alive(theirs) is False)  # a zombie, which nobody has waited for
        ended.communicate()
        assert processes.is_alive(theirs) is False


def test_where_no_process_can_be_seen_the_leases_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROC", tmp_path)  # a system without it
    processes.pid_space.cache_clear()
    try:
        assert processes.is_alive(processes.this_process()) is None
    finally:
        processes.pid_space.cache_clear()


# What a model or a person wrote, and numbers that do not fit


def test_any_text_and_any_number_is_stored(store: Store) -> None:
    """PostgreSQL holds no NUL, no Integer over 2^31 - 1 and no infinity in JSON; no database half a UTF-16 character."""
    study, lease = store.study("a"), store.acquire("a")
    config = {"seed": 2**31 + 5, "run": "\0"}
    row = store.add_trial(lease, NewTrial(0, Origin.SAMPLED, config, {}, 1, label="a\0b\udcff"))
    row = store.begin_attempt(lease, row, None)
    readings = TokenReadings(("\0", "b"), *[(0.5, 0.5)] * 5)
    sample = Sample(0, "pro\0mpt", "re\0sponse", 1.0, 0.5, 2, parts={"\0": 1.0}, tokens=readings)
    store.add_step(lease, row.id, StepReport(0, 0, {"objective/kl_exact": math.inf}, samples=(sample,)), 1.0)
    evidence = ({"step": 1, "objective/kl_exact": math.nan}, {"step": 2, "objective/kl_exact": -math.inf})
    reason = Reason("nonfinite", "KL is \0", "objective/kl_exact", math.inf, -math.inf, 1, 2, evidence, log="\0")
    store.finish_trial(lease, row.id, Outcome(Status.PRUNED, reason))
    store.place_order(study, "enqueue", None, {"values": {"kl_coef": math.inf}, "label": "c\0d"})
    (order,) = store.orders(study)
    assert order.arguments == {"values": {"kl_coef": "inf"}, "label": "c\ufffdd"}
    (found,) = store.trials(study)
    assert found.label == "a\ufffdb\ufffd" and found.seed == 2**31 + 5
    assert found.reason is not None and (found.reason.value, found.reason.limit) == (math.inf, -math.inf)
    assert str(found.reason.evidence) == str(evidence)
    (kept,) = store.samples([row.id])
    assert (kept["prompt"], kept["response"]) == ("pro\ufffdmpt", "re\ufffdsponse")
    tokens = store.sample_tokens(row.id, 0, 0)
    assert tokens is not None and tokens.texts == ("\ufffd", "b")

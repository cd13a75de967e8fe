"""File work beside the loop: in order, collected in the loop's thread, and never in the way of steps, orders or lease."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tuner.quick_study import NAME, curves, quick_spec, rows, run, storage
from tests.tuner.quick_trainer import GATED_STEP
from tests.tuner.test_orders import place
from tests.waiting import SECONDS, until
from tuner.control.events import Event, OrderDecided, TrialEnded, TrialStepped
from tuner.store import OrderState, Store
from tuner.study.status import Status

pytestmark = pytest.mark.slow


class Blocked:
    """A function of the file work that waits at its first call until `wanted` has all happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str, wanted: set[str]) -> None:
        self.began, self._gate = threading.Event(), threading.Event()
        self._wanted = wanted
        self._was_in_time: list[bool] = []
        module, _, name = path.rpartition(".")
        self._real: Callable[..., Any] = getattr(pytest.importorskip(module), name)
        monkeypatch.setattr(path, self)

    def __call__(self, *given: Any, **named: Any) -> Any:
        if not self.began.is_set():
            self.began.set()
            self._was_in_time.append(self._gate.wait(SECONDS))
        return self._real(*given, **named)

    def note(self, what: str) -> None:
        """Note what happens; what happens before the function was called does not count."""
        if self.began.is_set():
            self._wanted.discard(what)
            if not self._wanted:
                self._gate.set()

    @property
    def was_passed(self) -> bool:
        """Whether all that was wanted happened while the function waited."""
        return self._was_in_time == [True]


@pytest.mark.parametrize(
    "path", ["tuner.judge.forks.fork_files", "ppo_core.checkpoint.by_rank", "tuner.control.trial_files.to_delete"]
)
def test_steps_orders_and_lease_wait_for_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr("tuner.control.controller.RENEW_SECONDS", -1.0)
    blocked = Blocked(monkeypatch, path, {"3 steps", "lease renewed", "enqueue decided"})
    renew = Store.renew
    store = Store.open(storage(tmp_path), create=True)
    steps: list[int] = []

    def noted_renew(self: Store, *given: Any) -> None:
        renew(self, *given)
        blocked.note("lease renewed")

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded) and event.row.number == 0:
            place(store, "fork", 0, values={"total_episodes": 320})
        if isinstance(event, OrderDecided):
            assert event.order.state is OrderState.DONE, event.order.outcome
            blocked.note(f"{event.order.kind} decided")
        if isinstance(event, TrialStepped) and event.number == 1:
            assert blocked.began.wait(SECONDS)  # the work was given when trial 0 ended; its steps are not to pass by
            if not steps:
                place(store, "enqueue", values={"cliprange": 0.15})
            steps.append(event.report.step)
            if len(steps) == 3:
                blocked.note("3 steps")

    monkeypatch.setattr(Store, "renew", noted_renew)
    finished, _ = run(tmp_path, quick_spec(trials=2), workers=1, on_event=listen)
    assert finished and blocked.was_passed
    assert [row.status for row in rows(tmp_path)] == [Status.COMPLETED] * 4
    assert sorted(order.kind for order in store.orders(store.study(NAME))) == ["enqueue", "fork"]
    assert not list((tmp_path / "runs" / NAME).glob("fork-*"))
    store.close()
    fork = next(row for row in rows(tmp_path) if row.parent == 0)
    assert curves(tmp_path)[fork.number][:4] == curves(tmp_path)[0][:4]


def test_a_trial_steps_while_another_ones_checkpoint_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(monkeypatch, "ppo_core.checkpoint.latest", {"trial 1 ended"})
    workers: dict[int, int] = {}

    def listen(event: Event) -> None:
        if isinstance(event, TrialStepped) and event.report.step == GATED_STEP - 1:
            workers[event.number] = int(event.report.metrics["quick/pid"])
            if len(workers) == 2 and not blocked.began.is_set():
                until(lambda: len(list(tmp_path.glob("waiting-*"))) == 2)
                psutil.Process(workers[0]).kill()
        if isinstance(event, TrialEnded):
            blocked.note(f"trial {event.row.number} ended")

    def open_gate() -> None:
        assert blocked.began.wait(SECONDS)
        (tmp_path / "gate").touch()

    opener = threading.Thread(target=open_gate)
    opener.start()
    finished, _ = run(tmp_path, quick_spec("gated", trials=2), workers=2, on_event=listen)
    opener.join()
    assert finished and blocked.was_passed
    assert [row.attempts for row in rows(tmp_path)] == [2, 1]
    run(tmp_path / "unbroken", quick_spec(trials=2))
    assert curves(tmp_path) == curves(tmp_path / "unbroken")

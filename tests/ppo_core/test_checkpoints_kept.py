"""Which checkpoints stay: of a trainer that writes real ones, evaluated as each test says."""

import math
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.checkpoint import CheckpointKeeper
from ppo_core.errors import CheckpointError, NoRoomError
from ppo_core.report import StepReport

BUDGET = 10.0
DiskUsage = namedtuple("DiskUsage", ("total", "used", "free"))


class Writer:
    """Saves a file of one kilobyte; iterating and evaluating are not of use here."""

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        checkpoint.write(folder, {"a.bin": lambda path: path.write_bytes(b"a" * 1000) and None}, state={}, extra=extra)


class FullDisk(Writer):
    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        raise CheckpointError("no space left")


class Told(Writer):
    def __init__(self, one: int) -> None:
        self.one = one

    def checkpoint_bytes(self) -> int:
        return self.one


def report(step: int, reward: float | None = None, kl: float = 1.0, se: float | None = None) -> StepReport:
    """Return the report of a step of 16 episodes, evaluated where a reward is given."""
    evaluation = {} if reward is None else {"eval/reward": reward, "eval/kl": kl}
    return StepReport(step, 16 * step, evaluation if se is None else {**evaluation, "eval/kl_se": se})


def keeper(folder: Path, **settings: Any) -> CheckpointKeeper:
    return CheckpointKeeper(folder, kl_budget=BUDGET, **settings)


def save(kept: CheckpointKeeper, *reports: StepReport, trainer: Any = None) -> None:
    for one in reports:
        kept.save(trainer or Writer(), one)


def steps(folder: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.complete(folder)]


def damage(folder: Path, step: int) -> None:
    (checkpoint.step_folder(folder, step) / "a.bin").write_bytes(b"b" * 1000)


RUN = (report(0, 0.2, 0.0), report(1, 3.0, 9.0), report(2, 2.0, 5.0), report(3, 9.0, 10.5), report(4), report(5))
"""Step 1 is the best within the budget, step 3 better beyond it."""


def test_the_newest_two_and_the_best_within_the_budget_stay(tmp_path: Path) -> None:
    save(keeper(tmp_path), *RUN)
    assert steps(tmp_path) == [1, 4, 5]
    assert checkpoint.best(tmp_path, BUDGET) == tmp_path / "step-000001"
    assert checkpoint.best(tmp_path, 8.0) is None


def test_a_run_that_is_taken_up_again_knows_its_best_from_the_folder(tmp_path: Path) -> None:
    save(keeper(tmp_path), *RUN)
    again = keeper(tmp_path)
    assert not again.is_due(report(6, 2.9)) and again.is_due(report(6, 3.1))
    save(again, report(6, 2.9), report(7), report(8))
    assert steps(tmp_path) == [1, 7, 8]
    save(again, report(9, 3.1), report(10), report(11))
    assert steps(tmp_path) == [9, 10, 11]


def test_the_evaluation_and_the_drivers_own_are_in_the_manifest(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    folder = kept.save(Writer(), report(2, 3.0, 9.0), {"guard": [1]})
    extra = {"guard": [1], "episode": 32, "evaluation": {"reward": 3.0, "kl": 9.0}}
    assert checkpoint.verify(folder)["extra"] == extra
    assert "evaluation" not in checkpoint.verify(kept.save(Writer(), report(3)))["extra"]


def test_the_best_is_within_the_budget_with_its_standard_error(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    save(kept, report(1, 3.0, 9.0, 0.5), report(2, 4.0, 9.75, 0.5), report(3), report(4))
    assert steps(tmp_path) == [1, 3, 4], "9.75 + 0.5 is over 10"
    assert checkpoint.verify(tmp_path / "step-000001")["extra"]["evaluation"] == {
        "reward": 3.0,
        "kl": 9.0,
        "kl_se": 0.5,
    }
    assert not kept.is_due(report(5, 4.0, 9.75, 0.5)) and kept.is_due(report(5, 4.0, 9.75, 0.25))
    assert checkpoint.best(tmp_path, 9.4) is None and checkpoint.best(tmp_path, 9.5) is not None


def test_a_run_keeps_some_of_its_front_where_that_is_asked_for(tmp_path: Path) -> None:
    rising = [report(n, 0.1 * n, 1.5 * n) for n in range(10)]  # over the budget of 10 from step 7 on
    save(keeper(tmp_path, front=3), *rising)
    assert steps(tmp_path) == [2, 4, 6, 8, 9], "the best is 6, the newest are 8 and 9; 9 is of the front, too"
    save(keeper(tmp_path, front=3), report(10, 2.0, 2.0), report(11))
    assert steps(tmp_path) == [10, 11], "which beats all others at a lower KL than theirs"


def test_a_run_that_is_never_within_its_budget_keeps_some_of_its_front(tmp_path: Path) -> None:
    save(keeper(tmp_path, front=2), *(report(n, 0.1 * n, 10.5 + n) for n in range(1, 8)))
    assert checkpoint.best(tmp_path, BUDGET) is None and steps(tmp_path) == [1, 5, 6, 7]


def test_the_front_gives_way_where_the_disk_is_full(tmp_path: Path) -> None:
    kept = keeper(tmp_path, front=3)
    save(kept, *(report(n, 0.1 * n, 1.5 * n) for n in range(9)))
    before = steps(tmp_path)
    assert before == [2, 4, 6, 7, 8]

    class Full(Writer):
        def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
            if (tmp_path / "step-000002").exists():
                raise NoRoomError("no space left")
            super().save(folder, extra)

    save(kept, report(9), trainer=Full())
    assert steps(tmp_path) == [6, 7, 8, 9]
    (tmp_path / "step-000002").mkdir()
    with pytest.raises(NoRoomError):  # nothing is left that could give way
        save(kept, report(10), trainer=Full())


def test_a_new_best_is_always_due(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    save(kept, report(1, 2.0, 5.0))
    assert kept.is_due(report(2, 2.1, 9.9)) and kept.is_due(report(2, 2.0, 4.9))
    for other in (report(2), report(2, 2.0, 5.0), report(2, 9.0, 10.1), report(2, math.nan), report(2, 9.0, math.nan)):
        assert not kept.is_due(other)


def test_with_a_front_the_start_and_any_evaluation_are_due(tmp_path: Path) -> None:
    start, far = report(0, 1.0, 0.0), report(1, 0.5, 99.0)
    assert [keeper(tmp_path, front=3).is_due(one) for one in (start, far, report(1))] == [True, True, False]
    assert [keeper(tmp_path, every_seconds=0.0).is_due(one) for one in (start, report(1))] == [False, True]
    assert not keeper(tmp_path).is_due(far)


def test_episodes_are_counted_on_when_a_run_is_taken_up_again(tmp_path: Path) -> None:
    settings = {"every_episodes": 40}
    kept = keeper(tmp_path, **settings)
    assert [step for step in range(6) if kept.is_due(report(step))] == [3, 4, 5]  # 48 episodes are the first over 40
    save(kept, report(3))
    for one in (kept, keeper(tmp_path, **settings)):
        assert [step for step in range(4, 8) if one.is_due(report(step))] == [5, 6, 7]  # 80 is the next
    assert not keeper(tmp_path).is_due(report(100))


def test_a_damaged_best_is_dropped_by_name_for_the_next_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(keeper(tmp_path), report(1, 3.0), report(2, 2.0), report(3))
    damage(tmp_path, 1)
    again = keeper(tmp_path)
    assert caplog.messages == [f"best checkpoint dropped: {tmp_path}/step-000001/a.bin is missing or damaged"]
    assert again.is_due(report(4, 2.5)) and not again.is_due(report(4, 1.9))
    save(again, report(4))
    assert steps(tmp_path) == [2, 3, 4]
    (tmp_path / "step-000002" / checkpoint.MANIFEST).write_text("{")
    assert checkpoint.best(tmp_path, BUDGET) is None
    assert "step-000002/manifest.json is damaged" in caplog.messages[-1]


def test_one_step_stays_where_that_is_asked_for(tmp_path: Path) -> None:
    kept = keeper(tmp_path, always=2)
    save(kept, *RUN)
    assert steps(tmp_path) == [1, 2, 4, 5]

    class Full(Writer):
        def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
            raise NoRoomError("no space left")

    with pytest.raises(NoRoomError):
        save(kept, report(6), trainer=Full())
    assert steps(tmp_path) == [1, 2, 4, 5], "nor does it give way where the disk is full"


def test_what_cannot_be_written_costs_no_checkpoint(tmp_path: Path) -> None:
    kept = keeper(tmp_path)
    save(kept, report(1, 3.0), report(2), report(3))
    with pytest.raises(CheckpointError):
        save(kept, report(4, 9.0), trainer=FullDisk())
    assert steps(tmp_path) == [1, 2, 3]
    assert kept.is_due(report(4, 9.0))  # it is the best only once it is saved


# How much room they take


def test_room_that_the_runs_checkpoints_hold_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(keeper(tmp_path), *RUN)
    held = sum(map(checkpoint.bytes_of, checkpoint.complete(tmp_path)))
    assert 3000 < held < 5000  # three files of a kilobyte and their manifests
    for free, total, kind in ((8000 - held, 8000, None), (7999 - held, 8000, NoRoomError), (0, 7999, CheckpointError)):
        disk = DiskUsage(total, total - free, free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, disk=disk: disk)
        if kind is None:
            line = checkpoint.require_room(Told(2000), tmp_path)  # type: ignore[arg-type]
            assert line == f"checkpoints: about 2.0 kB each, up to 3 kept and one being written, in {tmp_path}"
            continue
        with pytest.raises(CheckpointError, match=r"too little room for checkpoints in .* more") as caught:
            checkpoint.require_room(Told(2000), tmp_path)  # type: ignore[arg-type]
        assert type(caught.value) is kind


def test_bytes_are_told_in_the_unit_that_fits() -> None:
    counts = (1_000, 999_999, 1_000_000, 12_345_678, 1_000_000_000)
    assert [checkpoint.size(count) for count in counts] == ["1.0 kB", "1,000.0 kB", "1.0 MB", "12.3 MB", "1.0 GB"]


def test_one_that_cannot_be_removed_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keeper(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        save(kept, *RUN[:4])
    assert steps(tmp_path) == [0, 1, 2, 3]
    save(kept, *RUN[4:])
    assert steps(tmp_path) == [1, 4, 5]

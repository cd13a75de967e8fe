"""What a quota costs: real folders of checkpoints of a kilobyte each."""

import os
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.errors import ConfigError
from tests.tuner.trial_rows import trial_row
from tuner.quota import Dropped, Holdings, enforce, parse_size
from tuner.status import PausedBy, Status
from tuner.store import TrialRow

BUDGET = 10.0
BYTES = 1000
RUNNING = dict[str, Any](status=Status.RUNNING, value=None, kl=None, ended_at=None)
PAUSED, WAITING = RUNNING | {"status": Status.PAUSED}, RUNNING | {"status": Status.WAITING}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GB", 20 * 10**9), ("500 MB", 500 * 10**6), ("1.5TB", 1_500_000_000_000), ("2 gib", 2**31), (1000, 1000),
        ("7", 7), (2.5e9, 2_500_000_000), (" 3kB ", 3000), ("1B", 1),
    ],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text, "max_disk") == size


@pytest.mark.parametrize("text", ["", "GB", "0", "0.1", "-5GB", "5 GBs", "5e9GB", "1,5TB", None, True, float("nan")])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(
        ConfigError, match=r"run.max_disk = .* is not allowed; expected a size over 0 such as 20GB, 500 MB"
    ):
        parse_size(text, "run.max_disk")


def test_a_unit_that_is_none_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'did you mean "GB"\?'):
        parse_size("5 GBs", "max_disk")


class Checkpoints:
    """A study's folder: checkpoints by trial and step, the first written longest ago."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = 1_000_000_000
        self.holdings = Holdings(folder, BUDGET)

    def save(self, number: int, steps: dict[int, float | None]) -> None:
        """Save a trial's checkpoints; the steps with a number were evaluated to that reward."""
        for step, reward in steps.items():
            path = checkpoint.step_folder(self.folder / str(number), step)
            evaluated = {} if reward is None else {"evaluation": {"reward": reward, "kl": 5.0}}
            files = {"a.bin": lambda file: file.write_bytes(b"a" * BYTES) and None}
            checkpoint.write(path, files, state={}, extra={"episode": step, **evaluated})
            self.clock += 60
            os.utime(path / checkpoint.MANIFEST, (self.clock, self.clock))

    def left(self) -> set[tuple[int, int]]:
        paths = self.folder.glob("*/step-*")
        return {(int(path.parent.name), checkpoint.step_of(path)) for path in paths}

    def drop(self, count: int, trials: list[TrialRow], running: tuple[int, ...] = (), **settings: Any) -> list[Any]:
        """Enforce a quota of about `count` checkpoints and return what it cost, as (trial, step), in order."""
        most = max(map(checkpoint.bytes_of, self.folder.glob("*/step-*")))
        before, limit = self.left(), count * most
        dropped = enforce(self.folder, trials, running, limit, holdings=self.holdings, **settings)
        lost = [(one.trial, one.step) for one in dropped]
        assert before - self.left() == set(lost) and len(lost) == len(set(lost))
        return lost


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


@pytest.fixture
def study(checkpoints: Checkpoints) -> list[TrialRow]:
    """A study with every kind of trial; 15 checkpoints."""
    checkpoints.save(0, {2: 3.0, 5: 1.0, 9: None, 10: None})  # runs: 5 is surplus
    checkpoints.save(1, {4: None, 6: 1.0, 7: None})  # waits: 4 is surplus
    checkpoints.save(5, {8: 9.0})  # the best of all
    checkpoints.save(3, {3: None})  # was paused before trial 2
    checkpoints.save(2, {1: 2.0, 2: None})
    checkpoints.save(4, {5: 3.0, 8: None})
    checkpoints.save(6, {6: 4.0, 7: 1.0})
    return [
        trial_row(0, **RUNNING),
        trial_row(1, **WAITING),
        trial_row(2, **PAUSED),
        trial_row(3, **PAUSED),
        trial_row(4, value=3.0, violation=-1.0, ended_at=50.0),
        trial_row(5, value=9.0, value_step=8, violation=-1.0, ended_at=10.0),
        trial_row(6, status=Status.PRUNED, value=8.0, violation=0.5, ended_at=20.0),
    ]


ORDER = [(0, 5), (1, 4), (3, 3), (2, 1), (2, 2), (6, 7), (4, 8), (6, 6), (4, 5)]
KEPT = {(0, 2), (0, 9), (0, 10), (1, 6), (1, 7), (5, 8)}
"""Newest and best ones of those that run or wait, and the best trial's best."""


@pytest.mark.parametrize("count", [15, 14, 13, 11, 9, 6, 0])
def test_checkpoints_go_in_order_and_no_more_than_must(
    checkpoints: Checkpoints, study: list[TrialRow], count: int
) -> None:
    assert checkpoints.drop(count, study, (0,)) == ORDER[: 15 - count]
    assert checkpoints.left() == KEPT | set(ORDER[15 - count :])
    assert checkpoints.drop(count, study, (0,)) == []


def test_a_running_trial_keeps_its_two_newest_and_what_it_is_writing(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, {1: None, 2: None, 3: None})
    half = checkpoint.step_folder(checkpoints.folder / "0", 4)
    half.mkdir()
    (half / "a.bin").write_bytes(b"a" * BYTES)
    assert checkpoints.holdings.used((0,)) > 4 * BYTES
    assert checkpoints.drop(0, [trial_row(0, **RUNNING)], (0,)) == [(0, 1)]
    assert checkpoints.drop(0, [trial_row(0, **RUNNING)], ()) == [(0, 4), (0, 2)]  # interrupted: nobody writes
    assert checkpoints.left() == {(0, 3)}


def test_a_row_that_says_paused_does_not_count_while_a_worker_runs_the_trial(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, {1: 1.0, 2: None, 3: None})
    for status in (Status.PAUSED, Status.COMPLETED):
        assert checkpoints.drop(0, [trial_row(0, status=status)], (0,)) == []


def test_the_best_trial_keeps_its_newest_where_no_checkpoint_of_it_was_evaluated(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, {3: None})
    checkpoints.save(1, {3: None})
    rows = [trial_row(0, value=5.0, value_step=2), trial_row(1, value=2.0, value_step=2)]
    assert checkpoints.drop(0, rows) == [(1, 3)]


def test_the_answer_is_kept_also_of_a_trial_that_rests_and_under_another_rule(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, {1: 3.0, 2: None})
    rests = RUNNING | {"status": Status.PAUSED, "paused_by": PausedBy.STRATEGY}
    assert checkpoints.drop(0, [trial_row(0, **rests | {"value": 3.0, "kl": 5.0, "value_step": 1})]) == [(0, 2)]
    checkpoints.save(1, {4: 3.0, 6: 2.0})
    rows = [trial_row(1, value=2.5, value_step=6)]
    assert checkpoints.drop(0, rows, objective="end") == [], "its last evaluation is the answer"


FRONT = [(6, 7), (4, 5), (0, 9), (5, 8)]


@pytest.mark.parametrize("count", [13, 9, 7, 6])
def test_the_studys_front_goes_last_the_lowest_kl_first(
    checkpoints: Checkpoints, study: list[TrialRow], count: int
) -> None:
    order = [one for one in ORDER if one not in FRONT] + [(6, 7), (4, 5)]
    assert checkpoints.drop(count, study, (0,), front=FRONT) == order[: 15 - count]
    assert {(0, 9), (5, 8)} < checkpoints.left(), "a running trial's newest and the answer go never"


def test_what_was_dropped_is_told_with_its_size_and_what_follows(checkpoints: Checkpoints) -> None:
    checkpoints.save(7, {4: None})
    rows = [trial_row(7, **PAUSED)]
    size = checkpoints.holdings.used()
    (dropped,) = enforce(checkpoints.folder, rows, (), 0, holdings=checkpoints.holdings)
    assert dropped == Dropped(7, 4, size, "paused; the trial restarts from step 0 when it resumes")
    assert dropped.line == (
        f"trial 7: dropped the checkpoint of step 4 ({size / 1000:.1f} kB): paused; the trial restarts from step 0 when it resumes"
    )
    checkpoints.save(7, {4: None})
    (dropped,) = enforce(
        checkpoints.folder, rows, (), 0, holdings=checkpoints.holdings, is_kept_elsewhere=lambda _: True
    )
    assert dropped.why == "paused; it is brought back when the trial resumes"


def test_a_folder_is_looked_at_again_where_something_was_added_or_removed_or_a_worker_writes(
    checkpoints: Checkpoints,
) -> None:
    def rest_since(number: int) -> None:
        os.utime(checkpoints.folder / str(number), (checkpoints.clock, checkpoints.clock))

    def grow(number: int, step: int) -> None:
        (checkpoint.step_folder(checkpoints.folder / str(number), step) / "a.bin").write_bytes(b"a" * 3 * BYTES)

    for number in (0, 1):
        checkpoints.save(number, {1: 1.0})
        rest_since(number)
    holdings = checkpoints.holdings
    before = holdings.used()
    grow(0, 1)
    assert holdings.used() == before, "no checkpoint of trial 0 came or went"
    assert holdings.used((0,)) == before + 2 * BYTES, "its worker may write"
    checkpoints.save(1, {2: 2.0})
    one = checkpoint.bytes_of(checkpoint.step_folder(checkpoints.folder / "1", 2))
    assert holdings.used() == before + 2 * BYTES + one
    assert holdings.of("1", is_running=False).best == checkpoint.step_folder(checkpoints.folder / "1", 2)
    rest_since(1)
    checkpoint.remove(checkpoint.step_folder(checkpoints.folder / "1", 2))
    assert holdings.used() == before + 2 * BYTES
    half = checkpoint.step_folder(checkpoints.folder / "1", 3)
    half.mkdir()
    rest_since(1)
    assert holdings.used() == before + 2 * BYTES
    (half / "a.bin").write_bytes(b"a" * BYTES)
    assert holdings.used() == before + 3 * BYTES, "what is not complete may grow"


def test_under_another_budget_another_checkpoint_is_the_best(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, {1: 1.0, 2: 0.5})
    os.utime(checkpoints.folder / "0", (checkpoints.clock, checkpoints.clock))
    first = checkpoint.step_folder(checkpoints.folder / "0", 1)
    assert checkpoints.holdings.of("0", is_running=False).best == first
    checkpoints.holdings.kl_budget = 4.0
    assert checkpoints.holdings.of("0", is_running=False).best is None, "both have a KL of 5"


def test_other_files_and_folders_of_the_study_are_left_alone(checkpoints: Checkpoints) -> None:
    checkpoints.save(0, {3: 1.0})
    checkpoints.save(8, {3: 1.0})  # of no trial that is told
    (checkpoints.folder / "0" / "error.txt").write_text("e" * 5000)
    assert checkpoints.drop(0, [trial_row(0, **PAUSED)]) == [(0, 3)]
    assert (checkpoints.folder / "0" / "error.txt").exists() and checkpoints.left() == {(8, 3)}

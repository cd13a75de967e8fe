"""Which checkpoints are kept: the rule, case by case, and the folders of a study that runs."""

from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from tests.tuner.quick_study import NAME, opened, quick_spec, run
from tests.tuner.trial_rows import trial_row
from tuner.control.session import open_study
from tuner.files.trial_files import Saved, TrialFiles, kept_at_rung, to_delete
from tuner.study.status import PausedBy, Role, Status

AT_RUNG = dict[str, Any](status=Status.PAUSED, paused_by=PausedBy.STRATEGY)
PAUSED = dict[str, Any](status=Status.PAUSED, paused_by=PausedBy.PERSON)
FORK = dict[str, Any](role=Role.FORK, parent=1, fork_step=1)


@pytest.mark.parametrize(
    ("row", "steps", "best", "is_kept_at_rung", "front", "left"),
    [
        ({}, (1, 2, 3, 4), 2, False, (), (2, 4)),
        ({}, (1, 2, 3, 4), 4, False, (), (4,)),
        ({}, (1, 2, 3, 4), None, False, (), (4,)),
        ({}, (1, 2, 3, 4), 2, False, (1, 9), (1, 2, 4)),
        ({}, (), None, False, (), ()),
        ({"status": Status.PRUNED}, (1, 2, 3, 4), 2, False, (), (2, 4)),
        ({"status": Status.FAILED}, (1, 2, 3, 4), 2, False, (), (2, 4)),
        ({"status": Status.STOPPED}, (1, 2, 3, 4), 2, False, (), (2, 4)),
        (FORK, (1, 2, 3, 4), 3, False, (), (1, 3, 4)),
        (AT_RUNG, (1, 2, 3, 4), 1, True, (), (1, 3, 4)),
        (AT_RUNG, (1, 2, 3, 4), 1, True, (2,), (1, 2, 3, 4)),
        (AT_RUNG, (1, 2, 3, 4), 1, False, (), ()),
        (AT_RUNG, (1, 2, 3, 4), 1, False, (2,), (2,)),
        (PAUSED, (1, 2, 3, 4), 2, False, (), (1, 2, 3, 4)),
        ({"status": Status.RUNNING}, (1, 2, 3, 4), 2, False, (), (1, 2, 3, 4)),
        ({"status": Status.WAITING}, (1, 2, 3, 4), 2, False, (), (1, 2, 3, 4)),
    ],
)
def test_what_a_trial_keeps(
    row: dict[str, Any],
    steps: tuple[int, ...],
    best: int | None,
    is_kept_at_rung: bool,
    front: tuple[int, ...],
    left: tuple[int, ...],
) -> None:
    rows = [trial_row(0), trial_row(1, **row)]
    at_rung = [1] if is_kept_at_rung else [0]
    gone = to_delete(
        rows, {1: Saved(steps, best)}, at_rung, [(1, step) for step in front] + [(0, step) for step in steps]
    )
    assert gone == [(1, step) for step in steps if step not in left]


@pytest.mark.parametrize(
    ("waiting", "promotions", "kept"),
    [(10, 0, 3), (10, -2, 3), (10, 1, 3), (10, 2, 4), (10, 4, 8), (10, 40, 10), (2, 0, 2), (0, 3, 0)],
)
def test_at_a_rung_the_best_three_keep_theirs_or_twice_as_many_as_can_be_promoted(
    waiting: int, promotions: int, kept: int
) -> None:
    ranked = list(range(100, 100 + waiting))
    assert list(kept_at_rung(ranked, promotions)) == ranked[:kept]


def on_disk(folder: Path) -> dict[int, list[int]]:
    found = sorted((folder / "runs" / NAME).glob("[0-9]*"))
    return {int(path.name): [checkpoint.step_of(one) for one in checkpoint.complete(path)] for path in found}


def test_a_study_keeps_its_answer_of_a_trial_at_a_rung_that_loses_its_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.judge.scoring.MOST_ON_FRONT", 2)
    monkeypatch.setattr("tuner.search.choose._promoted", lambda *_: None)
    monkeypatch.setattr("tuner.files.trial_files.promotable", lambda *_: [])
    monkeypatch.setattr("tuner.search.choose.own_rung", lambda *_: 48)
    monkeypatch.setattr("tuner.judge.decision.own_rung", lambda *_: 48)
    spec = quick_spec(trials=4, strategy="early_cut", kl={"budget": 10.0, "limit": 1000.0})
    assert run(tmp_path, spec, workers=1)[0]
    with opened(tmp_path) as store:
        rows = store.trials(store.study(NAME))
    assert all(row.is_at_rung for row in rows)
    best = max(rows, key=lambda row: row.value or 0.0)
    left = on_disk(tmp_path)
    assert best.value_step in left[best.number] and sum(map(len, left.values())) <= 3


def test_what_a_kill_left_half_removed_is_none_and_goes_at_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `rmtree`, as if the process had been killed right after each manifest was removed."""
    spec = quick_spec(trials=3)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        assert run(tmp_path, spec, workers=1)[0]
    folder = tmp_path / "runs" / NAME

    def halves() -> int:
        return sum(not (path / checkpoint.MANIFEST).exists() for path in folder.glob("*/step-*"))

    before = on_disk(tmp_path)
    assert halves() > 0 and all(steps for steps in before.values())
    with opened(tmp_path) as store, open_study(store, spec, folder) as study:
        files = TrialFiles(study)
        with files.work:
            files.tidy()
            while files.work.is_busy:
                files.work.collect()
    assert halves() == 0 and on_disk(tmp_path) == before

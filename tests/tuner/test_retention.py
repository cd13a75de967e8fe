"""Which checkpoints are kept: the rule, case by case, and the folders of a study that runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ppo_core import checkpoint
from tests.tuner.quick_study import NAME, opened, quick_spec, run
from tests.tuner.trial_rows import trial_row
from tuner.control.session import OpenStudy, open_study
from tuner.control.trial_files import TrialFiles, to_delete
from tuner.study.status import Role, Status

FORK = dict[str, Any](role=Role.FORK, parent=1, fork_step=1)


@pytest.mark.parametrize(
    ("row", "steps", "best", "front", "left"),
    [
        ({}, (1, 2, 3, 4), 2, (), (2, 4)),
        ({}, (1, 2, 3, 4), 4, (), (4,)),
        ({}, (1, 2, 3, 4), None, (), (4,)),
        ({}, (1, 2, 3, 4), 2, (1, 9), (1, 2, 4)),
        ({}, (), None, (), ()),
        ({"status": Status.PRUNED}, (1, 2, 3, 4), 2, (), (2, 4)),
        ({"status": Status.FAILED}, (1, 2, 3, 4), 2, (), (2, 4)),
        ({"status": Status.STOPPED}, (1, 2, 3, 4), 2, (), (2, 4)),
        (FORK, (1, 2, 3, 4), 3, (), (1, 3, 4)),
    ],
)
def test_what_a_trial_keeps(
    row: dict[str, Any], steps: tuple[int, ...], best: int | None, front: tuple[int, ...], left: tuple[int, ...]
) -> None:
    at_best = None if best is None else checkpoint.step_folder(Path("1"), best)
    gone = to_delete(trial_row(1, **row), steps, at_best, [(1, step) for step in front] + [(0, step) for step in steps])
    assert gone == [step for step in steps if step not in left]


def test_a_damaged_best_checkpoint_goes_and_the_next_best_stays(tmp_path: Path) -> None:
    for step, reward in {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.0}.items():
        extra = {checkpoint.EPISODE: 64 * step, checkpoint.EVALUATION: {"reward": reward, "kl": 1.0}}
        folder = checkpoint.step_folder(tmp_path, step)
        checkpoint.write(folder, {"state.json": lambda path: path.write_text("{}")}, state={}, extra=extra)
    (checkpoint.step_folder(tmp_path, 1) / "state.json").write_text("damaged")
    files = TrialFiles(cast(OpenStudy, SimpleNamespace(trial_folder=lambda _: tmp_path)))
    with files.work:
        files._tidy_trial(trial_row(0), 10.0, ())
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path)] == [2, 4]


def on_disk(folder: Path) -> dict[int, list[int]]:
    found = sorted((folder / "runs" / NAME).glob("[0-9]*"))
    return {int(path.name): [checkpoint.step_of(one) for one in checkpoint.complete(path)] for path in found}


def test_a_study_keeps_newest_and_best_of_trials_and_its_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.judge.scoring.MOST_ON_FRONT", 2)
    spec = quick_spec(trials=4, kl={"budget": 10.0, "limit": 1000.0})
    assert run(tmp_path, spec, workers=1)[0]
    with opened(tmp_path) as store:
        rows = store.trials(store.study(NAME))
    left = on_disk(tmp_path)
    for row in rows:
        assert {row.value_step, 10} <= set(left[row.number]), "the answer is one of these"
    assert sum(map(len, left.values())) <= 4 * 2 + 2


def test_what_a_kill_left_half_removed_goes_at_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

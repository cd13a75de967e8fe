"""Where a trial goes on, and whose a folder is."""

import shutil
import socket
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_core import checkpoint
from ppo_core.errors import StudyError
from tests.tuner.quick_study import quick_spec
from tuner.control.session import open_study, reconcile
from tuner.files.folder import claim, prepare_resume, require_seen
from tuner.store import Store, StudyRow


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        path = checkpoint.step_folder(folder, step)
        files = {"a.txt": lambda file: file.write_text("a") and None}
        # The later, the better.
        checkpoint.write(path, files, state={"step": step}, extra={"evaluation": {"reward": step, "kl": 1.0}})


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def study(created_at: float) -> StudyRow:
    return StudyRow(1, "quick", {}, created_at, None, None, None, None, None)


@pytest.mark.parametrize(
    ("last_step", "found", "kept"),
    [
        (9, 6, ["step-000003", "step-000006"]),
        (6, 6, ["step-000003", "step-000006"]),
        (5, 6, ["step-000003", "step-000006"]),  # the store lost what came after step 5
        (2, 6, ["step-000003", "step-000006"]),
        (None, None, []),  # those of a trial that the store lost
    ],
)
def test_a_trial_goes_on_from_its_newest_checkpoint_with_steps_lost(
    tmp_path: Path, last_step: int | None, found: int | None, kept: list[str]
) -> None:
    save(tmp_path, 3, 6)
    point = prepare_resume(tmp_path, last_step)
    assert point == (None if found is None else (tmp_path / f"step-{found:06d}", found))
    assert left(tmp_path) == kept


def test_a_damaged_best_is_removed_and_one_before_it_stays(tmp_path: Path) -> None:
    save(tmp_path, 3, 6)
    assert prepare_resume(tmp_path, 7) == (tmp_path / "step-000006", 6)
    assert checkpoint.best(tmp_path, 10.0) == tmp_path / "step-000006"
    (tmp_path / "step-000006" / "a.txt").write_text("b")
    assert prepare_resume(tmp_path, 7) == (tmp_path / "step-000003", 3)
    assert checkpoint.best(tmp_path, 10.0) == tmp_path / "step-000003"


def test_a_folder_is_one_studys_and_anothers_checkpoints_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    claim(tmp_path, study(1.5))
    save(tmp_path / "0", 3)
    claim(tmp_path, study(1.5))
    with pytest.raises(StudyError, match="another store"):
        claim(tmp_path, study(2.5))
    assert left(tmp_path / "0") == ["step-000003"] and (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("host", "folder", "marked", "refused"),
    [
        ("there", "/there/runs/quick", None, True),
        ("there", "/there/runs/quick", 2.5, True),
        ("there", "/there/runs/quick", 1.5, False),
        (socket.gethostname(), "/there/runs/quick", None, False),
        ("there", None, None, False),
        (None, "/there/runs/quick", None, False),
    ],
)
def test_a_study_of_another_host_runs_only_where_its_mark_is_seen(
    tmp_path: Path, host: str | None, folder: str | None, marked: float | None, refused: bool
) -> None:
    if marked is not None:
        claim(tmp_path, study(marked))
    row = replace(study(1.5), lease_host=host, folder=folder)
    with pytest.raises(StudyError, match="there has them in /there/runs/quick") if refused else nullcontext():
        require_seen(tmp_path, row)


def test_a_study_keeps_its_folder_when_resumed_from_another_one(tmp_path: Path) -> None:
    """It is taken where the study's mark is: at first where it last ran, unless it was moved."""
    spec = quick_spec(trials=1)
    one, other = tmp_path / "one", tmp_path / "other"
    with closing(Store.open(str(tmp_path / "store.db"), create=True)) as store:

        def folder_of(given: Path) -> Path:
            with open_study(store, spec, given) as study:
                list(reconcile(study, {}, from_file=True))
            return Path(str(store.study(spec.name).folder))

        assert folder_of(one) == one
        save(one / "0", 3)
        assert folder_of(other) == one and not other.exists()
        one.rename(other)
        assert folder_of(other) == other and left(other / "0") == ["step-000003"]
        shutil.copytree(other, one)  # with its store, say
        assert folder_of(one) == one

"""A study whose task changes between two runs, a part at a time: it is refused, with what changed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_core.data.task import OnProgress, Prompts, RewardPart, TaskAssets
from ppo_core.errors import ConfigError
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, opened, quick_spec, rows, run
from tests.tuner.quick_trainer import FOLDER_VARIABLE
from tests.tuner.quick_trainer import TASK as QUICK
from tuner.confirm.plan import Plan
from tuner.control.events import StudyWarned, TrialStarted
from tuner.store import OrderState

WEIGHTS = "policy/model.safetensors"


def _prepare(progress: OnProgress | None) -> TaskAssets:
    folder = Path(os.environ[FOLDER_VARIABLE])
    reward = RewardPart("mine", "function", f"{folder}/score.py:score", weight=float((folder / "weight").read_text()))
    texts = (folder / "prompts").read_text().split()
    return TaskAssets(str(folder / "policy"), (reward,), Prompts.of_texts(texts[2:], texts[:1], texts[1:2]))


TASK = replace(QUICK, prepare=_prepare)


@pytest.fixture
def begun(own_folder: Path) -> Path:
    """The folder of a study with one trial of two."""
    (own_folder / "policy").mkdir()
    for name, text in {
        WEIGHTS: "weights",
        "policy/config.json": "{}",
        "score.py": "def score(responses):\n    return [1.0] * len(responses)\n",
        "weight": "1",
        "prompts": "a b c d",
    }.items():
        (own_folder / name).write_text(text)
    assert run(own_folder, quick_spec(task=f"{__name__}:TASK", trials=1), workers=1)[0]
    return own_folder


def test_each_changed_part_is_refused_and_named(begun: Path) -> None:
    spec = quick_spec(task=f"{__name__}:TASK", trials=2)
    for file, text, part in (
        (WEIGHTS, "others", "policy"),
        ("score.py", "def score(responses):\n    return [2.0] * len(responses)\n", "reward mine"),
        ("weight", "100", "reward mine"),
        ("prompts", "a b c d e", "prompts.train"),
        ("prompts", "z b c d", "prompts.eval"),
        ("prompts", "a z c d", "prompts.test"),
    ):
        before = (begun / file).read_text()
        (begun / file).write_text(text)
        with pytest.raises(ConfigError, match=rf"changed: {part}: [^;]*, was [^;]*; give the study another name"):
            run(begun, spec, workers=1)
        (begun / file).write_text(before)
        assert len(rows(begun)) == 1
    assert run(begun, spec, workers=1)[0] and len(rows(begun)) == 2


def test_a_finished_study_says_what_has_changed_and_is_read_as_before(begun: Path) -> None:
    spec = quick_spec(task=f"{__name__}:TASK", trials=1)

    def warned() -> list[str]:
        finished, events = run(begun, spec, workers=1)
        assert finished and not any(isinstance(event, TrialStarted) for event in events)
        return [event.message for event in events if isinstance(event, StudyWarned)]

    assert warned() == []
    (begun / "weight").write_text("100")
    (line,) = warned()
    assert "reward mine" in line and "policy" not in line and '"quick"' in line
    (begun / "weight").unlink()
    (line,) = warned()
    assert '"quick"' in line and "No such file" in line


def test_a_refused_run_stores_nothing(begun: Path) -> None:
    """Neither the values of its flags and file, nor that the study is unfinished, nor those of an order's settings."""
    with opened(begun) as store:
        before = replace(store.study(NAME), lease_token=0, read_at=0.0)
        (begun / "prompts").write_text("a b c d e")
        order = store.place_order(before, "set", None, {"changes": {"trials": 5}})
        spec = quick_spec(task=f"{__name__}:TASK", trials=None, budget=9.0, kl={"budget": 5.0, "limit": 15.0})
        with pytest.raises(ConfigError, match="its task has changed: prompts"):
            run(begun, spec, workers=3, budget=4.0)
        assert replace(store.study(NAME), lease_token=0, read_at=0.0) == before
        (begun / "prompts").write_text("a b c d")
        assert store.order(order.id).state is OrderState.WAITING
        assert run(begun, quick_spec(task=f"{__name__}:TASK", trials=2), workers=3)[0]
        after = store.study(NAME)
        assert (after.workers, after.spec["trials"], store.order(order.id).state) == (3, 5, OrderState.DONE)
    assert len(rows(begun)) == 5


def test_confirm_and_train_from_find_the_same_task(begun: Path, ppo_tuner: Invoke) -> None:
    spec = quick_spec(task=f"{__name__}:TASK", trials=3)
    assert run(begun, spec)[0]
    (begun / WEIGHTS).write_text("others")
    with pytest.raises(ConfigError, match="changed: policy: "):
        run(begun, spec, workers=1, plan=Plan(top=1, seeds=2))
    with opened(begun) as store:
        assert store.study(NAME).finished_at is not None
    status, _, stderr = ppo_tuner("train", "--from", NAME, "0", "--storage", str(begun / "store.db"), "--device", "cpu")
    assert status == 2 and ": policy: " in stderr, stderr
    assert len(rows(begun)) == 3

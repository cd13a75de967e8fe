"""Reading a study runs nothing of its task: the task may be gone, or be a stranger's, in a shared store."""

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.tuner import made_study
from tests.tuner.invoke import Invoke, one_error
from tuner.store import Store
from tuner.study.spec import StudySpec
from tuner.study.study_file import DECLARED

TASK = """
from ppo_core.loading.task_file import make_task
TASK = make_task(policy="task:arithmetic", reward="ppo_core.tasks.arithmetic.reward:exact", prompts="an-org/data",
                 reference={"learning_rate": 2e-4}, kl_budget=7)
"""
HOSTILE = "from pathlib import Path\nPath(MARK).write_text('run')\n" + TASK


@pytest.fixture
def shared(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a mark that must not appear. The store's tasks are gone or would leave it when imported."""
    monkeypatch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{own_folder}/shared.db")
    monkeypatch.syspath_prepend(str(own_folder))
    mark = own_folder / "mark"
    for folder in ("gone", "hostile"):
        (own_folder / folder).mkdir()
        (own_folder / folder / "task.py").write_text(TASK)
    (own_folder / "a_module.py").write_text(TASK)
    for name, task in (("gone", "gone"), ("hostile", "hostile"), ("module", "a_module:TASK"), ("old", "hostile")):
        made = {key: value for key, value in made_study.SPEC.items() if key != "kl"}
        spec = StudySpec.from_dict({**made, "name": name, "task": task}, "made")
        made_study.make(own_folder / "shared.db", spec).close()
    with closing(Store.open("shared.db")) as store:
        row = store.study("old")
        lease = store.acquire("old")
        store.update_study(lease, spec={key: value for key, value in row.spec.items() if key != DECLARED})
        store.release(lease)
    shutil.rmtree(own_folder / "gone")
    for file in (own_folder / "hostile" / "task.py", own_folder / "a_module.py"):
        file.write_text(HOSTILE.replace("MARK", repr(str(mark))))
    sys.modules.pop("a_module")
    return mark


def test_a_store_is_listed_whatever_its_tasks_are(ppo_tuner: Invoke, shared: Path) -> None:
    status, stdout, _ = ppo_tuner("list", "--json")
    listed = {row["name"]: row for row in json.loads(stdout)}
    assert status == 0 and list(listed) == ["gone", "hostile", "module", "old"]
    assert [row["kl_budget"] for row in listed.values() if "error" not in row] == [7, 7, 7]
    assert listed["old"]["state"] == "not readable" and '"old"' in listed["old"]["error"]
    status, stdout, _ = ppo_tuner("list")
    assert status == 0 and sum("not readable" in line for line in stdout.splitlines()) == 1
    assert not shared.exists()


@pytest.mark.parametrize("name", ["gone", "hostile", "module"])
def test_every_command_that_reads_a_study_runs_nothing(ppo_tuner: Invoke, shared: Path, name: str) -> None:
    for argv in (
        ["show", name],
        ["show", name, "1"],
        ["best", name],
        ["compare", name, "0", "1"],
        ["diagnose", name, "1"],
        ["importance", name],
        ["export", name, "--to", "trl", "--output", "trl.yaml"],
        ["report", name],
    ):
        status, _, stderr = ppo_tuner(*argv)
        assert status == 0 or argv[0] == "importance", (argv, stderr)
    assert not shared.exists()
    status, stdout, _ = ppo_tuner("show", name, "0")
    assert "0.0002" in stdout and "task" in stdout, "its reference is stored"


@pytest.mark.parametrize(
    "damage",
    [
        {DECLARED: 5},
        {DECLARED: {}},
        {DECLARED: {"reference": 5}},
        {DECLARED: {"kl_budget": 7, "stranger": 1}},
        {"search": "advised"},
        {"task": {"policy": "x"}},
        {"trials": "many"},
    ],
    ids=str,
)
def test_a_damaged_study_is_one_line(ppo_tuner: Invoke, made: str, own_folder: Path, damage: dict[str, object]) -> None:
    with closing(Store.open("made.db")) as store:
        spec = store.study(made).spec
        declared = damage.get(DECLARED)
        if isinstance(declared, dict) and declared:
            damage = {DECLARED: {**spec[DECLARED], **declared}}
        store.create_study("damaged", {**spec, "name": "damaged", **damage})
    status, stdout, _ = ppo_tuner("list", "--json")
    assert status == 0
    assert [row["state"] for row in json.loads(stdout)] == ["unfinished", "not readable"]
    status, _, stderr = ppo_tuner("show", "damaged")
    assert status == 2 and '"damaged"' in one_error(stderr)


def test_an_order_checks_a_study_without_its_task(ppo_tuner: Invoke, shared: Path) -> None:
    assert ppo_tuner("set", "hostile", "--trials", "9")[0] == 0
    values = {**made_study.PARAMS[1], "learning_rate": 2e-3}
    status, _, stderr = ppo_tuner("enqueue", "hostile", *(f"--set={name}={value}" for name, value in values.items()))
    assert status == 0, stderr
    assert not shared.exists()

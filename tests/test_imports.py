"""Imports go one way, and what does not train never loads torch."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RANK = {"ppo_core": 0, "tuner": 1, "dashboard": 2, "ppo_tuner": 3}
TORCH_FREE = ["ppo_core", "ppo_core.metrics", "ppo_core.data.task", "ppo_core.tasks.reviews", "ppo_core.checkpoint", "ppo_core.data.prompts", "ppo_core.__main__", "ppo_core.cli.arguments",
              "tuner.cli.main", "tuner.control.controller", "tuner.store", "dashboard.data", "dashboard.figures", "dashboard.report", "tuner.search.importance", "dashboard.data", "ppo_tuner"]  # fmt: skip


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", RANK)
def test_imports_go_one_way(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        above = {name for name in imported(path) & set(RANK) if RANK[name] > RANK[package]}
        assert not above, f"{path.relative_to(ROOT)} imports {above}"


def modules() -> dict[str, Path]:
    """Return our modules by dotted name; a package is its `__init__`."""
    files = [path.relative_to(ROOT) for package in RANK for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def needs() -> dict[str, set[str]]:
    """Return the modules of ours that each imports; those inside a function count, too: they hide a circle."""
    ours = modules()
    found: dict[str, set[str]] = {name: set() for name in ours}
    for name, path in ours.items():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names} & ours.keys() or {node.module}
                found[name] |= named & ours.keys() - {name}
    return found


def test_no_imports_go_in_a_circle() -> None:
    assert sum(map(len, needs().values())) > 100
    TopologicalSorter(needs()).prepare()  # raises CycleError, which names them


def test_a_folder_imports_from_lower_layers_alone() -> None:
    """The layers are those of the architecture page, the lowest first; a module beside the folders is in none."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    lines = page.split("**The layers.**")[1].split("\n\n")[1].splitlines()
    layer = {
        room: i for i, line in enumerate(lines) for room in re.findall(r"\b(?:ppo_core|tuner|dashboard)/\w+", line)
    }
    upwards = [
        f"{name} imports {other}"
        for name, others in needs().items()
        for other in others
        if (here := room_of(name)) and (there := room_of(other)) and here != there and layer[there] >= layer[here]
    ]
    assert upwards == []


def room_of(module: str) -> str:
    room = ROOT / Path(*module.split(".")[:2])
    return room.relative_to(ROOT).as_posix() if module.count(".") and room.is_dir() else ""


FIRST_WITH_TORCH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(name)
"""


def test_declarations_store_and_pages_never_import_torch() -> None:
    command = [sys.executable, "-c", FIRST_WITH_TORCH, *TORCH_FREE]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_begins_without_torch_the_store_and_the_sampler() -> None:
    heavy = "('torch', 'transformers', 'sqlalchemy', 'optuna')"
    code = f"import sys, tuner.engine.worker; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Imports go one way, and what does not train never loads torch."""

import ast
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


def test_no_imports_go_in_a_circle() -> None:
    """Imports inside a function count, too: they hide a circle, and do not break it."""
    ours = modules()
    needs: dict[str, set[str]] = {name: set() for name in ours}
    for name, path in ours.items():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {f"{node.module}.{alias.name}" for alias in node.names} & ours.keys() or {node.module}
                needs[name] |= found & ours.keys() - {name}
    assert sum(map(len, needs.values())) > 100
    TopologicalSorter(needs).prepare()  # raises CycleError, which names them


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

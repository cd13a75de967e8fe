"""`make gpu` on tiny shapes on the CPU: every part runs, prints its table and writes its files."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # as `make gpu` does


def test_the_tests_that_need_a_gpu_are_run(tmp_path: Path) -> None:
    assert "tests marked gpu: " in rehearse("check", tmp_path)[1]


def rehearse(part: str, folder: Path) -> tuple[dict[str, object], str]:
    """Run a part; return what its JSON and its Markdown say."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), part, "--rehearse", "--results", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / f"cpu-{part}.json").read_text()), (folder / f"cpu-{part}.md").read_text()


@pytest.mark.parametrize(
    ("part", "cells", "package"),
    [("speed", 3, "torch"), ("sizes", 5, "torch"), ("4bit", 2, "bitsandbytes"), ("trl", 6, "trl")],
)
def test_a_part_measures_every_cell(part: str, cells: int, package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[bench,quantized]'")
    data, text = rehearse(part, tmp_path)
    found = data["cells"]
    assert isinstance(found, list) and len(found) == cells and data["passed"] is True
    for cell in found:
        assert cell["tokens_per_second"] > 0 and cell["peak_gib"] > 0 and cell["floor_share"] > 0
        assert set(cell["seconds"]) == ({"iteration"} if cell["trainer"] == "TRL" else {"generate", "score", "update"})
        assert all(count > 0 for _, count in cell["step_kernels"].values())
        assert set(cell["step_kernels"]) == (set() if cell["trainer"] == "TRL" else {"products", "attention", "other"})
    assert {"torch", "transformers"} <= data["versions"].keys()
    assert text.startswith(f"# {part} on cpu") and "| cell | trainer |" in text and "Done after" in text


ONLY_LISTED = """
import importlib.metadata as installed, re, sys

def name_of(text): return re.sub("[-_.]+", "-", re.match("[A-Za-z0-9._-]+", text)[0]).lower()

listed, open_ = set(), ["torch", "transformers", "peft", "accelerate", "pytest"]
while open_:
    name = open_.pop()
    if name not in listed:
        listed.add(name)
        try: needs = installed.requires(name) or []
        except installed.PackageNotFoundError: continue
        open_ += [name_of(need) for need in needs if "extra ==" not in need]
for module, packages in installed.packages_distributions().items():
    if module not in ("ppo_core", "tuner", "tests") and not listed & {name_of(package) for package in packages}:
        sys.modules[module] = None  # importing it raises ImportError

import pytest
sys.path.insert(0, "benchmarks")
import gpu
sys.exit(pytest.main(["--collect-only", "-p", "no:cacheprovider", "tests/ppo_core/test_gpu.py"]))
"""
"""Collects the tests marked gpu, and imports the benchmark, with the packages that docs/gpu.md lists and no others."""


def test_nothing_but_the_listed_packages_is_needed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ONLY_LISTED],
        capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "test_captured_graphs_sample_the_tokens_of_plain_decoding[llama]" in ended.stdout


def test_a_study_runs_and_the_guard_stops_a_trial(tmp_path: Path) -> None:
    data, text = rehearse("study", tmp_path)
    trials = data["trials"]
    assert isinstance(trials, list) and len(trials) >= 2
    assert f"{len(trials)} trials in" in text
    assert "kl_hard" in [(trial["reason"] or {}).get("rule") for trial in trials]


def test_trials_share_a_device(tmp_path: Path) -> None:
    data, text = rehearse("sharing", tmp_path)
    seconds = data["sharing_seconds"]
    assert isinstance(seconds, dict) and list(seconds) == ["1", "2"] and "2 trials of tiny, 2 at a time: " in text


def test_without_a_gpu_the_reason_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "speed", "--results", str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert ended.returncode == 1 and not list(tmp_path.iterdir())
    assert ended.stderr == "gpu.py: torch finds no CUDA device here; --rehearse runs tiny shapes on the CPU\n"

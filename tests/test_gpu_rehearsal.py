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


def rehearse(part: str, folder: Path) -> tuple[dict[str, object], str]:
    """Run a part; return what its JSON and its Markdown say."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), part, "--rehearse", "--results", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / f"cpu-{part}.json").read_text()), (folder / f"cpu-{part}.md").read_text()


@pytest.mark.parametrize(("part", "cells"), [("check", 1), ("speed", 8), ("trl", 6)])
def test_a_part_measures_every_cell(part: str, cells: int, tmp_path: Path) -> None:
    if part == "trl" and find_spec("trl") is None:
        pytest.skip("TRL is not installed: pip install -e '.[bench]'")
    data, text = rehearse(part, tmp_path)
    found = data["cells"]
    assert isinstance(found, list) and len(found) == cells and data["passed"] is True
    for cell in found:
        assert cell["tokens_per_second"] > 0 and cell["peak_gib"] > 0 and cell["floor_share"] > 0
        assert set(cell["seconds"]) == ({"iteration"} if cell["trainer"] == "TRL" else {"generate", "score", "update"})
    assert text.startswith(f"# {part} on cpu") and "| cell | trainer |" in text and "Done after" in text


def test_a_study_runs_and_the_guard_stops_a_trial(tmp_path: Path) -> None:
    data, text = rehearse("study", tmp_path)
    trials = data["trials"]
    assert isinstance(trials, list) and len(trials) >= 2
    assert f"{len(trials)} trials in" in text
    assert "kl_hard" in [(trial["reason"] or {}).get("rule") for trial in trials]
    seconds = data["sharing_seconds"]
    assert isinstance(seconds, dict) and list(seconds) == ["1", "2"] and "2 trials of tiny, 2 at a time: " in text


def test_without_a_gpu_the_reason_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "speed", "--results", str(tmp_path)]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert ended.returncode == 1 and not list(tmp_path.iterdir())
    assert ended.stderr == "gpu.py: torch finds no CUDA device here; --rehearse runs tiny shapes on the CPU\n"

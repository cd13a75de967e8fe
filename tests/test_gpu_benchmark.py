"""`make gpu` where something fails: it is named and counts, what was found before stays, and the rest still runs."""

import json
import math
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # as for the scripts there

import gpu  # noqa: E402
from support import cells  # noqa: E402
from support.cells import Cell, Measured, Rates, measure, summary  # noqa: E402
from support.limited import Failed, in_own_process, run_limited  # noqa: E402
from support.part_results import Results  # noqa: E402

RATES = Rates(1e12, 1e9)
CELL = Cell("tiny", lora=True)


def measured(cell: Cell = CELL, rates: Rates = RATES) -> Measured:
    return summary(cell, "ours", {"generate": 1.0, "score": 1.0, "update": 1.0}, 1.0, rates)


def run(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any], str]:
    """Rehearse a part in this process; return its status and what its files say."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", part, "--rehearse", "--results", str(folder)])
    status = gpu.main()
    return status, json.loads((folder / f"cpu-{part}.json").read_text()), (folder / f"cpu-{part}.md").read_text()


# Processes with a limit


def test_what_happens_in_a_process_of_its_own_is_returned_or_said_in_a_line() -> None:
    assert in_own_process(60, math.sqrt, 4.0) == 2.0
    with pytest.raises(Failed, match=r"^ValueError: invalid literal for int"):
        in_own_process(60, int, "many\nlines")
    with pytest.raises(Failed, match=r"^its process ended with status 3$"):
        in_own_process(60, os._exit, 3)
    begin = time.monotonic()
    with pytest.raises(Failed, match=r"^did not end within 1 s$"):
        in_own_process(1, time.sleep, 300)
    assert time.monotonic() - begin < 60


def test_a_command_that_takes_too_long_is_ended_and_its_output_kept(tmp_path: Path) -> None:
    code = "import os, time; print('begun', os.getcwd(), flush=True); time.sleep(300)"
    status, output = run_limited(5, [sys.executable, "-c", code], tmp_path, os.environ)
    assert (status, output) == (None, f"begun {tmp_path}\n")


# Results


def test_both_files_hold_every_cell_at_once(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "h200-speed", ["# speed"], {"device": "H200"})
    results.add(measured())
    results.say("a line", number=1)
    found = json.loads((tmp_path / "new" / "h200-speed.json").read_text())
    assert len(found["cells"]) == 1 and found["number"] == 1 and found["device"] == "H200"
    assert not found["finished"] and not found["passed"]
    text = (tmp_path / "new" / "h200-speed.md").read_text()
    assert "tiny LoRA" in text and "a line" in text and "Not finished" in text
    assert results.finish()
    assert json.loads((tmp_path / "new" / "h200-speed.json").read_text())["passed"]


def test_an_error_is_one_line_of_both_files(tmp_path: Path) -> None:
    results = Results(tmp_path / "part", [], {})
    with results.attempt("a cell"):
        raise RuntimeError("CUDA error: out of luck\nand how to look into it")
    assert not results.finish()
    assert json.loads((tmp_path / "part.json").read_text())["failures"] == [
        "a cell: RuntimeError: CUDA error: out of luck"
    ]
    assert "FAILED: a cell: RuntimeError: CUDA error: out of luck\n" in (tmp_path / "part.md").read_text()


def test_json_of_unknown_rates_is_valid() -> None:
    found = measured(rates=Rates(math.nan, math.nan)).to_dict()
    assert found["floor_share"] is None and set(found["floor_seconds"].values()) == {None}
    assert "NaN" not in json.dumps(found)


# Parts


@pytest.mark.parametrize(("part", "count"), [("check", 0), ("speed", 7), ("trl", 4)])
def test_a_cell_that_fails_counts_and_the_others_run(
    part: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def fake(seconds: float, work: object, *arguments: Any, **options: Any) -> object:
        calls.append(work)
        if work is cells.device_rates:
            return RATES
        if work is gpu.measure_trl:
            raise Failed("ImportError: no trl")
        if part != "trl" and len(calls) == 2:
            raise Failed("AcceleratorError: CUDA error: an illegal memory access was encountered")
        return measured(arguments[0])

    monkeypatch.setattr(gpu, "in_own_process", fake)
    monkeypatch.setattr(gpu, "run_limited", lambda *arguments: (0, "9 passed"))
    status, data, text = run(part, tmp_path, monkeypatch)
    assert status == 1 and data["passed"] is False and len(data["cells"]) == count
    assert len(data["failures"]) == (2 if part == "trl" else 1)
    assert "FAILED: tiny " in text and "\nFAILED after " in text


def test_rates_and_tests_that_fail_leave_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(seconds: float, work: object, *arguments: Any, **options: Any) -> object:
        if work is cells.device_rates:
            raise Failed("did not end within 1 s")
        return measured(arguments[0], arguments[2])

    monkeypatch.setattr(gpu, "in_own_process", fake)
    monkeypatch.setattr(gpu, "run_limited", lambda *arguments: (None, "test_one PASSED\ntest_two "))
    status, data, text = run("check", tmp_path, monkeypatch)
    assert status == 1 and len(data["cells"]) == 1
    assert data["failures"] == [
        "tests marked gpu: did not end in time",
        "rates of the device: did not end within 1 s",
    ]
    assert "test_two" in text


def test_a_part_whose_time_is_over_says_what_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PART_SECONDS", 0.0)
    status, data, _ = run("speed", tmp_path, monkeypatch)
    assert status == 1 and len(data["failures"]) == 9
    assert all(failure.endswith(": not run: the part's 0 s are over") for failure in data["failures"])


def test_a_study_that_fails_leaves_the_other_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(limit: float, folder: Path, name: str, *rest: str) -> tuple[list[dict[str, Any]], float]:
        if name == "reviews":
            raise Failed("ended with status 1: error: no room")
        failed = {"status": "failed", "reason": {"message": "CUDA error"}} if name == "sharing-1" else {}
        return [{"number": 0, "status": "complete", "seconds": 3.0, **failed}], 4.0

    monkeypatch.setattr(gpu, "_run_study", fake)
    monkeypatch.setattr(gpu, "save_task", lambda folder, *rest: folder / "task.toml")
    status, data, _ = run("study", tmp_path, monkeypatch)
    assert status == 1 and data["sharing_seconds"] == {"2": 4.0}
    assert data["failures"] == [
        "a study with a guard stop: ended with status 1: error: no room",
        "2 trials of tiny, 1 at a time: trial 0: CUDA error",
    ]


def test_the_store_and_the_checkpoints_go_with_their_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(limit: float, command: list[str], folder: Path, environment: object) -> tuple[int, str]:
        (folder / "runs" / "sharing-8" / "0" / "step-000012").mkdir(parents=True)
        return 1, "one\nerror: no room\n"

    monkeypatch.setattr(gpu, "run_limited", fake)
    with pytest.raises(Failed, match=r"^ended with status 1: error: no room$"):
        gpu._run_study(60, tmp_path, "sharing-8", "")
    assert [path.name for path in tmp_path.iterdir()] == ["sharing-8.toml"]


def test_trials_that_share_a_gpu_hardly_save() -> None:
    study = tomllib.loads(gpu.sharing_text("sharing-8", Path("task.toml"), 8, 64, gpu.SHARING_ITERATIONS))
    assert study["fixed"]["eval_every_episodes"] == study["fixed"]["total_episodes"], "each evaluation saves"
    assert study["fixed"]["use_peft"], "a checkpoint of all weights of 0.1B is 1.5 GB"
    assert study["workers"]["checkpoint_seconds"] > gpu.PART_SECONDS
    assert study["audit"] == 1, "the guard makes no trial shorter"


def test_what_ran_before_a_cell_is_not_in_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cells, "free", lambda: calls.append("free"))
    for name in ("init", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, name=name: calls.append(name))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)

    def models(*arguments: object) -> None:
        raise Failed("as far as the test goes")

    monkeypatch.setattr(cells, "cell_models", models)
    with pytest.raises(Failed):
        measure(CELL, torch.device("cuda"), RATES)
    assert calls == ["free", "init", "reset_peak_memory_stats"]


def test_make_hands_on_where_to_write() -> None:
    command = ["make", "--dry-run", "gpu", "PART=trl", "RESULTS=/elsewhere"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "benchmarks/gpu.py trl --results /elsewhere" in printed

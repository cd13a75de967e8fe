"""The benchmarks: each can be started, a recording is read and goes on, and `make gpu` measures what runs do."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_core.errors import ConfigError
from ppo_core.loading.load import resolve_device
from tests.tuner.trial_rows import trial_row
from tuner.confirm.result import Confirmed, compared
from tuner.store import OnTest
from tuner.study.status import Origin

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))
sys.path.insert(0, str(BENCHMARKS))  # as for the scripts there

import confirm  # noqa: E402
import op_counts  # noqa: E402
from support import cells, recorded, recorded_summary, recording  # noqa: E402


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_benchmark_says_what_it_takes(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name} ")


def test_a_recording_is_summed_up() -> None:
    said = recorded_summary.summary(recorded.read(recorded.file_of("arithmetic"))).splitlines()
    assert said[0].startswith("arithmetic: 120 random; KL budget 1.5 nats")
    (early,) = [line for line in said if line.startswith("  eval/reward: ")]
    assert "10% 0.47 (0.05)" in early


@pytest.mark.parametrize("case", confirm.CASES, ids=lambda case: case.name)
def test_the_simulated_claims_are_those_of_a_confirmation(case: confirm.Case) -> None:
    values, broken = confirm.drawn(np.random.default_rng(1), case, 30)
    if not case.breaks:
        values[:15, 1:] += 0.1  # so that there is something to claim
    rows = [
        trial_row(number, origin=Origin.SAMPLED if number else Origin.REFERENCE) for number in range(values.shape[1])
    ]
    baseline = OnTest(0, 64, confirm.SFT, 0.0, 0.0, 0.0, None, 0.0)
    claims = []
    for draw, broke in zip(values, broken, strict=True):
        ones = [
            Confirmed(row, 0, dict(enumerate(own)), {}, {}, lost=tuple(np.flatnonzero(lost).tolist()))
            for row, own, lost in zip(rows, draw.tolist(), broke, strict=True)
        ]
        found = compared(0, ones, baseline)
        claims.append(found.choice is not found.reference)
    assert 0 < sum(claims) < len(claims)
    assert confirm.by_rule(values, broken)[0].tolist() == claims


def test_equal_configurations_are_told_apart_less_than_by_an_interval() -> None:
    for shares in confirm.simulated(400).values():
        assert shares["without a doubt"] <= shares["as confirmed"] <= 1.2 * shares["plain t"]


def test_a_recording_goes_on_with_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study = recording.built_in_study("reviews")
    tiny = replace(study, fixed={**study.fixed, "total_episodes": 64, "batch_size": 32})
    monkeypatch.setattr(recording, "built_in_study", lambda task: tiny)
    monkeypatch.setattr(recorded, "DATA", tmp_path)
    assert recording.record("reviews", recording.Amount(random=1), 1, None) == 0
    first = recorded.read(tmp_path / "reviews.parquet").runs
    assert recording.record("reviews", recording.Amount(random=2, top=1, seeds=2), 1, None) == 0
    runs = recorded.read(tmp_path / "reviews.parquet").runs
    assert [run.name for run in first] == ["random-0000"]
    assert [(run.kind, run.weight) for run in runs] == [("random", 1.0), ("random", 1.0), ("seed", 0.0)]
    assert runs[0] == first[0]
    assert runs[2].params == next(run for run in runs if run.name == runs[2].repeats).params
    assert runs[2].seed == tiny.seed + 1
    monkeypatch.setattr(recording, "built_in_study", lambda task: replace(tiny, seed=7))
    with pytest.raises(ConfigError, match="another search space, seed"):
        recording.record("reviews", recording.Amount(random=3), 1, None)


def test_a_cell_is_measured_with_the_kernels_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[object] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", switched.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("accelerate.Accelerator.device", torch.device("cuda"))
    monkeypatch.setattr("ppo_core.loading.load._has_float64", lambda device: True)
    device = resolve_device("auto")
    of_runs = list(switched)
    assert of_runs == ["high", False]

    def build(*arguments: object) -> None:
        assert switched == of_runs * 2
        raise NotImplementedError("all is switched before a model is built")

    monkeypatch.setattr(cells, "cell_models", build)
    with pytest.raises(NotImplementedError):
        cells.measure(cells.Cell("tiny", lora=True), device, cells.Rates(1.0, 1.0))


@pytest.mark.parametrize(
    ("size", "lora", "decode", "learn"),
    [
        ("qwen2-0.5b", True, 735, 1900),
        ("qwen2-0.5b", False, 590, 1520),
        ("llama-8b", True, 960, 2470),
        ("llama-8b", False, 766, 1930),
        ("gpt2-0.1b", True, 295, 730),
        ("gpt2-0.1b", False, 236, 660),
    ],
)
def test_operations_stay_as_few(size: str, lora: bool, decode: int, learn: int) -> None:
    found = {work: names.total() for work, names in op_counts.counts(size, lora=lora).items()}
    assert 0 < found["decode"] <= decode and 0 < found["learn"] <= learn

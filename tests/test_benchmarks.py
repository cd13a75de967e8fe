"""The benchmarks: each can be started, and `make gpu` measures what runs do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppo_core.models import resolve_device

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))
sys.path.insert(0, str(BENCHMARKS))  # as for the scripts there

from support import cells  # noqa: E402


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_benchmark_says_what_it_takes(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name} ")


def test_a_cell_is_measured_with_the_kernels_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[object] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", switched.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("accelerate.Accelerator.device", torch.device("cuda"))
    monkeypatch.setattr("ppo_core.models._has_float64", lambda device: True)
    device = resolve_device("auto")
    of_runs = list(switched)
    assert of_runs == ["high", False]

    def build(*arguments: object) -> None:
        assert switched == of_runs * 2
        raise NotImplementedError("all is switched before a model is built")

    monkeypatch.setattr(cells, "cell_models", build)
    with pytest.raises(NotImplementedError):
        cells.measure(cells.Cell("tiny", lora=True), device, cells.Rates(1.0, 1.0))

"""What `make gpu` measures."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))  # as for the scripts there

from support import cells  # noqa: E402
from support.cells import Cell, Measured, Rates, measure, summary  # noqa: E402

RATES = Rates(1e12, 1e9)
CELL = Cell("tiny", lora=True)


def measured(cell: Cell = CELL, rates: Rates = RATES) -> Measured:
    return summary(cell, "ours", {"generate": 1.0, "score": 1.0, "update": 1.0}, 1.0, rates)


def test_json_of_unknown_rates_is_valid() -> None:
    found = measured(rates=Rates(math.nan, math.nan)).to_dict()
    assert found["floor_share"] is None and set(found["floor_seconds"].values()) == {None}
    assert "NaN" not in json.dumps(found)


def test_what_ran_before_a_cell_is_not_in_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cells, "free", lambda: calls.append("free"))
    for name in ("init", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, name=name: calls.append(name))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)

    def models(*arguments: object) -> None:
        raise StopIteration("as far as the test goes")

    monkeypatch.setattr(cells, "cell_models", models)
    with pytest.raises(StopIteration):
        measure(CELL, torch.device("cuda"), RATES)
    assert calls == ["free", "init", "reset_peak_memory_stats"]

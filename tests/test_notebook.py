"""The notebook of examples/ runs from its first cell to its last, and shows the study's answer and figure."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import ppo_tuner as pt

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_it_runs_and_shows_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PPO_TUNER_STORAGE", raising=False)
    notebook = nbformat.read(ROOT / "examples" / "tune.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without its outputs"
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {cell.source.partition("\n")[0]: cell.outputs for cell in notebook.cells if cell.get("outputs")}
    study = pt.Study("colours")
    assert study.state == "finished" and len(study.trials) >= 2
    assert study.answer._repr_html_() == shown["study.answer"][0].data["text/html"]
    assert "application/vnd.plotly.v1+json" in shown["study.plot_reward_kl()"][0].data
    assert study.trials["value"].max() > study.trials["value"].min() or len(study.trials) == 1

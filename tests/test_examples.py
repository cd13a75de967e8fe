"""The notebook of examples/, the Python of docs/training.md and the study behind a chart run, and come to what they say."""

import re
import statistics
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import ppo_tuner as pt
from ppo_core.data.task import TaskAssets
from ppo_core.trainer import ppo_trainer
from tuner.study.spec import StudySpec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "studies" / "kl_by_beta.toml"
SHORTER = {"total_episodes": 1536, "response_length": 16}
"""24 rollout batches, over which KL grows to twelve times as much under the low β."""
PAGE = (ROOT / "docs" / "training.md").read_text()
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_notebook_shows_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_page_of_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in CODE.findall(PAGE):
        exec(compile(code, "docs/training.md", "exec"), names)
    assert "lam = 1.5 is not allowed" in capsys.readouterr().out
    assert [report.step for report in names["reports"]] == [0, 1, 2, 3, 4] and (tmp_path / "model").is_dir()
    assert names["finished"] and len(names["trials"]) == 3 and set(names["steps"]["step"]) == {0, 1, 2, 3, 4}
    assert names["answer"] is not None


def test_a_low_beta_lets_kl_grow_and_a_high_one_restricts_it(assets: TaskAssets) -> None:
    torch.set_num_threads(1)
    content = StudySpec.load(STUDY).to_dict()
    study = StudySpec.from_dict(content | {"fixed": content["fixed"] | SHORTER}, "short")
    low, high = study.listed[:2]
    assert low.params["kl_coef"] < high.params["kl_coef"]
    settled = []
    for trial in (low, high):
        reports = ppo_trainer(study.config(trial.params), "reviews", device="cpu")
        kls = [report.metrics["objective/kl_exact"] for report in reports if report.step]
        settled.append(statistics.fmean(kls[-8:]))
    assert settled[0] > 3 * settled[1]

"""The Python examples of docs/training.md run one after the other."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.slow
def test_its_examples_run_in_order(
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

"""The example's loop learns, and ends where its docstring says."""

import re
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "ppo_loop.py"
LINE = re.compile(r"^ *iteration (\d+): reward ([\d.]+), KL ([\d.]+)$", re.MULTILINE)
NOISE = 0.03
"""Of a batch's mean reward: the standard error of 256 answers of which seven in ten are right."""


def lines(text: str) -> list[tuple[int, float, float]]:
    return [(int(iteration), float(reward), float(kl)) for iteration, reward, kl in LINE.findall(text)]


def test_the_loop_learns_and_ends_where_its_docstring_says(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = lines(capsys.readouterr().out)
    first, last = lines(names["__doc__"])
    assert [iteration for iteration, _, _ in printed] == list(range(names["ITERATIONS"]))
    assert printed[0] == first, "before anything is learned it is the same on every machine"
    assert printed[-1][0] == last[0]
    assert printed[-1][1] == pytest.approx(last[1], abs=3 * NOISE)
    assert printed[-1][2] == pytest.approx(last[2], abs=0.25)
    assert printed[-1][1] > printed[0][1] + 0.2

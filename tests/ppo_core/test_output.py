"""What becomes of the output when what reads it ends, as `head` does."""

import io
import os

import pytest

from ppo_core.output import console, samples_table
from ppo_core.report import Sample, StepReport


def test_work_that_outlives_its_reader_says_so_once_and_prints_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        out = console(file, outlives_reader=True)
        for step in range(3):
            out.print(f"step {step}")
    captured = capsys.readouterr()
    assert captured.err == "nothing reads the output any more: the work continues without printing\n"


def test_all_else_ends_as_print_does() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    file = os.fdopen(writing, "w")
    with pytest.raises(BrokenPipeError):
        console(file).print("a line")
    os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # so that closing it does not fail again
    file.close()


def test_samples_are_literal_text_a_line_each_and_long_ones_are_cut() -> None:
    one = Sample(0, "x" * 500 + "end", "[red]a[/red]\x1b[2J\n:smile:" + "y" * 500, 1.5, 0.0, 3, {"a": 1.0, "b": 0.5})
    out = io.StringIO()
    console(out).print(samples_table(StepReport(4, 64, {}, (one,) * 5)))
    lines = [line for line in out.getvalue().splitlines() if "end" in line]
    assert len(lines) == 3 and all(r"[red]a[/red]\x1b[2J\n:smile:yyy" in line for line in lines)
    assert "1.50 (a 1.00, b 0.500)" in lines[0] and "\x1b" not in out.getvalue() and len(lines[0]) < 600

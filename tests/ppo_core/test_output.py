"""What becomes of the output when what reads it ends, as `head` does."""

import os

import pytest

from ppo_core.output import console


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

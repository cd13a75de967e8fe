"""What a run prints: samples, warnings of a sampler that is not the trainer's, and what if nothing reads them."""

import io
import os

import pytest

from ppo_core.output import console, samples_table
from ppo_core.report import AgreementWatch, Sample, StepReport


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


MISMATCH, GAP, NOISE = "sampler/mismatch", "sampler/kl_gap", "sampler/kl_gap_noise"


def said(*history: dict[str, float]) -> list[list[str]]:
    """What is said after each step."""
    watch = AgreementWatch()
    return [watch.warnings(StepReport(step, 16 * step, metrics)) for step, metrics in enumerate(history)]


def test_a_run_whose_sampler_agrees_is_not_warned() -> None:
    healthy = {MISMATCH: 0.4, GAP: 0.9, NOISE: 0.25}
    by_chance = {**healthy, GAP: -1.5}
    assert said({}, *[healthy, by_chance, by_chance] * 9) == [[]] * 28
    assert said({}, {"eval/reward": 1.0}, {GAP: 99.0}) == [[], [], []]


def test_a_mismatch_is_said_at_once_and_only_once() -> None:
    before, line, after = said({MISMATCH: 1.0}, {MISMATCH: 1.01}, {MISMATCH: 7.0})
    assert before == after == []
    assert len(line) == 1 and "sampler/mismatch" in line[0] and "1.01 nats at step 1" in line[0]
    assert "\n" not in line[0]


def test_a_sampled_kl_that_stays_apart_is_said_once_after_three_steps() -> None:
    apart = {GAP: -2.0, NOISE: 0.25}
    *before, line, after = said(apart, apart, {GAP: 0.0, NOISE: 0.25}, apart, apart, apart, apart)
    assert before == [[]] * 5 and after == []
    assert len(line) == 1 and "sampler/kl_gap" in line[0] and "2 nats per response apart at step 5" in line[0]
    assert "\n" not in line[0]

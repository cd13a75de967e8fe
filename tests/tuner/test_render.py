"""What a study's tables and lines say, in right English and whole numbers."""

import io
from typing import Any

import pytest
from rich.table import Table

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.output import PIPE_WIDTH, console, measured
from tests.tuner import made_study
from tests.tuner.trial_rows import make_spec, trial_row
from tuner.cli import render
from tuner.judge.results import StudyView
from tuner.study.spec import StudySpec


@pytest.mark.parametrize(
    ("number", "text"),
    [(4.0, "4.00"), (99.94, "99.9"), (99.96, "100"), (201.0, "201"), (-201.4, "-201"), (999.7, "1000"), (0.00012, "0.000120")],
)  # fmt: skip
def test_a_measured_number_has_three_digits_and_no_bare_point(number: float, text: str) -> None:
    assert measured(number) == text


def printed(table: Table) -> list[str]:
    stream = io.StringIO()
    console(stream).print(table)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("value_step", "shown", "why"),
    [
        (4, 4, "that of its value"),
        (5, 4, "the nearest stored to that of its value, 5"),
        (9, 8, "the nearest stored to that of its value, 9"),
        (None, 8, "the last"),
    ],
)
def test_samples_are_those_of_the_trials_value_or_the_nearest(value_step: int | None, shown: int, why: str) -> None:
    rows = [
        {"step": step, "prompt_index": 0, "reward": 1.0, "parts": {}, "kl": 1.0, "length": 1, "prompt": "a",
         "response": f"of step {step}"}
        for step in (0, 4, 8)
    ]  # fmt: skip
    title, _, text = map(str, render.sample_lines(rows, value_step))
    assert title == f"Samples at step {shown}, {why}" and f"of step {shown}" in text


def test_in_a_pipe_all_searched_values_are_in_one_table() -> None:
    params = {name: 0.001 for name in HYPERPARAMETERS if name != "batch_size"} | {"batch_size": 64}
    trials, spec = [trial_row(0, params=params)], StudySpec.from_dict(made_study.SPEC, "made")
    assert len(render.params_tables(trials, spec)) > 1
    (table,) = render.params_tables(trials, spec, PIPE_WIDTH)
    assert ["trial", *params] in [line.split() for line in printed(table)]
    assert max(map(len, printed(table))) > 1000


def test_a_rate_and_a_beta_that_the_run_moves_have_no_effect() -> None:
    unread: Any = None  # the study's row

    def without_effect(**search: Any) -> list[str]:
        spec = make_spec(search=search)
        trial = trial_row(0, params=spec.reference_params(), config=spec.config({}).to_dict())
        lines = printed(render.config_table(trial, StudyView(unread, spec, (trial,)), "made"))
        return [line.split()[0] for line in lines if "no effect" in line]

    assert without_effect(kl_step="advised") == ["learning_rate", "kl_coef"]
    assert without_effect(learning_rate="advised") == []

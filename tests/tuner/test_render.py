"""What a study's tables and lines say, in right English and whole numbers."""

import io
from typing import Any

import pytest
from rich.table import Table

from ppo_core.output import console, measured
from tests.tuner.trial_rows import make_spec, trial_row
from tuner.cli import render
from tuner.judge.results import StudyView


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


def test_a_rate_and_a_beta_that_the_run_moves_have_no_effect() -> None:
    unread: Any = None  # the study's row

    def without_effect(**search: Any) -> list[str]:
        spec = make_spec(search=search)
        trial = trial_row(0, params=spec.reference_params(), config=spec.config({}).to_dict())
        lines = printed(render.config_table(trial, StudyView(unread, spec, (trial,)), "made"))
        return [line.split()[0] for line in lines if "no effect" in line]

    assert without_effect(kl_step="advised") == ["learning_rate", "kl_coef"]
    assert without_effect(learning_rate="advised") == []

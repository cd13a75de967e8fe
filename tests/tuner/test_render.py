"""What a study's tables and lines say, in right English and whole numbers."""

import io
import re

import pytest
from rich.table import Table

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.output import PIPE_WIDTH, console, measured
from tests.tuner import made_study
from tests.tuner.trial_rows import trial_row
from tuner.cli import render
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


def test_values_and_words_stay_whole_as_far_as_there_is_room() -> None:
    columns = ("configuration", "seeds", "reward", "KL, nats/response", "over the reference", "end within budget")
    table = render.new_table(*columns, right=columns[1:])
    table.add_row(
        "trial 8\n1 run had none", "3", "1.83 [1.68, 1.97]", "4.68 [3.97, 15.39]", "0.64 [-0.12, 1.40]", "3 of 3"
    )

    def printed(width: int | None) -> str:
        file = io.StringIO()
        out = console(file)
        out.width = width or out.width
        out.print(table)
        return file.getvalue()

    for whole in ("1.83 [1.68, 1.97]", "4.68 [3.97, 15.39]", "0.64 [-0.12, 1.40]", "configuration"):
        assert whole in printed(94), "where headings take two lines"
    assert "1.97]" in printed(80) and "configuration" in printed(80), "a value in two lines, at its gap"
    assert max(map(len, printed(40).splitlines())) == 40, "nothing is cut off where there is too little room"
    piped = [re.split(" {2,}", line.strip()) for line in printed(None).splitlines()]
    assert list(columns) in piped
    assert ["trial 8, 1 run had none", "3", "1.83 [1.68, 1.97]", "4.68 [3.97, 15.39]", "0.64 [-0.12, 1.40]", "3 of 3"] in piped  # fmt: skip


def test_in_a_pipe_all_searched_values_are_in_one_table_with_their_whole_names() -> None:
    params = {name: 0.001 for name in HYPERPARAMETERS if name != "batch_size"} | {"batch_size": 64}
    trials, spec = [trial_row(0, params=params)], StudySpec.from_dict(made_study.SPEC, "made")
    assert len(render.params_tables(trials, spec)) > 1
    (table,) = render.params_tables(trials, spec, PIPE_WIDTH)
    assert ["trial", *params] in [line.split() for line in printed(table)]
    assert max(map(len, printed(table))) > 1000

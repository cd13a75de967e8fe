"""What a study's tables and lines say, in right English and whole numbers."""

import io
import re
from collections.abc import Sequence

import pytest
from rich.table import Table

from ppo_core.config.hyperparameters import HYPERPARAMETERS
from ppo_core.output import PIPE_WIDTH, console, counted, measured
from tests.tuner import made_study
from tests.tuner.trial_rows import trial_row
from tuner.cli import render
from tuner.judge.scoring import Extent
from tuner.study.spec import StudySpec
from tuner.study.status import PausedBy, Status


@pytest.mark.parametrize(
    ("number", "text"),
    [(4.0, "4.00"), (99.94, "99.9"), (99.96, "100"), (201.0, "201"), (-201.4, "-201"), (999.7, "1000"), (0.00012, "0.000120")],
)  # fmt: skip
def test_a_measured_number_has_three_digits_and_no_bare_point(number: float, text: str) -> None:
    assert measured(number) == text


def test_numbers_that_are_none_are_said_as_such() -> None:
    assert [measured(number) for number in (None, float("nan"), float("-inf"))] == ["-", "nan", "-inf"]


def test_one_thing_is_not_several() -> None:
    assert [counted(count, "trial") for count in (0, 1, 2)] == ["0 trials", "1 trial", "2 trials"]
    assert [Extent(ended, 0, total, 0.0, None).text for ended, total in ((0, 1), (3, 8), (5, 2))] == [
        "0 of 1 trial ended", "3 of 8 trials ended", "5 trials ended, 2 asked for"
    ]  # fmt: skip


def test_the_table_of_trials_has_the_rung_score_of_a_paused_one() -> None:
    rests = {"status": Status.PAUSED, "paused_by": PausedBy.STRATEGY, "rung_episode": 192, "rung_score": 0.8}
    assert list(render.trials_table([trial_row(0, **rests)]).columns[-1].cells) == ["screening score 0.800"]


def printed(table: Table) -> list[str]:
    stream = io.StringIO()
    console(stream).print(table)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("numbers", "trials", "text"),
    [
        ([0], 1, "1 of 1 trial was pruned by the guard for KL blow-up. KL over the limit (kl_limit): trial 0."),
        ([1, 2], 8, "2 of 8 trials were pruned by the guard for KL blow-up. KL over the limit (kl_limit): trials 1-2."),
    ],
)
def test_prunings_are_told_for_one_trial_and_for_several(numbers: Sequence[int], trials: int, text: str) -> None:
    assert render.prunings_line({"kl_limit": numbers}, trials) == text


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


def test_a_title_and_a_caption_longer_than_the_table_are_one_line_in_a_pipe() -> None:
    table = render.new_table("a", "b", title="A title of many words, " * 20 + "its end")
    table.caption = "A caption of many words, " * 20 + "its end"
    table.add_row("1", "2")
    lines = [line.rstrip() for line in printed(table)]
    assert table.title in lines and table.caption in lines

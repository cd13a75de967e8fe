"""Numbers as they are printed: what differs by more than its standard error reads as different, in any unit."""

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.table import Table

from ppo_core.output import console, decimals, fixed, measured, nats, plus_minus, report_line
from ppo_core.report import StepReport
from tests.tuner.trial_rows import make_spec, trial_row
from tuner.cli import render
from tuner.confirm.headline import Headline
from tuner.confirm.intervals import Interval, places_of
from tuner.judge.results import StudyView
from tuner.judge.scoring import Tally

UNITS: tuple[tuple[float, float], ...] = ((1, 0), (0.01, 0), (2**-7, 0), (100, 0), (1, 1000), (100, 1000), (1e-4, -40))
"""Factor and offset of a reward; that of one's own task is 1 and 0."""
in_units = pytest.mark.parametrize(("factor", "offset"), UNITS)
REWARDS, SE = (1.81, 1.87, 1.93, 1.88), 0.05


@pytest.mark.parametrize(
    ("numbers", "errors", "places"),
    [
        ([1.9], [0.051], 3),
        ([1.9, 1.8], [0.051, 0.2], 3),
        ([0.0015], [0.00003], 6),
        ([0.0, 1.2e-5, 0.51, 4.7696313], [0.0, 1.1e-6, 0.021, 0.1103152], 3),
        ([1000.41, 1000.52], [], 3),
        ([0.058], [], 4),
        ([0.0, 5.5], [], 2),
        ([5.5, 201.0], [], 2),
        ([190.0, 194.0], [4.2], 1),
        ([4000.0], [20.0], 0),
        ([1.0], [1e-30], 8),
        ([1.5, 1.5], [], 2),
        ([0.0], [0.0], 2),
        ([], [], 2),
        ([None, math.nan, math.inf, 2.5], [None, math.nan], 2),
    ],
)
def test_the_decimals_are_those_of_the_error_or_of_the_distances(numbers: Any, errors: Any, places: int) -> None:
    assert decimals(numbers, errors) == places


def test_a_stated_kl_and_a_budget_of_one_are_singular() -> None:
    assert (nats(1.0), nats(2.5)) == ("1 nat/response", "2.5 nats/response")
    tallied = Tally(ended=1, total=None, spent=0.4, budget=1.0)
    assert tallied.text == "1 trial ended, 0.4 of 1 full trial spent"
    assert replace(tallied, unit="min").text == "1 trial ended, 0.4 of 1 min spent"


@pytest.mark.parametrize(
    ("number", "signed", "text"),
    [(1.234, False, "1.23"), (0.1, True, "+0.10"), (-0.1, True, "-0.10"), (-1e-9, False, "0.00"), (None, True, "-")],
)
def test_a_number_has_its_decimals_and_a_difference_its_sign(number: float | None, signed: bool, text: str) -> None:
    assert fixed(number, 2, signed=signed) == text


def test_results_of_a_usual_task_have_two_digits_of_their_error() -> None:
    assert plus_minus(1.8237, 0.0512) == "1.824 ± 0.051"
    assert plus_minus(5.5634, 0.1213) == "5.56 ± 0.12"
    assert plus_minus(0.11, 0.051, signed=True) == "+0.110 ± 0.051"
    assert plus_minus(0.5) == "0.500" and plus_minus(None, 0.1) == "-" and measured(5.56) == "5.56"
    assert Interval(2.0123, 1.9571, 2.0672, 5).text == "2.01 [1.96, 2.07]"
    assert Interval(0.1123, 0.0571, 0.1672, 5).signed == "+0.11 [0.06, 0.17]"


@in_units
def test_a_column_tells_apart_with_one_number_of_decimals(factor: float, offset: float) -> None:
    rewards = [offset + factor * reward for reward in REWARDS]
    for errors in ([factor * SE] * len(rewards), []):
        texts = [fixed(reward, decimals(rewards, errors)) for reward in rewards]
        assert len(set(texts)) == len(texts) and len({len(text.partition(".")[2]) for text in texts}) == 1
        assert [float(text) for text in texts] == pytest.approx(rewards, abs=factor * SE / 10)


@in_units
def test_an_interval_shows_its_length(factor: float, offset: float) -> None:
    one, other = (
        Interval(*(offset + factor * (mean + half) for half in (0.0, -0.06, 0.06)), n=5) for mean in (1.81, 1.87)
    )
    places = places_of([one, None, other])
    assert one.with_places(places).split()[0] != other.with_places(places).split()[0]
    assert len(set(one.text.replace("[", "").replace("]", "").replace(",", "").split())) == 3
    assert one.span.split()[2] != one.span.split()[4]


def _cells(table: Any, column: str) -> list[str]:
    [found] = [each for each in table.columns if str(each.header).startswith(column)]
    return [str(cell) for cell in found.cells]


@in_units
def test_the_terminals_tables_tell_trials_apart(factor: float, offset: float) -> None:
    trials = [
        replace(
            trial_row(number), value_step=1, value=offset + factor * reward, value_se=factor * SE, kl=factor * 3 * reward,
            end_reward=offset + factor * (reward - 0.03), end_kl=factor * 4 * reward,
        )
        for number, reward in enumerate(REWARDS)
    ]  # fmt: skip
    numbers = [Headline(trial, None) for trial in trials]
    table = render.trials_table(numbers, {})
    for column in ("reward", "KL\n", "KL at"):
        assert len(set(_cells(table, column))) == len(trials), column
    lines = [render.trial_line(number) for number in numbers]
    for part in ("best in budget, one seed ", "KL "):
        assert len({line.split(part)[1].split()[0] for line in lines}) == len(trials), part


@in_units
def test_a_steps_line_tells_scores_apart_by_a_tenth_of_their_spread(factor: float, offset: float) -> None:
    def line(score: float) -> str:
        metrics = {"objective/scores": offset + factor * score, "objective/scores_std": factor * 0.9}
        return report_line(StepReport(3, 192, metrics), 12)

    assert line(1.0) != line(1.09)


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

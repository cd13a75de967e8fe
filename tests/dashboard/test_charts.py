"""What the charts draw, against literal numbers. Frames by hand; nothing is stored or shown."""

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dashboard import appearance, charts, curves, echarts
from dashboard.charts import Drawing
from ppo_core.metrics import METRICS
from tuner.guard_rules import RULES
from tuner.status import Status

NAN = math.nan
MARKUP = "<img src=x onerror=alert(1)>"


def steps(number: int, kl: list[float], reward: list[float] | None = None) -> pd.DataFrame:
    """Step rows of one trial, 64 episodes a step."""
    return pd.DataFrame(
        {
            "trial": number,
            "step": range(len(kl)),
            "episode": [64 * step for step in range(len(kl))],
            "objective/kl_exact": kl,
            "objective/scores": [0.1 * value for value in kl],
            "eval/reward": reward or [NAN] * len(kl),
        }
    )


def trial(number: int, status: Status = Status.COMPLETED, **values: Any) -> dict[str, Any]:
    early = {"rule": "", "reason": "", "stop_step": NAN}
    return {"number": number, "status": status, **early, "value": NAN, "value_se": NAN, "kl": NAN} | values


def kl_chart(
    frame: pd.DataFrame, *trials: dict[str, Any], chosen: tuple[int, ...] = (), drawing: Drawing | None = None
) -> dict[str, Any]:
    rows = pd.DataFrame(trials or [trial(int(number)) for number in frame["trial"].unique()])
    return charts.kl_curves(frame, rows, kl_budget=10, kl_limit=15, chosen=chosen, drawing=drawing or Drawing())


def named(option: dict[str, Any], name: str) -> dict[str, Any]:
    [series] = [series for series in option["series"] if series["name"] == name]
    return series


def names(option: dict[str, Any]) -> list[str]:
    return [series["name"] for series in option["series"]]


def drawn(option: dict[str, Any], name: str) -> list[list[float]]:
    """The points that a line draws."""
    series = named(option, name)
    source = option["dataset"][series["datasetIndex"]]["source"]
    return source[[series["encode"]["x"], series["encode"]["y"]]].to_numpy().tolist()


# KL over the run


def test_budget_and_limit_are_lines_at_their_values_and_the_shading_begins_at_the_budget() -> None:
    option = kl_chart(steps(0, [0, 2, 4]))
    limits = named(option, "Limits")
    lines = {line["name"]: line["yAxis"] for line in limits["markLine"]["data"]}
    assert lines == {"KL budget 10": 10, "Guard's limit 15": 15}
    assert limits["markArea"]["data"] == [[{"yAxis": 10}, {"yAxis": 20}]]
    assert (option["yAxis"]["min"], option["yAxis"]["max"]) == (0, 20)


def test_a_kl_over_the_limit_stays_inside_the_chart_and_its_shading() -> None:
    option = kl_chart(steps(0, [0, 30, 33]))
    assert option["yAxis"]["max"] == 35
    assert named(option, "Limits")["markArea"]["data"][0][1] == {"yAxis": 35}


def test_a_blow_up_does_not_flatten_the_rest_and_its_height_is_told() -> None:
    early = trial(0, Status.PRUNED, rule="kl_hard", stop_step=2)
    option = kl_chart(steps(0, [0, 9, 188]), early, chosen=(0,))
    assert option["yAxis"]["max"] == 45, "three times the limit"
    [stop] = named(option, "pruned")["data"]
    assert (stop["value"], stop["label"]["formatter"]) == ([2, 45], "{number|0} KL far over the limit: 188")
    log = kl_chart(steps(0, [0, 9, 188]), early, chosen=(0,), drawing=Drawing(log_kl=True))
    assert log["yAxis"]["max"] == 200
    [stop] = named(log, "pruned")["data"]
    assert (stop["value"], stop["label"]["formatter"]) == ([2, 188], "{number|0} KL far over the limit")


def test_the_guards_stop_is_marked_on_the_curve_with_its_rule_and_the_trials_colour() -> None:
    early = trial(2, Status.PRUNED, rule="kl_limit", stop_step=3)
    option = kl_chart(steps(2, [0, 8, 16, 17, 18, 19]), early, chosen=(2,))
    stops = named(option, "pruned")
    assert stops["symbol"] == appearance.mark(Status.PRUNED).echarts
    [stop] = stops["data"]
    assert stop["value"] == [3, 17]
    assert stop["label"]["show"]
    assert stop["label"]["formatter"] == "{number|2} KL over the limit"
    assert stop["itemStyle"]["color"] == stop["label"]["rich"]["number"]["color"] == "#009E73"


def test_a_stop_says_nothing_of_the_rule_on_other_charts() -> None:
    early = pd.DataFrame([trial(2, Status.PRUNED, rule="kl_limit", stop_step=2)])
    option = charts.metric_curves(steps(2, [0, 8, 16]), early, "objective/scores", chosen=(2,), drawing=Drawing())
    [stop] = named(option, "pruned")["data"]
    assert stop["value"] == pytest.approx([2, 1.6])
    assert stop["label"]["formatter"] == "{number|2}"


def test_a_failure_without_a_step_is_marked_at_its_last_one_in_grey_where_it_is_not_chosen() -> None:
    failed = trial(1, Status.FAILED, rule="out_of_memory")
    option = kl_chart(pd.concat([steps(0, [0, 1, 2]), steps(1, [0, 3])]), trial(0), failed, chosen=(0,))
    [end] = named(option, "failed")["data"]
    assert end["value"] == [1, 3]
    assert end["itemStyle"]["color"] == echarts.FAINT
    assert not end["label"]["show"]


def test_the_label_of_a_stop_near_the_right_edge_stands_left_of_it() -> None:
    rows = [trial(number, Status.PRUNED, rule="kl_limit") for number in (0, 1)]
    frame = pd.concat([steps(0, [1.0] * 5), steps(1, [1.0] * 9)])
    first, second = named(kl_chart(frame, *rows, chosen=(0, 1)), "pruned")["data"]
    assert (first["value"][0], first["label"]["position"]) == (4, "right")
    assert (second["value"][0], second["label"]["position"]) == (8, "left")


def test_a_reading_that_is_not_a_number_is_a_gap_and_a_stop_there_takes_the_height_before() -> None:
    early = trial(0, Status.PRUNED, rule="nonfinite", stop_step=3)
    option = kl_chart(steps(0, [0, 2, 5, NAN]), early, chosen=(0,))
    points = drawn(option, "Trial 0")
    assert points[:3] == [[0, 0], [1, 2], [2, 5]]
    assert points[3][0] == 3 and math.isnan(points[3][1])
    [stop] = named(option, "pruned")["data"]
    assert (stop["value"], stop["label"]["formatter"]) == ([3, 5], "{number|0} Not a number")


def test_a_trial_that_never_had_a_number_is_no_mark() -> None:
    option = kl_chart(steps(0, [NAN, NAN]), trial(0, Status.PRUNED, rule="nonfinite", stop_step=1), chosen=(0,))
    assert "pruned" not in names(option)


@pytest.mark.parametrize("rule", [MARKUP, "", "median", "{a|b}", *RULES])
def test_only_a_declared_rules_label_gets_into_a_chart(rule: str) -> None:
    early = trial(0, Status.PRUNED, rule=rule, reason=MARKUP, stop_step=1, value=1.0, kl=2.0)
    option = kl_chart(steps(0, [0, 2]), early, chosen=(0,))
    figure = charts.reward_against_kl(pd.DataFrame([early]), kl_budget=10, baseline=None, best=None)
    told = named(option, "pruned")["data"][0]["label"]["formatter"]
    assert told == ("{number|0}" + (f" {RULES[rule].label}" if rule in RULES else ""))
    assert "<img" not in json.dumps(option, default=pd.DataFrame.to_json) + figure.to_json()


def test_the_horizontal_axis_counts_steps_or_episodes() -> None:
    by_step = kl_chart(steps(0, [0, 1, 2, 3, 4]), chosen=(0,))
    assert by_step["xAxis"]["name"] == "Step (PPO iterations)"
    assert (by_step["xAxis"]["min"], by_step["xAxis"]["max"]) == (0, 4)
    by_episode = kl_chart(steps(0, [0, 1, 2, 3, 4]), chosen=(0,), drawing=Drawing(axis="episodes"))
    assert by_episode["xAxis"]["name"] == "Episodes"
    assert by_episode["xAxis"]["max"] == 256
    assert drawn(by_episode, "Trial 0")[-1] == [256, 4]


def test_a_window_is_a_part_of_the_longest_trial_and_fits_the_height_to_it() -> None:
    frame = pd.concat([steps(0, [0, 1, 2, 3, 4]), steps(1, [32, 9])])
    shown = kl_chart(frame, drawing=Drawing(window=(50, 75)))
    assert (shown["xAxis"]["min"], shown["xAxis"]["max"]) == (2, 3)
    assert shown["yAxis"]["max"] == 20
    assert kl_chart(frame)["yAxis"]["max"] == 35


@pytest.mark.parametrize("window", [(0, 0), (100, 100)])
def test_an_empty_window_still_has_a_width(window: tuple[int, int]) -> None:
    axis = kl_chart(steps(0, [0, 1, 2]), drawing=Drawing(window=window))["xAxis"]
    assert axis["max"] == axis["min"] + 1


def test_a_logarithmic_axis_draws_what_has_no_logarithm_at_its_floor() -> None:
    option = kl_chart(steps(0, [0, 0.05, 2]), chosen=(0,), drawing=Drawing(log_kl=True))
    assert (option["yAxis"]["type"], option["yAxis"]["min"]) == ("log", 0.1)
    assert drawn(option, "Trial 0") == [[0, 0.1], [1, 0.1], [2, 2]]


# Lines and the band


def test_chosen_trials_are_in_their_colour_and_dash_and_the_others_grey_behind_them() -> None:
    frame = pd.concat([steps(number, [0, 1, 2]) for number in (0, 1, 7)])
    option = kl_chart(frame, chosen=(1, 7))
    one, seven, grey = (named(option, f"Trial {number}") for number in (1, 7, 0))
    assert one["lineStyle"]["color"] == seven["lineStyle"]["color"] == "#E69F00"
    assert (one["lineStyle"]["type"], seven["lineStyle"]["type"]) == ("solid", [8, 4])
    assert grey["lineStyle"]["color"] == echarts.FAINT
    assert grey["z"] < one["z"]
    assert not grey["tooltip"]["show"]


def test_a_line_carries_its_number_unless_its_early_end_does() -> None:
    frame = pd.concat([steps(0, [0, 1, 2]), steps(1, [0, 1])])
    option = kl_chart(frame, trial(0), trial(1, Status.PRUNED, rule="kl_limit"), chosen=(0, 1))
    assert named(option, "Trial 0")["endLabel"]["formatter"] == "0"
    assert "endLabel" not in named(option, "Trial 1")


def test_a_single_point_is_seen() -> None:
    option = kl_chart(pd.concat([steps(0, [1.0]), steps(1, [1.0, 2.0])]), chosen=(0, 1))
    assert named(option, "Trial 0")["showSymbol"]
    assert not named(option, "Trial 1")["showSymbol"]


def test_more_grey_trials_than_can_be_told_apart_become_one_band() -> None:
    frame = pd.concat([steps(number, [float(number)]) for number in range(26)])
    few = kl_chart(frame[frame["trial"] < 25], chosen=(0,))
    assert "Other trials" not in names(few) and "Trial 24" in names(few)
    many = kl_chart(frame, chosen=(0,))
    assert [name for name in names(many) if name.startswith("Trial")] == ["Trial 0"]
    # The middle 80% of 1, 2, ..., 25, as a lower edge and what is stacked on it.
    [[_, low]], [[_, height]] = drawn(many, "Other trials, lower edge"), drawn(many, "Other trials")
    assert (low, height) == pytest.approx((3.4, 19.2))
    assert named(many, "Other trials")["stack"] == named(many, "Other trials, lower edge")["stack"]


def test_a_chart_without_a_step_has_its_limits() -> None:
    option = charts.kl_curves(
        steps(0, []), pd.DataFrame([trial(0)]), kl_budget=10, kl_limit=15, chosen=(0,), drawing=Drawing()
    )
    assert names(option) == ["Limits"]
    assert option["yAxis"]["max"] == 20


# Other metrics over the run


def test_a_metrics_chart_has_its_unit_its_evaluations_and_the_baseline() -> None:
    frame = steps(0, [0, 1, 2, 3], reward=[0.4, NAN, 0.9, NAN])
    rows = pd.DataFrame([trial(0)])
    option = charts.metric_curves(frame, rows, "eval/reward", chosen=(0,), drawing=Drawing(), baseline=0.4)
    assert drawn(option, "Trial 0") == [[0, 0.4], [2, 0.9]]
    assert named(option, "Trial 0")["showSymbol"]
    assert option["yAxis"]["name"] == METRICS["eval/reward"].unit
    [line] = named(option, "Limits")["markLine"]["data"]
    assert (line["name"], line["yAxis"]) == ("SFT baseline 0.40", 0.4)
    without = charts.metric_curves(frame, rows, "eval/reward", chosen=(0,), drawing=Drawing())
    assert named(without, "Limits")["markLine"]["data"] == []


# From step rows to points


def test_smoothing_is_an_exponential_mean_of_the_numbers_so_far_and_keeps_gaps() -> None:
    points = curves.points(steps(0, [3, 6, NAN, 12]), charts.KL, smoothing=0.5)["y"]
    # Weights 1, 1/2, 1/4, ... from the newest number back, divided by their sum.
    assert points.tolist() == pytest.approx([3, 7.5 / 1.5, NAN, (12 + 3 + 0.75) / 1.75], nan_ok=True)


def test_smoothing_keeps_trials_apart_and_leaves_evaluations_as_they_are() -> None:
    frame = pd.concat([steps(0, [8.0, 8.0], reward=[1, 5]), steps(1, [2.0, 2.0])], ignore_index=True)
    assert curves.points(frame, charts.KL, smoothing=0.9)["y"].tolist() == pytest.approx([8, 8, 2, 2])
    assert curves.points(frame, "eval/reward", smoothing=0.9)["y"].tolist() == [1, 5]


def test_a_long_line_is_thinned_and_keeps_its_spikes_its_gap_and_its_ends() -> None:
    y = np.sin(np.arange(10_000) / 500)
    y[[5_432, 7_777, 3_000, 3_001]] = 50, -50, NAN, NAN
    kept = curves.thinned(pd.DataFrame({"x": range(10_000), "y": y}))
    assert 300 < len(kept) <= 600
    assert {0, 5_432, 7_777, 3_000, 9_999} <= set(kept["x"])
    assert kept["x"].is_monotonic_increasing
    assert kept.loc[kept["x"] == 5_432, "y"].item() == 50


@given(y=some.lists(some.none() | some.floats(-1e6, 1e6), max_size=300), most=some.integers(8, 60))
def test_any_line_is_thinned_to_what_was_asked_for(y: list[float | None], most: int) -> None:
    line = pd.DataFrame({"x": range(len(y)), "y": pd.Series(y, dtype=float)})
    kept = curves.thinned(line, most)
    assert len(kept) <= most
    if len(line):
        assert kept["x"].iloc[[0, -1]].tolist() == [0, len(y) - 1]
        assert (kept["y"].min(), kept["y"].max()) == pytest.approx((line["y"].min(), line["y"].max()), nan_ok=True)
        assert kept["y"].isna().any() == line["y"].isna().any()
        assert kept.merge(line).shape == kept.shape


def test_a_band_lies_on_the_steps_and_skips_where_few_trials_have_a_point() -> None:
    frame = pd.concat([steps(number, [float(number), NAN, 10.0 + number]) for number in range(11)], ignore_index=True)
    frame.loc[frame["trial"].eq(10) & frame["step"].eq(1), charts.KL] = 99.0
    band = curves.band(curves.points(frame, charts.KL))
    assert band.to_numpy().tolist() == [[0, 1, 9], [2, 11, 19]]


def test_a_band_goes_on_where_most_trials_have_ended() -> None:
    frame = pd.concat([steps(number, [1.0] * (3 if number == 0 else 1)) for number in range(11)])
    assert curves.band(curves.points(frame, charts.KL))["x"].tolist() == [0, 1, 2]


def test_a_band_of_no_numbers_is_empty() -> None:
    option = kl_chart(pd.concat([steps(number, [NAN]) for number in range(26)]))
    assert drawn(option, "Other trials") == []


# How trials look


def test_every_status_has_its_own_symbol_everywhere() -> None:
    for library in ("glyph", "plotly", "echarts"):
        assert len({getattr(appearance.mark(status), library) for status in Status}) == len(Status)


def test_colours_come_round_with_another_dash_before_anything_repeats() -> None:
    looks = [(appearance.colour(number), appearance.dash(number).css) for number in range(25)]
    assert appearance.DISTINCT == 24
    assert len(set(looks[:24])) == 24
    assert looks[24] == looks[0]
    assert looks[6][0] == looks[0][0] and looks[6][1] != looks[0][1]


# Reward against KL


ENDED = pd.DataFrame(
    [
        trial(0, value=1.0, value_se=0.1, kl=4.0),
        trial(1, Status.PRUNED, rule="kl_limit", value=1.4, value_se=0.2, kl=25.0),
        trial(2, value=1.3, value_se=0.1, kl=9.0),
        trial(3, Status.FAILED, rule="out_of_memory"),
    ]
)


def against_kl(best: int | None = 2, chosen: tuple[int, ...] = (), baseline: float | None = 0.4) -> go.Figure:
    return charts.reward_against_kl(ENDED, kl_budget=10, baseline=baseline, best=best, chosen=chosen)


def points_of(figure: go.Figure, status: Status) -> go.Scatter:
    [points] = [trace for trace in figure.data if trace.legendgroup == status.value and trace.customdata is not None]
    return points


def test_each_trial_that_ended_with_a_value_is_a_point_with_its_number_status_and_error() -> None:
    completed, pruned = (points_of(against_kl(), status) for status in (Status.COMPLETED, Status.PRUNED))
    assert (list(completed.x), list(completed.y)) == ([4, 9], [1.0, 1.3])
    assert (list(pruned.x), list(pruned.y)) == ([25], [1.4])
    assert list(completed.text) == ["0", "2"]
    assert list(completed.error_y.array) == [0.1, 0.1]
    assert list(completed.marker.color) == ["#0072B2", "#009E73"]
    assert (completed.marker.symbol, pruned.marker.symbol) == ("circle", "x")


def test_neighbours_by_kl_have_their_numbers_on_different_sides_whatever_their_status() -> None:
    rows = pd.DataFrame(
        [trial(0, value=1.0, kl=4.0), trial(1, value=1.0, kl=6.0), trial(2, Status.PRUNED, value=1.0, kl=5.0)]
    )
    figure = charts.reward_against_kl(rows, kl_budget=10, baseline=None, best=None)
    assert list(points_of(figure, Status.COMPLETED).textposition) == ["top center", "top center"]
    assert list(points_of(figure, Status.PRUNED).textposition) == ["bottom center"]


def test_the_legend_names_the_statuses_that_are_drawn() -> None:
    assert [trace.name for trace in against_kl().data if trace.showlegend is not False] == ["completed", "pruned"]


def test_budget_baseline_and_best_are_drawn_at_their_values() -> None:
    figure = against_kl()
    shading, budget, baseline = figure.layout.shapes
    assert (shading.x0, shading.x1) == (10, pytest.approx(27.5))
    assert (budget.x0, budget.x1, baseline.y0, baseline.y1) == (10, 10, 0.4, 0.4)
    *lines, best = figure.layout.annotations
    assert [line.text for line in lines] == ["KL budget 10", "SFT baseline 0.40"]
    assert (best.text, best.x, best.y) == ("best: trial 2", 9, 1.3)
    assert figure.layout.xaxis.title.text == METRICS["eval/kl"].title
    low, high = figure.layout.yaxis.range
    assert low < 0.4 and high > 1.4


def test_without_a_best_or_a_baseline_neither_is_drawn() -> None:
    figure = against_kl(best=None, baseline=None)
    assert [note.text for note in figure.layout.annotations] == ["KL budget 10"]
    assert len(figure.layout.shapes) == 2


def test_chosen_trials_and_the_best_stand_out() -> None:
    figure = against_kl(best=2, chosen=(1,))
    completed, pruned = points_of(figure, Status.COMPLETED), points_of(figure, Status.PRUNED)
    assert (list(completed.text), list(pruned.text)) == (["", "2"], ["1"])
    assert (list(completed.marker.opacity), list(pruned.marker.opacity)) == ([0.4, 1.0], [1.0])
    assert math.isnan(completed.error_y.array[0])

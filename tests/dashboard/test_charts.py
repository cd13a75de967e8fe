"""What the live curves draw, against literal numbers: axes, levels, marks, spreads, and how much they hold."""

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dashboard import charts, curve_points, echarts, style
from dashboard.curve_points import Drawing
from dashboard.data import Snapshot
from dashboard.views import answer, curve_charts, curves
from ppo_core.metrics import METRICS
from tests.dashboard.fake_store import COURSES, SPEC
from tuner.judge.results import StudyView
from tuner.study.rules import RULES
from tuner.study.status import Status

NAN = math.nan
KL, SCORE = "objective/kl_exact", "objective/scores"
LEVELS = {"KL budget 10": 10.0, "Guard stops at 15": 15.0}
MARKUP = "<img src=x onerror=alert(1)>"


def steps(number: int, kl: list[float], **columns: list[float]) -> pd.DataFrame:
    """Step rows of one trial: 64 episodes and two seconds per step."""
    count = len(kl)
    frame = pd.DataFrame({"trial": number, "step": range(count), KL: kl, SCORE: [-value for value in kl]})
    frame["episode"], frame["at"] = 64 * frame["step"], 1_000.0 + 2 * frame["step"]
    return frame.assign(**columns)


def trial(number: int, status: Status = Status.COMPLETED, **values: Any) -> dict[str, Any]:
    early = {"rule": "", "reason": "", "stop_step": NAN, "value_step": NAN, "fork_step": NAN}
    return {"number": number, "status": status, **early} | values


def chart(
    frame: pd.DataFrame,
    *trials: dict[str, Any],
    metric: str = KL,
    chosen: tuple[int, ...] = (),
    levels: dict[str, float] | None = None,
    targets: dict[str, float] | None = None,
    **drawing: Any,
) -> dict[str, Any]:
    rows = pd.DataFrame(trials or [trial(int(number)) for number in frame["trial"].unique()])
    levels = (LEVELS if metric == KL else {}) if levels is None else levels
    return charts.curve(
        frame, rows, metric, looks=style.looks(chosen), drawing=Drawing(**drawing), levels=levels, targets=targets,
        kl_budget=10,
    )  # fmt: skip


def named(option: dict[str, Any], name: str) -> dict[str, Any]:
    """The visible series of this name."""
    [series] = [series for series in option["series"] if series["name"] in (name, f"{name}, line") and is_seen(series)]
    return series


def names(option: dict[str, Any]) -> list[str]:
    """The names of the visible series."""
    return [series["name"].removesuffix(", line") for series in option["series"] if is_seen(series)]


def is_seen(series: dict[str, Any]) -> bool:
    return bool(series.get("symbol") != "none")


def drawn(option: dict[str, Any], name: str) -> list[list[float]]:
    series = named(option, name)
    source = option["dataset"][series["datasetIndex"]]["source"]
    return source[[series["encode"]["x"], series["encode"]["y"]]].to_numpy().tolist()


def test_the_tooltip_lists_every_trial_in_colour_at_its_nearest_step() -> None:
    frame = pd.concat([steps(0, [0, 2, 4, 6]), steps(1, [1, 3]), steps(2, [9, 9, 9, 9])])
    frame.loc[frame["trial"] == 1, "step"] *= 3  # of a larger batch: steps 0 and 3
    option = chart(frame, chosen=(0, 1))
    lists = {one["name"]: one for one in option["series"] if one.get("symbol") == "none"}
    assert set(lists) == {"Trial 0", "Trial 1"}
    read = {name: option["dataset"][one["datasetIndex"]]["source"] for name, one in lists.items()}
    assert read["Trial 0"]["x"].tolist() == read["Trial 1"]["x"].tolist() == [0, 1, 2, 3], "ECharts lists equal places"
    assert read["Trial 0"]["Trial 0"].tolist() == [0, 2, 4, 6]
    assert read["Trial 1"]["Trial 1"].tolist() == [1, 1, 3, 3]
    told = [one["name"] for one in option["series"] if one.get("tooltip", {}).get("show") is not False]
    assert told == ["Trial 0", "Trial 1"], "each once"


# The KL's axis, its budget, limit and target


def test_budget_and_limit_are_drawn_and_the_shading_begins_at_the_budget() -> None:
    option = chart(steps(0, [0, 2, 14]))
    limits = named(option, "Limits")
    assert {line["name"]: line["yAxis"] for line in limits["markLine"]["data"]} == LEVELS
    assert limits["markArea"]["data"] == [[{"yAxis": 10}, {"yAxis": 20}]]
    assert (option["yAxis"]["min"], option["yAxis"]["max"]) == (0, 20)


def test_a_blow_up_does_not_flatten_the_rest_and_its_height_is_told() -> None:
    early = trial(0, Status.PRUNED, rule="kl_hard", stop_step=2)
    option = chart(steps(0, [0, 9, 188]), early, chosen=(0,))
    assert option["yAxis"]["max"] == 25, "one and a half times the limit, on a tick"
    [stop] = named(option, "pruned")["data"]
    assert (stop["value"], stop["label"]["formatter"]) == ([2, 25], "{number|0}{more|KL far over the limit: 188}")
    log = chart(steps(0, [0, 9, 188]), early, chosen=(0,), log_kl=True)
    assert (log["yAxis"]["type"], log["yAxis"]["min"], log["yAxis"]["max"]) == ("log", 0.1, 200)
    assert drawn(log, "Trial 0")[0] == [0, pytest.approx(0.1)]
    [stop] = named(log, "pruned")["data"]
    assert (stop["value"], stop["label"]["formatter"]) == ([2, 188], "{number|0}{more|KL far over the limit}")


def test_a_stop_is_at_the_step_of_its_reason_in_the_trials_colour() -> None:
    early = trial(2, Status.PRUNED, rule="kl_limit", stop_step=3)
    stops = named(chart(steps(2, [0, 8, 16, 17, 18, 19]), early, chosen=(2,)), "pruned")
    assert stops["symbol"] == style.mark(Status.PRUNED).echarts
    [stop] = stops["data"]
    assert stop["value"] == [3, 17] and stop["label"]["show"]
    assert stop["itemStyle"]["color"] == stop["label"]["rich"]["number"]["backgroundColor"] == "#009E73"


def test_what_is_no_number_is_a_gap_and_a_stop_has_the_height_before() -> None:
    option = chart(steps(0, [0, 2, 5, NAN]), trial(0, Status.PRUNED, rule="nonfinite", stop_step=3), chosen=(0,))
    assert [math.isnan(y) for _, y in drawn(option, "Trial 0")] == [False, False, False, True]
    assert named(option, "pruned")["data"][0]["value"] == [3, 5]
    never = chart(steps(0, [NAN, NAN]), trial(0, Status.PRUNED, rule="nonfinite", stop_step=1), chosen=(0,))
    assert "pruned" not in names(never)


@pytest.mark.parametrize("rule", [MARKUP, "", "{a|b}", *RULES])
def test_a_stop_is_marked_with_its_rule_alone_on_every_chart(rule: str) -> None:
    early = trial(0, Status.PRUNED, rule=rule, reason=MARKUP, stop_step=1)
    for metric in (KL, SCORE):
        option = chart(steps(0, [0, 2, 3]), early, chosen=(0,), metric=metric)
        [stop] = named(option, "pruned")["data"]
        assert stop["value"] == [1, 2 if metric == KL else -2]
        assert stop["label"]["formatter"] == "{number|0}" + (f"{{more|{RULES[rule].label}}}" if rule in RULES else "")
        assert "<img" not in json.dumps(option, default=pd.DataFrame.to_json)


def test_the_target_of_an_adaptive_trial_is_a_level() -> None:
    rows = [SimpleNamespace(number=number, config=course.params) for number, course in enumerate(COURSES)]
    known = pd.DataFrame({"value": [0.91], "value_se": [0.2]})
    snapshot = Snapshot(cast(StudyView, SimpleNamespace(spec=SPEC, trials=rows)), known)
    frame = pd.concat([steps(number, [0.0]) for number in (0, 1, 4, 11, 13, 14)])
    assert curve_charts.targets(snapshot, (0, 4), frame) == {"Target of trial 4: 6.1": 6.1}
    option = chart(frame, trial(0), levels={"KL budget 10": 10.0}, targets={"KL target: 6.1": 6.1})
    assert [line["yAxis"] for line in named(option, "Limits")["markLine"]["data"]] == [10.0, 6.1]
    held = [SimpleNamespace(number=row.number, config={"kl_target": 5.1}) for row in rows]
    shared = Snapshot(cast(StudyView, SimpleNamespace(spec=SPEC, trials=held)), pd.DataFrame())
    assert curve_charts.targets(shared, (0, 1, 4), frame) == {"KL target: 5.1": 5.1}
    assert curve_charts.targets(snapshot, (0, 1), frame) == {}
    assert curve_charts.targets(snapshot, (0, 4), steps(0, [0.0])) == {}, "trial 4 has made no step"
    assert curve_charts.levels(snapshot, KL) == {
        "KL budget 10": 10.0, "Guard stops after 3 steps over 15": 15.0, "Guard stops at once over 60": 60.0
    }  # fmt: skip
    assert curve_charts.levels(snapshot, "eval/reward", 0.42) == {"SFT policy 0.42": 0.42}
    assert curve_charts.levels(snapshot, SCORE, 0.42) == {}


# The best so far


FOUND = pd.DataFrame({"seconds": [10.0, 30.0], "value": [1.0, 1.5], "trial": [4, 7], "step": [3, 9]})


def test_the_best_so_far_is_a_line_of_steps_to_all_that_was_spent() -> None:
    option = answer.progress(FOUND, 80, 0.42)
    assert drawn(option, "Best so far") == [[0, pytest.approx(0.42)], [10, 1], [30, 1.5], [80, 1.5]]
    assert named(option, "Best so far")["step"] == "end"
    risen = named(option, "Trial 7 at step 9")
    assert option["dataset"][risen["datasetIndex"]]["source"].to_numpy().tolist() == [[30, 1.5, 1.5]]
    assert [line["name"] for line in named(option, "Limits")["markLine"]["data"]] == ["SFT policy 0.42"]
    assert (option["xAxis"]["name"], option["xAxis"]["max"]) == ("Device-seconds of the search", 80)


# Horizontal axes


def test_tokens_are_the_mean_length_times_the_new_episodes_so_far() -> None:
    frame = steps(0, [0, 1, 2], **{"response/length_mean": [5.0, 10.0, 20.0]})
    assert curve_points.positions(frame, "tokens").tolist() == [0, 640, 640 + 1280]


def test_seconds_are_the_trials_own_and_a_pause_counts_as_one_step() -> None:
    frame = steps(0, [0, 1, 2, 3, 4]).assign(at=[100.0, 102, 104, 5000, 5002])
    both = pd.concat([frame, steps(1, [0, 1])], ignore_index=True)
    assert curve_points.positions(both, "seconds").tolist() == [0, 2, 4, 6, 8, 0, 2]


@pytest.mark.parametrize("axis", curve_points.AXES)
def test_every_axis_has_a_title_and_ends_with_the_longest_trial(axis: curve_points.Axis) -> None:
    frame = steps(0, [0, 1, 2], **{"response/length_mean": [10.0] * 3})
    option = chart(frame, metric=SCORE, axis=axis)
    ends = {"step": 2, "episodes": 128, "tokens": 1280, "seconds": 4, "KL": 2}
    assert (option["xAxis"]["max"], option["xAxis"]["name"]) == (ends[axis], curve_points.AXIS_TITLES[axis])


def test_a_window_is_a_part_of_the_longest_trial_and_the_height_fits_it() -> None:
    frame = pd.concat([steps(0, [0, 1, 2, 3, 4]), steps(1, [32, 9])])
    shown = chart(frame, window=(50, 75))
    assert (shown["xAxis"]["min"], shown["xAxis"]["max"]) == (2, 3)
    assert (shown["yAxis"]["max"], chart(frame)["yAxis"]["max"]) == (15, 25)


# Lines, bands and spreads


def test_an_evaluations_metric_has_its_points_its_unit_and_the_baseline() -> None:
    frame = steps(0, [0, 1, 2, 3], **{"eval/reward": [0.5, NAN, 0.75, NAN]})
    option = chart(frame, metric="eval/reward", chosen=(0,), levels={"SFT policy 0.50": 0.5}, smoothing=0.9)
    assert drawn(option, "Trial 0") == [[0, 0.5], [2, 0.75]]
    assert named(option, "Trial 0")["showSymbol"]
    assert option["yAxis"]["name"] == METRICS["eval/reward"].unit
    limits = named(option, "Limits")["markLine"]
    assert [line["yAxis"] for line in limits["data"]] == [0.5]
    assert limits["precision"] < 0, "ECharts would round 0.035 to 0.04"


def test_evaluations_over_budget_are_hollow_and_what_counts_has_a_star() -> None:
    """KL + one standard error decides: 9.5 ± 0.6 is over 10."""
    kls = {"eval/kl": [1.0, NAN, 9.0, 9.5, 12.0], "eval/kl_se": [0.1, NAN, 0.1, 0.6, 0.1]}
    frame = steps(0, [0, 1, 8, 9, 11], **kls, **{"eval/reward": [0.5, NAN, 0.7, 0.8, 0.9]})
    for metric, heights in (("eval/reward", [0.5, 0.7, 0.8, 0.9]), (KL, [1.0, 9.0, 9.5, 12.0])):
        option = chart(frame, trial(0, value_step=2), chosen=(0, 7), metric=metric)  # 7 has not begun
        first, counted, *over = heights
        assert named(option, "Trial 0, within")["data"] == [[0, first]]
        assert named(option, "Trial 0, counted")["data"] == [[2, counted]]
        hollow = named(option, "Trial 0, over")
        assert hollow["data"] == [[3, over[0]], [4, over[1]]] and hollow["itemStyle"]["color"] == "transparent"
    assert not [name for name in names(chart(frame, trial(0), chosen=(0,), metric=SCORE)) if "," in name]


def test_a_part_selected_on_a_chart_is_in_percent_of_the_longest_trial() -> None:
    frame = steps(0, [1.0] * 11)
    assert curve_points.zoomed(frame, "step", (2.5, 5)) == (25, 50)
    assert curve_points.zoomed(frame, "step", (-3, 99)) == curve_points.WHOLE
    assert curve_points.zoomed(frame, "step", (4, 4)) == curve_points.WHOLE, "a click selects nothing"
    option = chart(frame, chosen=(0,), window=(25.0, 50.0))
    assert (option["xAxis"]["min"], option["xAxis"]["max"]) == (2, 5)
    assert option["toolbox"]["feature"]["brush"]["type"] == ["lineX"]


def test_smoothing_is_an_exponential_mean_that_keeps_gaps() -> None:
    frame = pd.concat([steps(0, [3, 6, NAN, 12]), steps(1, [2.0, 2.0])], ignore_index=True)
    smooth = curve_points.points_of(frame, KL, smoothing=0.5)["y"]
    # Weights 1, 1/2, 1/4, ... from the newest number back, divided by their sum.
    assert smooth.tolist() == pytest.approx([3, 7.5 / 1.5, NAN, (12 + 3 + 0.75) / 1.75, 2, 2], nan_ok=True)


@given(y=some.lists(some.none() | some.floats(-1e6, 1e6), max_size=300), most=some.integers(8, 60))
def test_any_line_is_thinned_to_what_was_asked_for(y: list[float | None], most: int) -> None:
    line = pd.DataFrame({"x": range(len(y)), "y": pd.Series(y, dtype=float)})
    kept = curve_points.thinned(line, most)
    assert len(kept) <= most
    if len(line):
        assert kept["x"].iloc[[0, -1]].tolist() == [0, len(y) - 1]
        assert (kept["y"].min(), kept["y"].max()) == pytest.approx((line["y"].min(), line["y"].max()), nan_ok=True)
        assert kept["y"].isna().any() == line["y"].isna().any()
        assert kept.merge(line).shape == kept.shape


def test_a_band_lies_on_the_steps_and_skips_where_few_trials_have_a_point() -> None:
    frame = pd.concat([steps(number, [float(number), NAN, 10.0 + number]) for number in range(11)], ignore_index=True)
    frame.loc[frame["trial"].eq(10) & frame["step"].eq(1), KL] = 99.0
    assert curve_points.band_edges(curve_points.points_of(frame, KL), 60).to_numpy().tolist() == [
        [0, 1, 9, 5, 0],
        [2, 11, 19, 15, 2],
    ]
    assert curve_points.band_edges(curve_points.points_of(frame, KL), 60, least=12).empty


def test_more_grey_trials_than_can_be_told_apart_become_one_band() -> None:
    frame = pd.concat([steps(number, [float(number)]) for number in range(26)])
    few, many = names(chart(frame[frame["trial"] < 25], chosen=(0,))), names(chart(frame, chosen=(0,)))
    assert "Other trials" not in few and "Trial 24" in few
    assert "Other trials" in many and [name for name in many if name.startswith("Trial")] == ["Trial 0"]


def test_an_evaluation_of_few_trials_has_its_standard_error_behind_it() -> None:
    errors = {"eval/reward": [0.5, 1.0, NAN], "eval/reward_se": [0.1, 0.2, NAN]}
    few, many = (pd.concat([steps(number, [0, 1, 2], **errors) for number in range(count)]) for count in (3, 4))
    option = chart(few, metric="eval/reward", chosen=(0, 1, 2))
    areas = [option["dataset"][one["datasetIndex"]]["source"] for one in option["series"] if one.get("stack")]
    assert len(areas) == 6
    low, height = (area.to_numpy().tolist() for area in areas[:2])
    assert low == [[0, pytest.approx(0.4)], [1, pytest.approx(0.8)]]
    assert height == [[0, pytest.approx(0.2)], [1, pytest.approx(0.4)]]
    assert not [one for one in chart(many, metric="eval/reward", chosen=(0, 1, 2, 3))["series"] if one.get("stack")]


QUARTERS = ("min", "q25", "q50", "q75", "max")


def spread(count: int) -> pd.DataFrame:
    columns = {f"{SCORE}_{name}": [-2.0 + place] * 3 for place, name in enumerate(QUARTERS)}
    return pd.concat([steps(number, [0, 1, 2], **columns) for number in range(count)], ignore_index=True)


def test_a_chart_holds_so_many_points_however_many_lines_and_keeps_a_spike() -> None:
    spiked = [1.0] * 3_000
    spiked[1_234] = 14.0
    option = chart(pd.concat([steps(number, spiked) for number in range(20)]), chosen=tuple(range(20)))
    sizes = [len(data["source"]) for data in option["dataset"]]
    assert len(sizes) == 2 * 20 and 200 < sum(sizes) <= charts.MOST_IN_ALL
    assert [1_234, 14] in drawn(option, "Trial 7")
    assert {str(kind) for data in option["dataset"] for kind in data["source"].dtypes} == {"float32"}


# The selector of metrics


def test_every_metric_but_quantiles_can_be_chosen_and_with_its_group() -> None:
    offered = curves.by_group()
    own = {f"{name}_{suffix}" for name in (SCORE, "objective/rlhf_reward") for suffix in QUARTERS}
    groups = [*curves.GROUPS.values(), "Run"]
    assert set(offered) == {*METRICS, *groups} - own
    labels = [curves.label(metric) for metric in offered]
    assert len(set(labels)) == len(labels)
    assert list(dict.fromkeys(label.split(":")[0] for label in labels)) == groups
    assert curves.metrics_of(["Critic", "value/lr", KL]) == ("value/grad_norm", "value/lr", KL)
    assert set(curves.metrics_of(groups)) == set(METRICS) - own


# What a fork inherited, what is behind smoothed lines, groups, one cursor, and what there is to see


def test_what_a_fork_has_from_its_parent_is_dotted_and_not_its_own() -> None:
    option = chart(steps(5, [0, 1, 2, 3, 4]), trial(5, fork_step=2), chosen=(5,))
    inherited, own = named(option, "Trial 5, inherited"), named(option, "Trial 5")
    assert [x for x, _ in drawn(option, "Trial 5, inherited")] == [0, 1, 2]
    assert [x for x, _ in drawn(option, "Trial 5")] == [2, 3, 4]
    assert inherited["lineStyle"]["type"] == style.DOTTED.echarts != own["lineStyle"]["type"]
    assert "Trial 5, inherited" not in names(chart(steps(5, [0, 1]), trial(5, fork_step=0), chosen=(5,)))


def test_groups_are_their_means_and_bands_in_place_of_trials() -> None:
    frame = pd.concat([steps(number, [0.0, float(number)]) for number in range(4)])
    rows = pd.DataFrame([trial(number, Status.PRUNED) for number in range(4)])
    groups = {0: "up to 1", 1: "up to 1", 2: "over 1", 3: "over 1"}
    option = charts.curve(frame, rows, KL, looks=style.looks([0]), drawing=Drawing(), levels=LEVELS, groups=groups)
    assert drawn(option, "up to 1") == [[0, 0], [1, 0.5]] and drawn(option, "over 1") == [[0, 0], [1, 2.5]]
    assert drawn(option, "over 1, lower edge")[1] == [1, pytest.approx(2.1)]
    assert not [name for name in names(option) if name.startswith("Trial") or name == "pruned"]


def test_charts_that_share_a_cursor_are_one_with_a_panel_each() -> None:
    frame = steps(0, [0, 1, 2])
    kl, score = chart(frame, chosen=(0,)), chart(frame, chosen=(0,), metric=SCORE)
    option = echarts.stacked([kl, score], ["KL", "Score"], 300)
    assert option["axisPointer"]["link"] == [{"xAxisIndex": "all"}]
    assert [axis["name"] for axis in option["yAxis"]] == ["KL", "Score"]
    lines = [series for series in option["series"] if series["name"] == "Trial 0, line"]
    assert [(one["xAxisIndex"], one["yAxisIndex"]) for one in lines] == [(0, 0), (1, 1)]
    heights = [option["dataset"][one["datasetIndex"]]["source"]["Trial 0, line"].tolist() for one in lines]
    assert heights == [[0, 1, 2], [0, -1, -2]]


# Budgets of any size


@pytest.mark.parametrize("budget", [0.05, 0.5, 50.0])
@pytest.mark.parametrize("log_kl", [False, True])
def test_a_kl_axis_of_any_budget_has_budget_and_limit_on_it(budget: float, log_kl: bool) -> None:
    kls = [0.0, 0.4 * budget, 0.9 * budget, 1.6 * budget, 2.2 * budget]
    levels = {"KL budget": budget, "Guard": 2.5 * budget}
    option = chart(steps(0, kls), trial(0), chosen=(0,), levels=levels, log_kl=log_kl)
    low, high = option["yAxis"]["min"], option["yAxis"]["max"]
    assert low < 0.1 * budget and high > 2.5 * budget
    assert [line["name"] for line in named(option, "Limits")["markLine"]["data"]] == list(levels)
    heights = [y for _, y in drawn(option, "Trial 0")]
    assert len(set(heights)) == len(kls) and min(heights) == pytest.approx(low) and max(heights) <= high

"""What the Plotly figures draw, against literal numbers. Frames by hand; nothing is stored or shown."""

import json
import math
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest

from dashboard import analysis, figures, importance_figures, style
from dashboard.analysis import Checkpoint
from ppo_core.metrics import METRICS
from tests.dashboard.fake_store import SPEC
from tests.tuner.trial_rows import trial_row
from tuner.confirm.intervals import Interval
from tuner.confirm.result import Confirmed
from tuner.search.importance import Importance
from tuner.study.rules import RULES
from tuner.study.status import Origin, Status

NAN = math.nan
MARKUP = "<img src=x onerror=alert(1)>"


def trial(number: int, status: Status = Status.COMPLETED, **values: Any) -> dict[str, Any]:
    early = {"rule": "", "reason": "", "stop_step": NAN}
    empty = dict.fromkeys(("value", "value_se", "kl", "end_kl"), NAN)
    return {"number": number, "status": status, **early, **empty} | values


def evaluated(*rows: tuple[int, int, float, float]) -> pd.DataFrame:
    """Evaluations from (trial, step, reward, KL)."""
    frame = pd.DataFrame(rows, columns=["trial", "step", "eval/reward", "eval/kl"])
    return analysis.evaluations(frame.assign(episode=64 * frame["step"]))


# How trials look


def test_every_status_has_its_own_symbol_everywhere() -> None:
    for library in ("glyph", "plotly", "echarts"):
        assert len({getattr(style.mark(status), library) for status in Status}) == len(Status)


def test_a_trials_colour_is_its_numbers_or_the_next_free_one() -> None:
    looks = style.looks([49, 1, 25, 2])
    assert {number: (look.colour, look.dash) for number, look in looks.items()} == {
        1: ("#009E73", style.SOLID), 2: ("#56B4E9", style.SOLID), 25: ("#CC79A7", style.SOLID),
        49: ("#E69F00", style.SOLID),
    }  # fmt: skip
    assert list(looks) == [1, 2, 25, 49]
    assert looks[49] == style.looks([49])[49] and looks[1] == style.looks([49, 1])[1], "one more changes none before"
    assert {number for number, look in style.looks(range(200)).items() if look.colour == "#0072B2"} == {0}
    assert len(set(style.looks(range(33)).values())) == 33
    for drawn in ((0, 5, 21), (572, 220, 0), range(9)):
        assert len({look.colour for look in style.looks(drawn).values()}) == len(drawn), "no twins"


# Trajectories


WAYS = evaluated((0, 0, 0.4, 0), (0, 5, 1.0, 4), (0, 9, 1.2, 8), (1, 0, 0.4, 0), (1, 5, 1.3, 20), (2, 0, 0.4, 0))
TRIALS = pd.DataFrame([trial(0), trial(1, Status.PRUNED, rule="kl_limit"), trial(2, Status.FAILED, rule=MARKUP)])


def ways(chosen: tuple[int, ...] = (0,), **more: Any) -> go.Figure:
    return figures.trajectories(WAYS, TRIALS, spec=SPEC, looks=style.looks(chosen), **more)


def named(figure: go.Figure, name: str) -> go.Scatter:
    [trace] = [trace for trace in figure.data if trace.name == name]
    return trace


def labels(figure: go.Figure) -> dict[str, tuple[float, float, float, float]]:
    """Where each trial's number points, and its place from there in pixels to the right and up, by number."""
    return {note.text: (note.x, note.y, note.ax, -note.ay) for note in figure.layout.annotations if note.text.isdigit()}


def test_a_chosen_trials_way_is_in_its_colour_with_its_number_at_the_end() -> None:
    way = named(ways(), "trial 0")
    assert (list(way.x), list(way.y)) == ([0, 4, 8], [0.4, 1.0, 1.2])
    assert way.line.color == style.colour(0)
    assert labels(ways()) == {"0": (8, 1.2, 28, 0)}, "to the right, where no line is"
    [number] = [note for note in ways().layout.annotations if note.text == "0"]
    assert (number.bgcolor, number.font.color) == ("#0072B2", "#ffffff")


def test_all_other_ways_are_one_grey_line_with_gaps() -> None:
    others = named(ways(), "other trials")
    assert [None if math.isnan(x) else x for x in others.x] == [0, 20, None, 0, None]
    assert [point[0] for point in others.customdata] == [1, 1, 1, 2, 2], "a click selects"
    assert others.line.color.endswith("0.30)") and named(ways(), "trial 0").line.width == 3


def test_stops_are_at_the_last_evaluation_with_the_rules_label_alone() -> None:
    marks = {
        trace.legendgroup: trace for trace in ways((1,)).data if trace.customdata is not None and trace.legendgroup
    }
    pruned = marks["pruned"]
    assert (list(pruned.x), list(pruned.y)) == ([12.5], [1.3]), "at the axis's end"
    x, y, right, _ = labels(ways((1,)))["1"]
    assert (x, y) == (12.5, 1.3) and right < 0, "there is no room to the right"
    assert not [trace for trace in ways((0,)).data if trace.legendgroup == "pruned"], "a grey one that left the axis"
    assert pruned.marker.symbol == style.mark(Status.PRUNED).plotly
    assert pruned.customdata[0][1] == RULES["kl_limit"].label
    assert list(pruned.marker.color) == [style.colour(1)]
    assert list(marks["failed"].marker.color) == [figures.GREY]
    assert MARKUP not in ways((1, 2)).to_json()


def test_budget_limit_baseline_and_best_checkpoint_are_at_their_values() -> None:
    figure = ways(best=Checkpoint(0, 9, 576, 1.2, NAN, 8, NAN))
    shading, budget, baseline = figure.layout.shapes
    assert (shading.x0, budget.x0, baseline.y0) == (10, 10, pytest.approx(0.4))
    star = named(figure, "best checkpoint: trial 0, step 9")
    assert (star.x, star.y, star.marker.symbol) == ((8,), (1.2,), "star")
    assert figure.layout.xaxis.title.text == METRICS["eval/kl"].title
    assert list(figure.layout.xaxis.range) == [0, 12.5]
    assert ways(log_kl=True).layout.shapes[2].x0 == 15, "the guard's limit, where the axis reaches it"


def test_the_means_of_fresh_seeds_are_diamonds_with_their_intervals() -> None:
    reward, kl = Interval(1.1, 0.2, 1.5, 3), Interval(6.0, 5.0, 7.0, 3)
    number, reference = (
        Confirmed(trial_row(place, origin=origin), 1920, {}, {}, {}, reward, kl)
        for place, origin in ((0, Origin.SAMPLED), (2, Origin.REFERENCE))
    )
    figure = ways(confirmed=(number, reference, replace(number, reward=None)))
    mine, its, legend = [trace for trace in figure.data if trace.marker.symbol == "diamond" and trace.marker.size == 13]
    assert (mine.x, mine.y, mine.marker.color) == ((6.0,), (1.1,), style.colour(0))
    assert (mine.error_y.array[0], mine.error_y.arrayminus[0]) == (pytest.approx(0.4), pytest.approx(0.9))
    assert (mine.error_x.array[0], mine.error_x.arrayminus[0]) == (1.0, 1.0)
    assert its.marker.color == figures.GREY and its.hovertemplate.startswith("<b>reference (2)</b>, mean of 3 fresh")
    assert (legend.name, mine.showlegend) == ("mean of fresh seeds, 95% interval", False)
    assert figure.layout.yaxis.range[0] < 0.2, "the interval is in sight"
    assert not [trace for trace in ways().data if "fresh seeds" in (trace.name or "")]


def test_a_blow_up_does_not_stretch_a_linear_axis() -> None:
    blown = pd.concat([WAYS, evaluated((3, 1, 0.1, 200))])
    figure = figures.trajectories(blown, TRIALS, spec=SPEC, looks={})
    assert figure.layout.xaxis.range[1] == 12.5, "19 in 20 of the evaluations"
    log = ways(log_kl=True, best=Checkpoint(0, 9, 576, 1.2, NAN, 8, NAN))
    assert log.layout.xaxis.type == "log"
    assert list(log.layout.xaxis.range) == [-1, pytest.approx(math.log10(22))]
    assert list(named(log, "trial 0").x) == [0.1, 4, 8]
    assert (log.layout.shapes[1].x0, log.layout.annotations[0].x) == (10, pytest.approx(1))
    assert log.layout.annotations[-1].x == pytest.approx(math.log10(8)), "its number"


# What mattered


def searched(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([trial(number, **row) for number, row in enumerate(rows)])


SEARCHED = searched(
    {"value": 1.0, "end_kl": 4.0, "params_learning_rate": 1e-4, "params_cliprange": 0.1, "params_kl_target": 6.0},
    {"value": 1.2, "end_kl": 9.0, "params_learning_rate": 1e-3, "params_cliprange": 0.2, "params_kl_target": NAN},
    {"value": 0.8, "end_kl": 25.0, "params_learning_rate": 1e-2, "params_cliprange": 0.3, "status": Status.PRUNED},
    {"params_learning_rate": 1e-5, "params_cliprange": 0.3, "status": Status.FAILED},
)


def test_importance_bars_have_the_largest_on_top_and_pale_ones_for_chance() -> None:
    figure = importance_figures.importance_bars(
        [Importance("learning_rate", 0.7, 0.5, 0.8, 0.02), Importance("cliprange", 0.3, 0.1, 0.4, 0.5)]
    )
    [bars] = figure.data
    assert list(bars.y) == [figures.title_of("cliprange"), figures.title_of("learning_rate")]
    assert list(bars.marker.color) == [importance_figures.UNSURE, importance_figures.SURE]
    assert list(bars.error_x.array) == pytest.approx([0.1, 0.1])
    assert list(bars.error_x.arrayminus) == pytest.approx([0.2, 0.2])


def test_a_slice_has_a_symbol_a_status_and_the_searched_scale() -> None:
    figure = importance_figures.kl_slice(SEARCHED, "learning_rate", SPEC)
    completed, _, pruned, _ = figure.data
    assert (list(completed.x), list(completed.y)) == ([1e-4, 1e-3], [4, 9])
    assert (list(pruned.x), pruned.marker.symbol) == ([1e-2], "x")
    assert figure.layout.xaxis.type == "log"
    assert figure.layout.shapes[0].y0 == SPEC.kl_budget
    assert (completed.customdata[1], list(completed.marker.color)) == ([1, "0.001"], [1.0, 1.2])
    linear = importance_figures.kl_slice(SEARCHED, "cliprange", SPEC)
    assert linear.layout.xaxis.type == "linear"


def test_rewards_over_each_hyperparameter_are_panels_of_one_height() -> None:
    names = ["learning_rate", "cliprange", "kl_target", "lam", "vf_coef"]
    frame = SEARCHED.assign(params_lam=[0.9, 0.95, 0.97, 0.99], params_vf_coef=["a", "b", "b", "a"])
    figure = importance_figures.slices(frame, names, SPEC)
    rate, second, last = (figure.layout[axis] for axis in ("xaxis", "xaxis2", "xaxis5"))
    assert (rate.type, second.type, last.type) == ("log", "linear", "category")
    assert len({axis.matches for axis in figure.select_yaxes()} - {None}) == 1
    drawn = [trace for trace in figure.data if trace.customdata is not None and trace.xaxis == "x2"]
    assert [(list(trace.x), list(trace.y)) for trace in drawn] == [([0.1, 0.2], [1.0, 1.2]), ([0.3], [0.8])]
    assert [trace.name for trace in figure.data if trace.name] == ["completed", "pruned"]
    marked = importance_figures.mark(figure, [1])
    assert {trace.selectedpoints for trace in marked.data if trace.customdata is not None} == {(1,), ()}


def test_parallel_coordinates_show_real_values_and_what_was_not_set() -> None:
    [lines] = importance_figures.parallel(SEARCHED, ["learning_rate", "kl_target"], SPEC).data
    rate, target, kl, reward = lines.dimensions
    assert list(rate["values"]) == pytest.approx([-4, -3, -2])
    assert (rate["ticktext"][0], rate["ticktext"][-1]) == ("0.0001", "0.01")
    assert target["ticktext"][0] == "not set"
    assert list(target["values"])[1:] == [target["tickvals"][0]] * 2
    assert (list(kl["values"]), list(reward["values"])) == ([4, 9, 25], [1.0, 1.2, 0.8])
    assert (reward["ticktext"][0], kl["ticktext"][0]) == ("0.8", "4")


def test_of_many_trials_the_best_and_the_marked_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance_figures, "MOST_LINES", 1)
    [lines] = importance_figures.parallel(SEARCHED, ["learning_rate"], SPEC).data
    assert list(lines.dimensions[-1]["values"]) == [1.2]
    [lines] = importance_figures.parallel(SEARCHED, ["learning_rate"], SPEC, marked=[2]).data
    assert list(lines.dimensions[-1]["values"]) == [1.2, 0.8]


def test_a_hyperparameter_that_no_measured_trial_has_set_is_no_axis() -> None:
    frame = searched({"value": 1.0, "end_kl": 4.0, "params_learning_rate": 1e-4, "params_kl_target": NAN})
    [lines] = importance_figures.parallel(frame, ["learning_rate", "kl_target"], SPEC).data
    assert [axis["label"] for axis in lines.dimensions][1:] == ["Eval KL at the end", "Best in budget"]


def test_two_hyperparameters_colour_the_trials_by_what_they_came_to() -> None:
    figure = importance_figures.pair(SEARCHED, "learning_rate", "cliprange", "value", SPEC)
    drawn = [trace for trace in figure.data if trace.customdata is not None]
    measured = SEARCHED.dropna(subset=["params_learning_rate", "params_cliprange", "value"])
    assert sorted(value for trace in drawn for value in trace.marker.color) == sorted(measured["value"])
    assert drawn[0].customdata[1] == [1, 1.2, "0.001", "0.2"]
    assert figure.layout.coloraxis.cmax == measured["value"].max()
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "linear")


# Compared curves


def test_compared_curves_share_the_episodes_and_keep_each_trials_look() -> None:
    frame = pd.DataFrame(
        {
            "trial": [0, 0, 7, 7],
            "step": [0, 1, 0, 1],
            "episode": [0, 64, 0, 128],
            "objective/kl_exact": [0.0, 1.0, 0.0, 2.0],
        }
    )
    figure = figures.aligned(frame, "objective/kl_exact", [7, 0, 9], SPEC)
    seventh, first = figure.data
    assert (list(seventh.x), list(seventh.y), list(first.x)) == ([0, 128], [0, 2], [0, 64])
    assert (seventh.line.color, seventh.line.dash) == ("#A04060", "solid")
    assert figure.layout.shapes[0].y0 == 10 and figure.layout.yaxis.title.text == METRICS["objective/kl_exact"].title


# Points


def points_of(figure: go.Figure, status: Status) -> go.Scatter:
    [points] = [trace for trace in figure.data if trace.legendgroup == status.value and trace.customdata is not None]
    return points


def test_a_points_trial_reaches_the_browser_as_a_plain_number() -> None:
    """A typed array would come back from a selection as an object."""
    figure = ways()
    figures.add_trials(figure, TRIALS.assign(x=1.0, y=2.0), "x", "y", "")
    traces = json.loads(figure.to_json())["data"]
    marked = [trace["customdata"] for trace in traces if trace.get("mode") == "markers" and "customdata" in trace]
    assert [0] in [row[:1] for rows in marked for row in rows]

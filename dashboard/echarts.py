"""ECharts options for axes, lines, limits and symbols: the building blocks of `dashboard.charts`.

Streamlit updates a chart in place, so it keeps its zoom while a study runs. Options are JSON without code: an area is
stacked on an invisible line, and limits belong to a series without points. Text from outside never enters one, because
ECharts' tooltips are HTML.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dashboard import style
from ppo_core.output import decimals
from tuner.study.status import Status

Option = dict[str, Any]
DataSeries = tuple[pd.DataFrame, Option]
"""Data of a series, and its options."""
Span = tuple[float, float]
"""The ends of an axis."""
Place = tuple[float, float]
"""A position: across and up."""
FILL = "rgba(128, 128, 128, 0.10)"
TAG = "#6b6b6b"
"""Background of labels that belong to no trial; white text on it has a contrast of 5.3 : 1."""
FAINT = "rgba(128, 128, 128, 0.45)"
"""Greys visible on light and dark pages: for areas, and for background lines."""

NEAR_EDGE = 0.98
"""From this share of the horizontal axis's end on, labels at lines' ends are moved apart."""

_STAR = "path://M10,1 L12.7,7 L19,7.6 L14.2,11.9 L15.6,18.2 L10,14.9 L4.4,18.2 L5.8,11.9 L1,7.6 L7.3,7 Z"
_LENS = "path://M6,1 a5,5 0 1,0 0.01,0 M9.6,9.6 L14,14"
NO_TOOLTIP: Option = {"tooltip": {"show": False}}
_UNTOUCHED: Option = {"silent": True} | NO_TOOLTIP
BEHIND: Option = _UNTOUCHED | {"z": 2}
UNSEEN: Option = {"lineStyle": {"opacity": 0}, "symbol": "none", "silent": True, "z": 1}
"""Marks a line that the tooltip leaves out; one that is also behind the others; one that only the tooltip shows."""


def one_panel(
    across: Option,
    vertical: Option,
    data_series: Sequence[DataSeries],
    others: Sequence[Option],
    right: int = 40,
    *,
    numbers: str,
) -> Option:
    """Return a chart of one panel, over the axis `across`, with `vertical` as what is special about the other one.

    The `others` are series that hold their own data, `right` is the room for names at lines' ends, in pixels, and
    `numbers` the format of the tooltip's.
    """
    of_series = {"tooltip": {"valueFormatter": numbers}}  # the panels of `stacked` have one each
    return still(data_series) | {
        "grid": {"left": 8, "right": right, "top": 34, "bottom": 30, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, "order": "valueDesc"},
        "xAxis": across | {"nameGap": 28},
        "yAxis": {"type": "value", "nameLocation": "end", "nameTextStyle": {"align": "left"}, "scale": True} | vertical,
        "series": [of_series | series | {"datasetIndex": place} for place, (_, series) in enumerate(data_series)]
        + list(others),
    }


def zoomable(option: Option) -> Option:
    """Add a button after which a drag selects a part of the horizontal axis, which Streamlit reports to the page.

    ECharts' own zoom would be lost at the next refresh.
    """
    title = "Zoom: press, then drag over a part of the run"
    brush = {"type": ["lineX"], "icon": {"lineX": _LENS}, "title": {"lineX": title}}
    return option | {
        "brush": {"xAxisIndex": "all", "transformable": False, "outOfBrush": {"colorAlpha": 1}},
        "toolbox": {"right": 4, "top": 0, "itemSize": 13, "feature": {"brush": brush}},
    }


def stacked(options: Sequence[Option], titles: Sequence[str], height: int) -> Option:
    """Stack charts of one panel into one, `height` pixels per panel, with a common cursor.

    Streamlit cannot link the cursors of separate charts.
    """
    merged: Option = options[0] | {
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
        "dataset": [], "series": [], "grid": [], "xAxis": [], "yAxis": [],
    }  # fmt: skip
    for place, (option, title) in enumerate(zip(options, titles, strict=True)):
        first, top = len(merged["dataset"]), place * height + 34
        for series in option["series"]:
            moved = series | {"xAxisIndex": place, "yAxisIndex": place}
            if "datasetIndex" in moved:
                moved["datasetIndex"] += first
            merged["series"].append(moved)
        merged["dataset"] += option["dataset"]
        merged["grid"].append(option["grid"] | {"top": top, "bottom": None, "height": height - 80})
        merged["xAxis"].append(option["xAxis"] | {"gridIndex": place})
        merged["yAxis"].append(option["yAxis"] | {"gridIndex": place, "name": title})
    return merged


def axis(title: str, span: Span, *, pointer: str = "{value}", is_whole: bool = True) -> Option:
    """Return a horizontal axis; `pointer` is its line in the tooltip, `is_whole`: its ticks are whole numbers."""
    precision = 0 if is_whole else decimals([span[1] - span[0]])
    return {
        "type": "value", "name": title, "nameLocation": "middle", "min": span[0], "max": span[1],
        "splitLine": {"show": False}, "axisLabel": {"hideOverlap": True},
        "axisPointer": {"label": {"formatter": pointer, "precision": precision}},
        "minInterval": int(is_whole),
    }  # fmt: skip


def still(data_series: Sequence[DataSeries]) -> Option:
    """Return the base of every live chart: its data as 4-byte floats, to keep refreshes small, and no animation.

    Streamlit's tool bar saves picture and data.
    """
    return {"animation": False, "dataset": [{"source": source.astype("float32")} for source, _ in data_series]}


def line(
    points: pd.DataFrame,
    name: str,
    colour: str,
    *,
    width: float = 2,
    opacity: float = 1,
    dash: style.Dash = style.SOLID,
    with_points: bool = False,
    more: Option | None = None,
) -> DataSeries:
    """Return a line through `x`, `y`, whose name is in the tooltip; `more` is what is special about it."""
    return points[["x", "y"]].rename(columns={"y": name}), {
        "type": "line",
        "name": name,
        "encode": {"x": "x", "y": name, "tooltip": [name]},
        "lineStyle": {"color": colour, "width": width, "type": dash.echarts, "opacity": opacity},
        "itemStyle": {"color": colour},
        "symbol": "circle",
        "symbolSize": 5,
        "showSymbol": with_points,
        "z": 3,
        "emphasis": {"focus": "series"},
    } | (more or {})


def named_at_end(data_series: DataSeries, text: str, right: float) -> DataSeries:
    """Return a line with a text at its end; `right` is where the chart ends."""
    source, series = data_series
    label = {"show": True, "formatter": text, "distance": 6, **_tag(series["lineStyle"]["color"])}
    at_edge = source["x"].iloc[-1] >= NEAR_EDGE * right  # labels collect there, and are moved apart
    return source, series | {"endLabel": label} | ({"labelLayout": {"moveOverlap": "shiftY"}} if at_edge else {})


def area(name: str, edges: pd.DataFrame, colour: str, opacities: tuple[float, ...]) -> list[DataSeries]:
    """Return stacked areas behind the lines: the lowest edge invisible, those above filled.

    `edges` has `x` and the heights of every edge from the lowest up, named after the area below it; `name` is the
    stack's.
    """
    # Stacked by value: ECharts would start again from 0 where an edge is negative.
    common = _UNTOUCHED | {
        "type": "line", "stack": name, "stackStrategy": "all", "lineStyle": {"opacity": 0},
        "showSymbol": False, "z": 1, "encode": {"x": "x", "y": "y"},
    }  # fmt: skip
    x, (lowest, *names) = edges["x"], edges.columns.drop("x")
    heights = edges[names].to_numpy() - edges[[lowest, *names[:-1]]].to_numpy()
    data_series: list[DataSeries] = [(pd.DataFrame({"x": x, "y": edges[lowest]}), common | {"name": lowest})]
    for filled, thickness, opacity in zip(names, heights.T, opacities, strict=True):
        look = {"name": filled, "areaStyle": {"color": colour, "opacity": opacity}}
        data_series.append((pd.DataFrame({"x": x, "y": thickness}), common | look))
    return data_series


def limit(
    value: float,
    text: str = "",
    *,
    is_upright: bool = False,
    at_end: bool = False,
    is_below: bool = False,
    colour: str = style.NEUTRAL,
    width: float = 1.5,
) -> Option:
    """Return a dashed line across a panel at a height, or `is_upright` at a position.

    Its label is at the left end, or `at_end` at the right; above the line, or `is_below` it.
    """
    side = "end" if is_upright else f"inside{'End' if at_end else 'Start'}{'Bottom' if is_below else 'Top'}"
    return {
        "xAxis" if is_upright else "yAxis": value,
        "name": text,
        "lineStyle": {"color": colour, "type": "dashed", "width": width},
        "label": {"show": bool(text), "formatter": text, "position": side, "distance": 3, **_tag(TAG)},
    }


def marks(limits: Sequence[Option], shaded: Span | None) -> Option:
    """Return limits, and a shaded range of heights, as attributes of a series."""
    exact = -1  # ECharts would draw a line at its value rounded to two places
    marked: Option = {"markLine": {"silent": True, "symbol": "none", "precision": exact, "data": list(limits)}}
    if shaded is not None:
        low, high = shaded
        marked["markArea"] = {"silent": True, "itemStyle": {"color": FILL}, "data": [[{"yAxis": low}, {"yAxis": high}]]}
    return marked


def limits_alone(limits: Sequence[Option], shaded: Span | None = None) -> Option:
    """Return an empty series that carries a panel's limits."""
    return _UNTOUCHED | {"type": "line", "name": "Limits", "data": []} | marks(limits, shaded)


def early_ends(status: Status, ends: Sequence[Option], *, is_bright: bool) -> Option:
    """Return one series for the trials of one status that ended early (see `early_end`)."""
    return _UNTOUCHED | {
        "type": "scatter",
        "name": status.value,
        "symbol": style.mark(status).echarts,
        "symbolSize": 12 if is_bright else 9,
        "z": 5 if is_bright else 2,
        "data": list(ends),
    }


def early_end(
    number: int, place: Place, colour: str, words: tuple[str, str], *, is_bright: bool, on_left: bool, lower: int = 0
) -> Option:
    """Return the mark where a trial ended early; `words` are its name and its rule, for a label `lower` by pixels."""
    called, rule = words
    text = f"{{number|{called}}}" + (f"{{more|{rule.strip()}}}" if rule else "")
    return {
        "name": f"Trial {number}",
        "value": list(place),
        "itemStyle": {"color": colour, "borderColor": "#ffffff", "borderWidth": int(is_bright)},
        "label": {
            "show": is_bright,
            "position": "left" if on_left else "right",
            "offset": [0, lower],
            "opacity": 1,
            "formatter": text,
            "rich": {"number": _tag(colour), "more": _tag(TAG)},
        },
    }


def point(name: str, place: Place, value: float, colour: str) -> DataSeries:
    """Return a single point as a series; `name` and `value` are in its tooltip."""
    return pd.DataFrame({"x": [place[0]], "y": [place[1]], "value": [value]}), {
        "type": "scatter",
        "name": name,
        "symbol": "circle",
        "symbolSize": 10,
        "itemStyle": {"color": colour},
        "z": 5,
        "encode": {"x": "x", "y": "y", "tooltip": ["value"]},
    }


def evaluations(number: int, kind: str, places: Sequence[Place], colour: str) -> Option:
    """Return a trial's evaluations of one kind: `within` the KL budget, `over` it, or the one that is `counted`."""
    looks: dict[str, Option] = {
        "over": {"color": "transparent", "borderColor": colour, "borderWidth": 1, "opacity": 0.6},
        "within": {"color": colour},
        "counted": {"color": colour, "borderColor": "#ffffff", "borderWidth": 1},
    }
    symbol = {"symbol": _STAR, "symbolSize": 15, "z": 6} if kind == "counted" else {"symbolSize": 6, "z": 4}
    name, points = f"Trial {number}, {kind}", [list(place) for place in places]
    series = {"type": "scatter", "name": name, "symbol": "circle", "data": points, "itemStyle": looks[kind]}
    return _UNTOUCHED | series | symbol


def _tag(colour: str) -> Option:
    """Return the style of a label with a coloured background, readable on light and dark pages and over lines."""
    ink = "#ffffff" if colour == TAG else style.ink(colour)
    weight = "normal" if colour == TAG else "bold"
    return {
        "color": ink, "backgroundColor": colour, "padding": [2, 4], "borderRadius": 3, "fontSize": 11,
        "fontWeight": weight,
    }  # fmt: skip

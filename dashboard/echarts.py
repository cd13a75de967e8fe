"""The pieces of a live chart, as ECharts options: lines, a band, limits, marks of early ends.

An option is JSON without code, so a band is two stacked lines, and limits hang on a series without points.
No text from outside gets into one: ECharts' tooltips are HTML.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd

from dashboard import appearance, curves
from tuner.guard import RULES
from tuner.status import Status

Option = dict[str, Any]
Line = tuple[pd.DataFrame, Option]
"""A data set, with the series that draws it."""

# Grey that shows on light and on dark pages: an area, and a line behind others.
FILL = "rgba(128, 128, 128, 0.10)"
FAINT = "rgba(128, 128, 128, 0.45)"

_UNTOUCHED: Option = {"silent": True, "tooltip": {"show": False}}


def chart(
    lines: Sequence[Line], others: Sequence[Option], *, x_axis: Option, y_axis: Option, right: int = 40
) -> Option:
    """Return the whole option: `lines` with their data sets, then the other series; `right` pixels are for names."""
    return {
        "animation": False,
        "dataset": [{"source": source} for source, _ in lines],
        "grid": {"left": 8, "right": right, "top": 34, "bottom": 30, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, "order": "valueDesc", "valueFormatter": "%.3f"},
        "xAxis": {"type": "value", "nameLocation": "middle", "nameGap": 28, "splitLine": {"show": False}} | x_axis,
        "yAxis": {"type": "value", "nameLocation": "end", "nameTextStyle": {"align": "left"}} | y_axis,
        "series": [series | {"datasetIndex": place} for place, (_, series) in enumerate(lines)] + list(others),
    }


def bright_line(number: int, points: pd.DataFrame, *, with_points: bool, end_label: Option, by: str = "") -> Line:
    """Return a trial's line in its colour and dash; `by` is what it is called besides its number."""
    colour = appearance.colour(number)
    source, series = _line(number, points, by)
    return source, series | end_label | {
        "lineStyle": {"color": colour, "width": 2, "type": appearance.dash(number).echarts},
        "itemStyle": {"color": colour},
        "showSymbol": with_points or len(points) == 1,
        "z": 3,
        "emphasis": {"focus": "series"},
    }


def faint_line(number: int, points: pd.DataFrame) -> Line:
    """Return a trial's line in grey, behind the others."""
    source, series = _line(number, points)
    style = {"lineStyle": {"color": FAINT, "width": 1.2}, "itemStyle": {"color": FAINT}}
    return source, series | style | _UNTOUCHED | {"showSymbol": len(points) == 1, "z": 2}


def _line(number: int, points: pd.DataFrame, by: str = "") -> Line:
    name = f"Trial {number}{by and f': {by}'}"  # the tooltip shows the column's name
    source = curves.thinned(points)[["x", "y"]].rename(columns={"y": name})
    encode = {"x": "x", "y": name, "tooltip": [name]}
    return source, {"type": "line", "name": name, "encode": encode, "symbol": "circle", "symbolSize": 5}


def band(edges: pd.DataFrame) -> list[Line]:
    """Return the area between `low` and `high`: the lower edge unseen, and what lies over it filled."""
    source = edges.assign(spread=edges["high"] - edges["low"])[["x", "low", "spread"]]
    common: Option = {"type": "line", **_stacked("band"), "lineStyle": {"opacity": 0}, "showSymbol": False, "z": 1}
    lower = {"name": "Other trials, lower edge", "encode": {"x": "x", "y": "low"}}
    filled = {
        "name": "Other trials",
        "encode": {"x": "x", "y": "spread"},
        "areaStyle": {"color": FAINT, "opacity": 0.5},
    }
    return [(source, common | _UNTOUCHED | lower), (source, common | _UNTOUCHED | filled)]


def spread(number: int, edges: pd.DataFrame) -> list[Line]:
    """Return the areas of a trial's distribution in its colour: faint from `min` to `max`, fuller between quartiles."""
    stack: Option = {"type": "line", **_stacked(f"spread {number}"), "lineStyle": {"opacity": 0}, "showSymbol": False}
    base = pd.DataFrame({"x": edges["x"], "y": edges["min"]})
    lines: list[Line] = [(base, stack | _UNTOUCHED | {"z": 1, "name": "spread", "encode": {"x": "x", "y": "y"}})]
    for low, high, opacity in (("min", "q25", 0.08), ("q25", "q75", 0.2), ("q75", "max", 0.08)):
        source = pd.DataFrame({"x": edges["x"], "y": edges[high] - edges[low]})
        area = {"areaStyle": {"color": appearance.colour(number), "opacity": opacity}}
        series = stack | _UNTOUCHED | area | {"z": 1, "name": f"{low} to {high}", "encode": {"x": "x", "y": "y"}}
        lines.append((source, series))
    return lines


def _stacked(name: str) -> Option:
    """Stack by value: ECharts would begin anew at 0 where a lower edge is negative."""
    return {"stack": name, "stackStrategy": "all"}


def compact(option: Option) -> Option:
    """Return the option with its data in 4 bytes a number: a refresh sends less, and nobody sees more than 7 digits."""
    data = [{"source": data["source"].astype("float32")} for data in option["dataset"]]
    return option | {"dataset": data}


def downloadable(option: Option, name: str) -> Option:
    """Return the option with a button that saves the chart as a picture `name`.png."""
    save = {"show": True, "name": name, "title": "Save as PNG", "pixelRatio": 2}
    return option | {"toolbox": {"right": 4, "top": 0, "itemSize": 13, "feature": {"saveAsImage": save}}}


def end_label(number: int, *, at_edge: bool, by: str = "") -> Option:
    """Return the trial's number at its line's end. At the right edge numbers pile up, and make room for each other."""
    text = {"show": True, "formatter": f"{number}{by and f': {by}'}", "fontWeight": "bold", "distance": 6}
    shift = {"labelLayout": {"moveOverlap": "shiftY"}} if at_edge else {}
    return {"endLabel": text | {"color": appearance.colour(number)}} | shift


def limits(
    lines: Mapping[str, float],
    *,
    side: Literal["Start", "End"] = "Start",
    opposite: Mapping[str, float] | None = None,
    shaded: tuple[float, float] | None = None,
) -> Option:
    """Return horizontal lines, named at one end, the `opposite` ones at the other; what is `shaded` lies in grey."""
    other: Option = {"position": f"inside{'End' if side == 'Start' else 'Start'}Top"}
    marks: list[tuple[str, float, Option]] = [(name, value, {}) for name, value in lines.items()]
    marks += [(name, value, other) for name, value in (opposite or {}).items()]
    series = _UNTOUCHED | {
        "type": "line",
        "name": "Limits",
        "data": [],
        "markLine": {
            "silent": True,
            "symbol": "none",
            "lineStyle": {"color": appearance.NEUTRAL, "type": "dashed", "width": 1.5},
            "label": {"position": f"inside{side}Top", "color": appearance.NEUTRAL, "fontSize": 12},
            "data": [
                {"yAxis": value, "name": name, "label": {"formatter": name} | place} for name, value, place in marks
            ],
        },
    }
    if shaded is not None:
        area = [{"yAxis": shaded[0]}, {"yAxis": shaded[1]}]
        series["markArea"] = {"silent": True, "itemStyle": {"color": FILL}, "data": [area]}
    return series


def early_ends(
    ends: pd.DataFrame, *, bright: bool, right_part: float, top: float | None, names: Mapping[int, str]
) -> list[Option]:
    """Return one series a status, with its symbol where each such trial ended and the trial's number beside it.

    From `right_part` on, the text stands left of the symbol, where there is room for it. With `top`, the text
    names the rule, and a symbol over the axis stands on its `top` with its height told. `names` are what trials are
    called besides.
    """
    return [
        _UNTOUCHED
        | {
            "type": "scatter",
            "name": status,
            "symbol": appearance.mark(Status(status)).echarts,
            "symbolSize": 12 if bright else 9,
            "z": 5 if bright else 2,
            "data": [_end(row, bright, right_part, top, names.get(row.trial, "")) for row in group.itertuples()],
        }
        for status, group in ends.groupby("status", sort=False)
    ]


def _end(row: Any, bright: bool, right_part: float, top: float | None, by: str) -> Option:
    colour = appearance.colour(row.trial) if bright else FAINT
    # A rule's declared name; any other text in its place is left out.
    rule = f" {RULES[row.rule].label}" if top is not None and row.rule in RULES else ""
    height = float(row.y)
    if top is not None and height > top:
        height, rule = top, f"{rule}: {height:.3g}"
    label: Option = {
        "show": bright,
        "formatter": f"{{number|{row.trial}{by and f': {by}'}}}{rule}",
        "position": "left" if row.x > right_part else "right",
        "color": appearance.NEUTRAL,
        "rich": {"number": {"color": colour, "fontWeight": "bold"}},
    }
    return {
        "name": f"Trial {row.trial}",
        "value": [float(row.x), height],
        "itemStyle": {"color": colour, "borderColor": "#ffffff", "borderWidth": int(bright)},
        "label": label,
    }

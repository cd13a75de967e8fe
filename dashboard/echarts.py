"""Live charts as ECharts options. Streamlit updates one in place, so that it stays where it is while a study runs.

An option is JSON without code, so an area lies on an unseen line that it is stacked on, and limits hang on a series
without points. No text from outside gets into one: ECharts' tooltips are HTML.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dashboard import style
from dashboard.chart_parts import AXIS_TITLES, FILL, GAP, PANEL, Area, Chart, EarlyEnd, Limit, Line, Panel, Point

Option = dict[str, Any]
TOP = 30
"""What lies over the first of several panels, in pixels."""

_UNTOUCHED: Option = {"silent": True, "tooltip": {"show": False}}


def option(chart: Chart) -> Option:
    """Return a chart of one panel."""
    [panel] = chart.panels
    drawn = [series for area in enumerate(panel.areas) for series in _area(*area)]
    drawn += [_trial_line(line, chart.span[1]) for line in panel.lines]
    drawn += [_point(point) for point in panel.points if point.is_bright]
    limits = _UNTOUCHED | {"type": "line", "name": "Limits", "data": []} | _marks(panel)
    vertical: Option = {"name": panel.title, "scale": True}
    if panel.span is not None:
        low, high = panel.span
        vertical |= {"min": low, "max": high} | ({"type": "log"} if panel.is_log else {})
    pointer = f"{chart.axis if chart.axis == 'KL' else chart.axis.capitalize()} {{value}}"
    return _downloadable(chart, drawn) | {
        "grid": {"left": 8, "right": chart.right, "top": 34, "bottom": 30, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, "order": "valueDesc", "valueFormatter": "%.3f"},
        "xAxis": {
            "type": "value", "nameLocation": "middle", "nameGap": 28, "splitLine": {"show": False},
            "name": AXIS_TITLES[chart.axis], "min": chart.span[0], "max": chart.span[1],
            "axisLabel": {"hideOverlap": True},
            "axisPointer": {"label": {"formatter": pointer, "precision": 0}},
            **({} if chart.axis in ("KL", "seconds") else {"minInterval": 1}),
        },
        "yAxis": {"type": "value", "nameLocation": "end", "nameTextStyle": {"align": "left"}} | vertical,
        "series": [series | {"datasetIndex": place} for place, (_, series) in enumerate(drawn)]
        + [limits, *_early_ends(panel), *_grey_points(panel)],
    }  # fmt: skip


def incident_option(chart: Chart) -> Option:
    """Return a chart of small panels over each other, with a line each."""
    last = len(chart.panels) - 1
    drawn = []
    for place, panel in enumerate(chart.panels):
        [line] = panel.lines
        source, series = _line(line)
        own = {"datasetIndex": place, "xAxisIndex": place, "yAxisIndex": place, "symbolSize": 4, "showSymbol": False}
        drawn.append((source, series | own | _marks(panel)))
    return _downloadable(chart, drawn) | {
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
        "tooltip": {"trigger": "axis", "confine": True, "valueFormatter": "%.4g"},
        "grid": [
            {"left": 70, "right": chart.right, "top": TOP + place * (PANEL + GAP), "height": PANEL}
            for place in range(last + 1)
        ],
        "xAxis": [
            {
                "type": "value", "gridIndex": place, "min": chart.span[0], "max": chart.span[1],
                "splitLine": {"show": False}, "minInterval": 1, "axisLabel": {"show": place == last},
                **({"name": AXIS_TITLES[chart.axis], "nameLocation": "middle", "nameGap": 26} if place == last else {}),
            }
            for place in range(last + 1)
        ],
        "yAxis": [
            {
                "type": "value", "gridIndex": place, "scale": True, "name": panel.title, "splitNumber": 2,
                "nameTextStyle": {"align": "left", "padding": [0, 0, 0, -50]},
            }
            for place, panel in enumerate(chart.panels)
        ],
        "series": [series for _, series in drawn],
    }  # fmt: skip


def height(chart: Chart) -> int:
    """Return the height that `incident_option` needs, in pixels."""
    return TOP + len(chart.panels) * (PANEL + GAP) + GAP


Drawn = tuple[pd.DataFrame, Option]
"""A data set, with the series that draws it."""


def _downloadable(chart: Chart, drawn: Sequence[Drawn]) -> Option:
    """Return what every live chart has: its data, and a button that saves a picture.

    Data are in 4 bytes a number: a refresh sends less, and nobody sees more than 7 digits.
    """
    save = {"show": True, "name": chart.name, "title": "Save as PNG", "pixelRatio": 2}
    return {
        "animation": False,
        "dataset": [{"source": source.astype("float32")} for source, _ in drawn],
        "toolbox": {"right": 4, "top": 0, "itemSize": 13, "feature": {"saveAsImage": save}},
    }


def _line(line: Line) -> Drawn:
    # The tooltip shows the column's name.
    encode = {"x": "x", "y": line.name, "tooltip": [line.name]}
    look = {"color": line.colour, "width": line.width, "type": line.dash.echarts, "opacity": line.opacity}
    series = {
        "type": "line",
        "name": line.name,
        "encode": encode,
        "lineStyle": look,
        "itemStyle": {"color": line.colour},
    }
    if line.is_stepped:
        series["step"] = "end"
    return line.points[["x", "y"]].rename(columns={"y": line.name}), series


def _trial_line(line: Line, right: float) -> Drawn:
    """Return a line with its text at its end; `right` is where the chart ends."""
    source, series = _line(line)
    series |= {"symbol": "circle", "symbolSize": 5, "showSymbol": line.with_points}
    if not line.is_bright:
        return source, series | _UNTOUCHED | {"z": 2}
    if line.label:
        text = {"show": True, "formatter": line.label, "fontWeight": "bold", "distance": 6, "color": line.colour}
        series["endLabel"] = text
        if line.points["x"].iloc[-1] >= right:  # where numbers pile up, and make room for each other
            series["labelLayout"] = {"moveOverlap": "shiftY"}
    return source, series | {"z": 3, "emphasis": {"focus": "series"}}


def _area(place: int, area: Area) -> list[Drawn]:
    """Return the lowest edge unseen, and what lies over it filled."""
    # Stacked by value: ECharts would start again from 0 where an edge is negative.
    common = _UNTOUCHED | {
        "type": "line", "stack": f"area {place}", "stackStrategy": "all", "lineStyle": {"opacity": 0},
        "showSymbol": False, "z": 1, "encode": {"x": "x", "y": "y"},
    }  # fmt: skip
    x, (lowest, *names) = area.edges["x"], area.edges.columns.drop("x")
    heights = area.edges[names].to_numpy() - area.edges[[lowest, *names[:-1]]].to_numpy()
    drawn: list[Drawn] = [(pd.DataFrame({"x": x, "y": area.edges[lowest]}), common | {"name": lowest})]
    for name, own, opacity in zip(names, heights.T, area.opacities, strict=True):
        filled = {"name": name, "areaStyle": {"color": area.colour, "opacity": opacity}}
        drawn.append((pd.DataFrame({"x": x, "y": own}), common | filled))
    return drawn


def _marks(panel: Panel) -> Option:
    """Return a panel's limits, and what is shaded."""
    marks: Option = {"markLine": {"silent": True, "symbol": "none", "data": [_limit(limit) for limit in panel.limits]}}
    if panel.shaded is not None:
        low, high = panel.shaded
        data = [[{"yAxis": low}, {"yAxis": high}]]
        marks["markArea"] = {"silent": True, "itemStyle": {"color": FILL}, "data": data}
    return marks


def _limit(limit: Limit) -> Option:
    side, height = "End" if limit.at_end else "Start", "Bottom" if limit.is_below else "Top"
    position = "end" if limit.is_upright else f"inside{side}{height}"
    text = {"show": bool(limit.text), "formatter": limit.text, "position": position, "color": limit.colour}
    look = {"color": limit.colour, "type": "dashed", "width": limit.width}
    place = {"xAxis" if limit.is_upright else "yAxis": limit.value}
    return place | {"name": limit.text, "lineStyle": look, "label": text | {"fontSize": 12}}


def _early_ends(panel: Panel) -> list[Option]:
    """Return one series a status, with its symbol where each such trial ended and the trial's number beside it."""
    return [
        _UNTOUCHED
        | {
            "type": "scatter",
            "name": status.value,
            "symbol": style.mark(status).echarts,
            "symbolSize": ends[0].size,
            "z": 5 if is_bright else 2,
            "data": [_early_end(end) for end in ends],
        }
        for (is_bright, status), ends in panel.ends_by_status().items()
    ]


def _early_end(end: EarlyEnd) -> Option:
    return {
        "name": f"Trial {end.trial}",
        "value": [end.x, end.y],
        "itemStyle": {"color": end.colour, "borderColor": "#ffffff", "borderWidth": int(end.is_bright)},
        "label": {
            "show": end.is_bright,
            "position": "left" if end.on_left else "right",
            **_words(end.name, end.rule, end.colour),
        },
    }


def _point(point: Point) -> Drawn:
    """Return a point as a series of its own: what its tooltip says is the series' name."""
    source = pd.DataFrame({"x": [point.x], "y": [point.y], "value": [point.value]})
    side = "left" if point.on_left else "right"
    text = {"show": bool(point.name), "position": side, **_words(point.name, point.text, point.colour)}
    return source, {
        "type": "scatter",
        "name": point.tooltip,
        **_symbol(point),
        "z": 5,
        "encode": {"x": "x", "y": "y", "tooltip": ["value"]},
        "label": text,
        "labelLayout": {"hideOverlap": True},  # those of trials at one rung; the tooltip has all
    }


def _grey_points(panel: Panel) -> list[Option]:
    """Return the points behind the others as one series a symbol."""
    found: dict[str, list[Point]] = {}
    for point in panel.points:
        if not point.is_bright:
            found.setdefault(point.mark.echarts, []).append(point)
    return [
        _UNTOUCHED
        | {
            "type": "scatter",
            "name": "Others",
            **_symbol(points[0]),
            "z": 2,
            "data": [[point.x, point.y] for point in points],
        }
        for points in found.values()
    ]


def _symbol(point: Point) -> Option:
    """Return how a point looks; ECharts would fill an empty symbol with white, which shines on a dark page."""
    symbol = point.mark.echarts
    look: Option = {"color": point.colour}
    if symbol.startswith("empty"):
        symbol = symbol.removeprefix("empty").lower()
        look = {"color": "transparent", "borderColor": point.colour, "borderWidth": 2 if point.is_bright else 1}
    return {"symbol": symbol, "symbolSize": point.size, "itemStyle": look}


def _words(number: str, more: str, colour: str) -> Option:
    """Return the text beside a symbol: a trial's number in its colour, then more in grey."""
    rich = {"number": {"color": colour, "fontWeight": "bold"}}
    return {"formatter": f"{{number|{number}}}{more}", "color": style.NEUTRAL, "rich": rich}

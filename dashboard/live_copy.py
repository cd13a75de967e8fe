"""A live chart's copy to keep: its ECharts option as a Plotly figure, which makes a page that needs nothing else.

It knows what `dashboard.charts`, `dashboard.charts` and `dashboard.charts` make, and no other options.
Plotly takes some tags in texts for HTML, so every text is escaped.
"""

import html
import math
import re
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard import figures, style
from dashboard.charts import Option
from tuner.status import Status

MARGIN = {"l": 70, "t": 90, "b": 60}
"""In pixels; on the right, what the live chart leaves for names at its lines' ends."""
HEIGHT = 450
"""Of a single chart's plot, in pixels; several keep their own."""

_RICH = re.compile(r"\{\w+\|([^{}]*)\}")
"""A part of an ECharts label that has a style of its own: {style|text}."""


def figure(option: Option, title: str) -> go.Figure:
    """Return the chart with all its points, unrounded, on white and under `title`."""
    drawn = go.Figure()
    _lay_out(drawn, option, title)
    heaps: dict[str, np.ndarray[Any, Any]] = {}
    for series in option["series"]:
        place = series.get("xAxisIndex", 0)
        if series["type"] == "scatter":
            drawn.add_trace(_ends(series))
        elif "encode" in series:
            drawn.add_trace(_line(series, option["dataset"][series["datasetIndex"]]["source"], heaps, place))
        _limits(drawn, series, place)
        _areas(drawn, series, place)
    for status in dict.fromkeys(series["name"] for series in option["series"] if series["type"] == "scatter"):
        drawn.add_trace(figures.legend_entry(Status(status)))
    return drawn


def _line(series: Option, source: pd.DataFrame, heaps: dict[str, np.ndarray[Any, Any]], place: int) -> go.Scatter:
    """Return a line; a stacked one lies on what `heaps` holds of its stack, which grows by it."""
    encode, style = series["encode"], series["lineStyle"]
    x, y = source[encode["x"]].to_numpy(), source[encode["y"]].to_numpy()
    is_quiet = not series.get("tooltip", {}).get("show", True)
    trace = go.Scatter(
        x=x,
        y=y,
        xaxis=_axis("x", place),
        yaxis=_axis("y", place),
        mode="lines+markers" if series["showSymbol"] else "lines",
        name=_text(series["name"]),
        line={"color": style.get("color"), "dash": _dash(style.get("type", "solid")), "width": style.get("width", 2)},
        marker={"size": series.get("symbolSize", 5)},
        hoverinfo="skip" if is_quiet else "x+y+name",
        showlegend=not is_quiet,
    )
    if "stack" in series:
        below = heaps.get(series["stack"])
        heaps[series["stack"]] = y.astype(float) if below is None else below + y
        trace.update(y=heaps[series["stack"]], line={"width": 0})
        if "areaStyle" in series:
            trace.update(fill="tonexty", fillcolor=_faded(**series["areaStyle"]))
    if "endLabel" in series:
        _name_end(trace, y, series["endLabel"])
    return trace


def _name_end(trace: go.Scatter, y: np.ndarray[Any, Any], label: Option) -> None:
    """Write a line's label beside its last number."""
    numbers = np.flatnonzero(~np.isnan(y))
    text = [""] * len(y)
    if len(numbers):
        text[numbers[-1]] = _text(label["formatter"])
    font = {"color": label["color"], "weight": label["fontWeight"]}
    trace.update(mode=f"{trace.mode}+text", text=text, textposition="middle right", textfont=font, cliponaxis=False)


def _ends(series: Option) -> go.Scatter:
    """Return the symbols of early ends, with the text beside those that show theirs."""
    points, status = series["data"], Status(series["name"])
    return go.Scatter(
        x=[point["value"][0] for point in points],
        y=[point["value"][1] for point in points],
        mode="markers+text",
        name=status.value,
        legendgroup=status.value,
        showlegend=False,
        hoverinfo="skip",
        cliponaxis=False,
        marker={
            "symbol": style.mark(status).plotly,
            "size": series["symbolSize"],
            "color": [point["itemStyle"]["color"] for point in points],
            "line": {
                "color": [point["itemStyle"]["borderColor"] for point in points],
                "width": [point["itemStyle"]["borderWidth"] for point in points],
            },
        },
        text=[_plain(point["label"]["formatter"]) if point["label"]["show"] else "" for point in points],
        textposition=[f"middle {point['label']['position']}" for point in points],
        textfont={"color": [point["label"]["rich"]["number"]["color"] for point in points]},
    )


def _limits(drawn: go.Figure, series: Option, place: int) -> None:
    """Draw a series' horizontal and vertical lines, and their labels."""
    lines = series.get("markLine", {"data": []})
    for mark in lines["data"]:
        style = lines.get("lineStyle", {}) | mark.get("lineStyle", {})
        label = lines.get("label", {}) | mark["label"]
        along, across = ("x", "y") if "yAxis" in mark else ("y", "x")
        value = mark[f"{across}Axis"]
        drawn.add_shape(
            type="line",
            line={"color": style["color"], "dash": _dash(style.get("type", "solid")), "width": style["width"]},
            **_whole(along, place),
            **{f"{across}ref": _axis(across, place), f"{across}0": value, f"{across}1": value},
        )
        if label.get("show", True):
            _label(drawn, label, across, value, place)


def _label(drawn: go.Figure, label: Option, across: str, value: float, place: int) -> None:
    """Name a line: a horizontal one over its start or its end, a vertical one over its top."""
    if across == "y":
        at_start = "Start" in label["position"]
        # Plotly wants an annotation's place on a logarithmic axis as a power of ten, and a shape's as it is.
        is_log = drawn.layout[_layout_key("y", place)].type == "log"
        side = {"x": 0, "xanchor": "left"} if at_start else {"x": 1, "xanchor": "right"}
        height = {"y": math.log10(value) if is_log else value, "yref": _axis("y", place)}
        where = side | height | {"xref": f"{_axis('x', place)} domain"}
    else:
        where = {"x": value, "xref": _axis("x", place), "y": 1, "yref": f"{_axis('y', place)} domain"}
    drawn.add_annotation(
        text=_text(label["formatter"]), showarrow=False, yanchor="bottom", font={"color": label["color"]}, **where
    )


def _areas(drawn: go.Figure, series: Option, place: int) -> None:
    """Shade what a series shades, from one height to another."""
    areas = series.get("markArea", {"data": []})
    for low, high in areas["data"]:
        drawn.add_shape(
            type="rect", layer="below", line={"width": 0}, fillcolor=areas["itemStyle"]["color"],
            yref=_axis("y", place), y0=low["yAxis"], y1=high["yAxis"], **_whole("x", place),
        )  # fmt: skip


def _lay_out(drawn: go.Figure, option: Option, title: str) -> None:
    across, up, grids = (_listed(option[name]) for name in ("xAxis", "yAxis", "grid"))
    top, height = 0, HEIGHT
    if len(grids) > 1:
        top, last = grids[0]["top"], grids[-1]
        height = last["top"] + last["height"] - top
    drawn.update_layout(
        template="plotly_white",
        title={"text": _text(title), "x": 0, "xref": "paper", "y": 1, "yref": "container", "pad": {"t": 18}},
        height=MARGIN["t"] + height + MARGIN["b"],
        margin=MARGIN | {"r": grids[0]["right"]},
        hovermode="x unified",
        showlegend=len(grids) == 1,  # several have a line each, and its name over it
        legend={"orientation": "h", "traceorder": "normal", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
    )
    for place, (x, y, grid) in enumerate(zip(across, up, grids, strict=True)):
        begin = grid["top"] - top if len(grids) > 1 else 0
        end = begin + grid["height"] if len(grids) > 1 else height
        drawn.update_layout(
            {
                _layout_key("x", place): {
                    "title": {"text": _text(x.get("name", ""))},
                    "range": [x["min"], x["max"]],
                    "anchor": _axis("y", place),
                    "matches": "x" if place else None,
                    "showticklabels": x.get("axisLabel", {}).get("show", True),
                    "zeroline": False,
                },
                _layout_key("y", place): {
                    "domain": [1 - end / height, 1 - begin / height],
                    "anchor": _axis("x", place),
                    "hoverformat": option["tooltip"]["valueFormatter"].removeprefix("%"),
                    "exponentformat": "e",
                    "zeroline": False,
                }
                | _scale(y),
            }
        )
        # Over the axis, as on the live chart: beside a low panel there is no room for it.
        drawn.add_annotation(
            text=_text(y["name"]), showarrow=False, x=0, xref=f"{_axis('x', place)} domain", xanchor="left",
            y=1, yref=f"{_axis('y', place)} domain", yanchor="bottom",
        )  # fmt: skip


def _scale(axis: Option) -> dict[str, Any]:
    """Return a vertical axis's type, and its range where it has one."""
    if axis["type"] == "log":
        ends = [math.log10(axis["min"]), math.log10(axis["max"])]
        return {"type": "log", "range": ends, "tickformat": "~g", "dtick": "D2"}
    return {"type": "linear"} | ({"range": [axis["min"], axis["max"]]} if "max" in axis else {})


def _listed(value: Any) -> list[Option]:
    return value if isinstance(value, list) else [value]


def _axis(letter: str, place: int) -> str:
    """Return Plotly's name of an axis: x, x2, x3."""
    return f"{letter}{place + 1}" if place else letter


def _layout_key(letter: str, place: int) -> str:
    return f"{letter}axis{place + 1}" if place else f"{letter}axis"


def _whole(letter: str, place: int) -> dict[str, Any]:
    """Return a shape's reach over the whole of an axis."""
    return {f"{letter}ref": f"{_axis(letter, place)} domain", f"{letter}0": 0, f"{letter}1": 1}


def _dash(kind: str | list[int]) -> str:
    if isinstance(kind, list):
        return ",".join(f"{length}px" for length in kind)
    return {"dashed": "dash"}.get(kind, kind)


def _faded(color: str, opacity: float) -> str:
    """Return a colour (#rrggbb or rgba) that lets through more."""
    if color.startswith("#"):
        red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
        return f"rgba({red}, {green}, {blue}, {opacity:g})"
    *channels, alpha = re.findall(r"[\d.]+", color)
    return f"rgba({', '.join(channels)}, {float(alpha) * opacity:g})"


def _plain(label: str) -> str:
    """Return an ECharts label's text without the names of its styles."""
    return _text(_RICH.sub(r"\1", label))


def _text(shown: str) -> str:
    """Return a text that is drawn as it stands: no tag, and no formula between dollars."""
    return html.escape(shown, quote=False).replace("$", "&#36;")

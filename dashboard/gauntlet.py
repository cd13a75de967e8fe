"""The gauntlet as a Plotly figure: a row a configuration, a column a gate, a cross where it stopped.

`figure(gauntlet.study_gauntlet(store, view, answer))` draws it in a notebook, too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboard import style
from dashboard.figures import FAINT, FILL, GREY
from tuner.confirm.gauntlet import GATES, Gate, Gauntlet, Reading, State, Way

MOST_ROWS, BEST_ROWS = 40, 20
"""With more configurations than the first number, only so many of the best have a row; the rest are ticks."""
CLOSE, STOP = "#E69F00", "#D55E00"
ROW_HEIGHT, HEAD_HEIGHT, FOOT_HEIGHT, STRIP_ROWS = 21, 78, 64, 2
"""Heights in pixels; that of the ticks in rows."""
RIGHT = 64
"""Pixels on the right for the numbers of the last column."""
USUAL = 0.9
"""Share of the readings within a linear axis; others are at its end, with their number."""
CROSS = {"symbol": "x", "size": 9, "color": STOP}
RING = {"symbol": "circle-open", "size": 16, "color": CLOSE, "line": {"width": 2.5}}
BESIDE = {"size": 16, "opacity": 0}
"""The room that a mark takes beside its number."""
HOLLOW = {"symbol": "circle-open", "size": 9, "color": GREY, "line": {"width": 2}}


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a gate."""

    low: float
    high: float
    is_log: bool = False

    def clip(self, value: float | None) -> float:
        """Return where a reading is drawn: within the axis; at its start if there is none."""
        return self.low if value is None else min(max(value, self.low), self.high)

    def share(self, value: float | None) -> float:
        """Return how far along the axis a reading is, 0 to 1."""
        ends = (self.low, self.clip(value), self.high)
        low, at, high = (math.log(end) for end in ends) if self.is_log else ends
        return (at - low) / (high - low)

    def place(self, value: float) -> float:
        """Return a value as annotations take it: on a log axis its logarithm."""
        return math.log10(value) if self.is_log else value


@dataclass(frozen=True)
class Point:
    """A configuration's reading, at a height of the figure."""

    row: Way
    reading: Reading
    y: float
    is_last: bool

    @property
    def is_stop(self) -> bool:
        """True if this gate stopped it."""
        return self.is_last and self.row.state is State.STOPPED

    @property
    def is_hollow(self) -> bool:
        """True if it passed, or runs, and nothing followed."""
        return self.is_last and self.row.state is State.OPEN


def figure(found: Gauntlet, selected: int | None = None, *, is_narrow: bool = False) -> go.Figure:
    """Plot each configuration's readings at the gates, joined by a line that ends where it stopped.

    The answer's row is bold, that of the trial `selected` shaded. For a phone, `is_narrow`: the gate that stopped it,
    and the fresh seeds.
    """
    is_many = len(found.rows) > MOST_ROWS
    rows, rest = (found.rows[:BEST_ROWS], found.rows[BEST_ROWS:]) if is_many else (found.rows, ())
    gates = (Gate.FRESH,) if is_narrow else GATES
    columns = len(gates) + is_narrow
    plot = make_subplots(
        rows=1, cols=columns, shared_yaxes=True, horizontal_spacing=0.012,
        column_widths=[0.58, 0.42] if is_narrow else None,
    )  # fmt: skip
    bottom = len(rows) - 0.5 + (STRIP_ROWS if rest else 0)
    inner = ROW_HEIGHT * max(1.0, bottom + 0.5)
    band = {"type": "rect", "xref": "paper", "yref": "y", "line_width": 0, "fillcolor": GREY, "opacity": 0.2}
    shapes = [
        band | {"x0": 0, "x1": 1, "y0": y - 0.5, "y1": y + 0.5} for y, row in enumerate(rows) if row.number == selected
    ]
    starts: dict[Gate, tuple[float, float]] = {}
    axes = {gate: _axis(found, gate) for gate in gates}
    for column, gate in enumerate(gates, columns - len(gates) + 1):
        starts[gate] = tuple(plot.layout["xaxis" if column == 1 else f"xaxis{column}"].domain)
        shapes += _limit(plot, found, gate, axes[gate], column, bottom)
        _points(plot, list(_at(gate, rows)), gate, axes[gate], column)
        _ticks(plot, list(_at(gate, rest)), gate, axes[gate], column, len(rows) - 0.5 + STRIP_ROWS / 2)
        axis = axes[gate]
        plot.update_xaxes(
            range=[axis.place(axis.low), axis.place(axis.high)], nticks=4,
            tickformat=".0%" if gate is Gate.HACKING else None, row=1, col=column,
        )  # fmt: skip
        if axis.is_log:
            plot.update_xaxes(type="log", dtick=1, row=1, col=column)
    if is_narrow:
        starts[GATES[0]] = tuple(plot.layout.xaxis.domain)
        shapes += _gate_column(plot, rows)
    else:
        shapes += _lines(rows, axes, starts)
    _heads(plot, found, gates, starts, is_narrow)
    _legend(plot, rows, found.title)
    labels = [f"<b>{row.label}</b>" if row.is_answer else row.label for row in rows]
    places = [*range(len(rows)), *([len(rows) - 0.5 + STRIP_ROWS / 2] if rest else [])]
    plot.update_yaxes(
        range=[bottom, -0.5], tickvals=places, ticktext=[*labels, *([f"{len(rest)} more"] if rest else [])],
        showgrid=False, zeroline=False, automargin=True,
    )  # fmt: skip
    plot.update_xaxes(zeroline=False, showgrid=False, fixedrange=True).update_yaxes(fixedrange=True)
    return plot.update_layout(
        shapes=shapes,
        height=inner + HEAD_HEIGHT + FOOT_HEIGHT,
        margin={"l": 8, "r": RIGHT, "t": HEAD_HEIGHT, "b": FOOT_HEIGHT},
        legend={"orientation": "h", "x": 0, "yanchor": "top", "y": -30 / inner},
        hoverlabel_align="left",
        hoverdistance=60,  # so that a click beside a mark selects it
        dragmode=False,
    )


def _at(gate: Gate, rows: Sequence[Way]) -> Iterator[Point]:
    """Yield the readings at a gate of the rows that came to it."""
    place = GATES.index(gate)
    for y, row in enumerate(rows):
        if place < len(row.readings):
            yield Point(row, row.readings[place], y, place + 1 == len(row.readings))


def _axis(found: Gauntlet, gate: Gate) -> Axis:
    """Return a gate's axis: around its limit and most of the readings."""
    points = list(_at(gate, found.rows))
    limit, values = found.limits[gate], [value for point in points if (value := point.reading.value) is not None]
    known = [*values, *([] if limit is None else [limit])] or [0.0, 1.0]
    match gate:
        case Gate.TRAINING:
            positive = [value for value in known if value > 0] or [1.0]
            return Axis(min(positive) / 1.5, 1.5 * max(positive), is_log=True)
        case Gate.KL:
            return Axis(0.0, max(1.3 * (limit or 0.0), 1.05 * float(np.quantile(known, USUAL))))
        case Gate.HACKING:
            return Axis(-0.05, 1.1 * max(1.2, *known))
        case Gate.FRESH:
            ends = [end for point in points for end in (point.reading.low, point.reading.high) if end is not None]
            return _around([*known, *ends])
    usual = float(np.quantile(known, 1 - USUAL))
    return _around([value for value in known if value >= usual])


def _around(values: Sequence[float]) -> Axis:
    margin = 0.08 * (max(values) - min(values)) or abs(values[0]) / 2 or 1.0
    return Axis(min(values) - margin, max(values) + margin)


def _limit(
    plot: go.Figure, found: Gauntlet, gate: Gate, axis: Axis, column: int, bottom: float
) -> list[dict[str, Any]]:
    """Write a gate's limit, and return the shapes of its line and of what is beyond it."""
    limit = found.limits[gate]
    if limit is None:
        return []
    plot.add_annotation(
        x=axis.place(limit), y=-0.5, text=found.limit_texts[gate], showarrow=False, yanchor="bottom", font_size=11,
        row=1, col=column,
    )  # fmt: skip
    at = {"xref": "x" if column == 1 else f"x{column}", "yref": "y", "y0": -0.5, "y1": bottom, "layer": "below"}
    beyond = (axis.low, limit) if gate in (Gate.REWARD, Gate.FRESH) else (limit, axis.high)
    return [
        {"type": "rect", "x0": beyond[0], "x1": beyond[1], "fillcolor": FILL, "line_width": 0} | at,
        {"type": "line", "x0": limit, "x1": limit, "line": {"color": GREY, "dash": "dash", "width": 1.5}} | at,
    ]


def _points(plot: go.Figure, points: Sequence[Point], gate: Gate, axis: Axis, column: int) -> None:
    """Draw the readings of rows at a gate: seeds, rings, dots, crosses and their numbers."""

    def add(kind: str, drawn: Sequence[Point], **more: Any) -> None:
        if drawn:
            plot.add_scatter(
                **{
                    "x": [axis.clip(point.reading.value) for point in drawn],
                    "y": [point.y for point in drawn],
                    "mode": "markers",
                    "showlegend": False,
                    "name": f"{gate}: {kind}",
                    "cliponaxis": False,
                    **more,
                },
                row=1,
                col=column,
            )

    seeds = [(point, value) for point in points for value in point.reading.seeds]
    add(
        "seeds", [point for point, _ in seeds], x=[axis.clip(value) for _, value in seeds],
        marker={"size": 4, "color": GREY, "opacity": 0.8}, hoverinfo="skip",
    )  # fmt: skip
    read = [point for point in points if point.reading.value is not None or point.is_stop]
    add("close", [point for point in read if point.reading.is_close], marker=RING, hoverinfo="skip")
    stopped = [point for point in read if point.is_stop]
    went_on = [point for point in read if not point.is_stop]
    dots = {
        "symbol": ["circle-open" if point.is_hollow else "circle" for point in went_on],
        "size": [11 if point.row.is_answer else 8 for point in went_on],
        "color": [_colour(point.row) for point in went_on],
        "opacity": 1,
        "line": {"width": [2 if point.is_hollow else 0 for point in went_on]},
    }
    for kind, drawn, marker in (("passed", went_on, dots), ("stopped", stopped, CROSS)):
        add(kind, drawn, marker=marker, **_hover(drawn, gate), **_errors(drawn, axis))
    told = read if gate is Gate.FRESH else stopped
    add(
        "numbers", told, mode="markers+text", marker=BESIDE, text=[point.reading.text for point in told],
        textposition="middle right",
        x=[max(axis.clip(point.reading.value), axis.clip(point.reading.high)) for point in told], hoverinfo="skip",
        textfont_size=12,
    )  # fmt: skip


def _hover(points: Sequence[Point], gate: Gate) -> dict[str, Any]:
    """Return the tooltips of points, whose first datum is the trial's number; a selection dims none."""
    return {
        "customdata": [
            [point.row.number, point.row.label, point.reading.detail, "stopped here" if point.is_stop else ""]
            for point in points
        ],
        "hovertemplate": f"<b>%{{customdata[1]}}</b> %{{customdata[3]}}<br>{gate}: %{{customdata[2]}}<extra></extra>",
        "unselected": {"marker": {"opacity": 1}},
    }


def _errors(points: Sequence[Point], axis: Axis) -> dict[str, Any]:
    """Return the error bars of points, within the axis."""
    ends = [(axis.clip(one.reading.value), one.reading.low, one.reading.high) for one in points]
    return {
        "error_x": {
            "array": [0.0 if high is None else axis.clip(high) - at for at, _, high in ends],
            "arrayminus": [0.0 if low is None else at - axis.clip(low) for at, low, _ in ends],
            "color": GREY, "thickness": 1.5, "width": 0,
        }
    }  # fmt: skip


def _ticks(plot: go.Figure, points: Sequence[Point], gate: Gate, axis: Axis, column: int, y: float) -> None:
    """Draw the readings of the configurations without a row as ticks."""
    for is_stop, colour in ((False, GREY), (True, STOP)):
        drawn = [point for point in points if point.is_stop is is_stop]
        if drawn:
            plot.add_scatter(
                x=[axis.clip(point.reading.value) for point in drawn], y=[y] * len(drawn), mode="markers",
                marker={"symbol": "line-ns", "size": 22, "opacity": 0.5, "line": {"width": 1, "color": colour}},
                name=f"{gate}: more {'stopped' if is_stop else 'passed'}", showlegend=False, row=1, col=column,
                **(_hover(drawn, gate) | {"unselected": {"marker": {"opacity": 0.5}}}),
            )  # fmt: skip


def _lines(
    rows: Sequence[Way], axes: Mapping[Gate, Axis], starts: Mapping[Gate, tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return the lines that join each row's readings, across the columns."""
    lines = []
    for y, row in enumerate(rows):
        ends = [
            starts[gate][0] + axes[gate].share(reading.value) * (starts[gate][1] - starts[gate][0])
            for gate, reading in zip(GATES, row.readings, strict=False)
            if reading.value is not None
        ]
        if len(ends) > 1:
            lines.append(_line(row, y, ends[0], ends[-1], "paper"))
    return lines


def _colour(row: Way) -> str:
    """Return the colour of a row's dots: the answer's is its trial's on all pages, others are grey."""
    return style.looks([row.number])[row.number].colour if row.is_answer else GREY


def _line(row: Way, y: float, start: float, end: float, xref: str) -> dict[str, Any]:
    look = {"color": _colour(row), "width": 3} if row.is_answer else {"color": FAINT, "width": 1.5}
    ends = {"x0": start, "x1": end, "y0": y, "y1": y}
    return {"type": "line", "xref": xref, "yref": "y", "line": look, "layer": "below"} | ends


def _gate_column(plot: go.Figure, rows: Sequence[Way]) -> list[dict[str, Any]]:
    """Draw in the first column which gate stopped each row, with its reading; return the lines up to there."""
    last = GATES.index(Gate.FRESH)
    points = [Point(row, row.readings[-1], y, True) for y, row in enumerate(rows) if len(row.readings) <= last]
    kinds = {
        "close": (RING, [point for point in points if point.reading.is_close]),
        "stopped": (CROSS, [point for point in points if point.is_stop]),
        "open": (HOLLOW, [point for point in points if not point.is_stop]),
    }
    for kind, (marker, drawn) in kinds.items():
        if not drawn:
            continue
        plot.add_scatter(
            x=[len(point.row.readings) - 1 for point in drawn], y=[point.y for point in drawn], mode="markers+text",
            marker=marker, text=[f" {_where(point)}" if kind == "stopped" else "" for point in drawn],
            textposition="middle right", name=f"gates: {kind}", showlegend=False, cliponaxis=False, row=1, col=1,
            **_hover(drawn, GATES[0]) | {"hovertemplate": "<b>%{customdata[1]}</b>: %{customdata[2]}<extra></extra>"},
        )  # fmt: skip
    plot.update_xaxes(range=[-0.4, last], showticklabels=False, row=1, col=1)
    came = [last if len(row.readings) > last else len(row.readings) - 1 for row in rows]
    return [_line(row, y, -0.4, end, "x") for y, (row, end) in enumerate(zip(rows, came, strict=True))]


def _where(point: Point) -> str:
    """Return the gate that stopped a configuration and its reading there; why, if that is not a number."""
    gate, text = point.row.stopped_at, point.reading.text
    return f"{gate} {text}" if text[:1].isdigit() or text[:1] == "-" else text


def _heads(
    plot: go.Figure, found: Gauntlet, gates: Sequence[Gate], starts: Mapping[Gate, tuple[float, float]], is_narrow: bool
) -> None:
    """Write each gate's name above its column, with the number of configurations that are left after it."""
    heads = (
        [(Gate.TRAINING, "stopped at"), (Gate.FRESH, str(Gate.FRESH))] if is_narrow else [(g, str(g)) for g in gates]
    )
    left = found.left
    for gate, title in heads:
        after = (GATES.index(Gate.HACKING) if is_narrow and gate is Gate.TRAINING else GATES.index(gate)) + 1
        first = f"{left[0]} " if gate is Gate.TRAINING else ""
        if gate is Gate.FRESH:
            first = f"{sum(len(row.readings) == len(GATES) for row in found.rows)} ran "
        count = f"{first}→ {left[after]}" if after < len(left) else "not run yet" if gate is Gate.FRESH else ""
        plot.add_annotation(
            x=sum(starts[gate]) / 2, y=1, xref="paper", yref="paper", text=f"<b>{title}</b><br>{count}",
            showarrow=False, xanchor="center", yanchor="bottom", yshift=24, font_size=14,
        )  # fmt: skip


def _legend(plot: go.Figure, rows: Sequence[Way], title: str) -> None:
    """Name the marks that are drawn."""
    points = [(row, reading) for row in rows for reading in row.readings]
    answer = [row for row in rows if row.is_answer]
    marks = {
        title: (bool(answer), {"symbol": "circle", "size": 11, "color": _colour(answer[0]) if answer else GREY}),
        "stopped here": (any(row.state is State.STOPPED for row in rows), CROSS),
        "close to the limit, or over it and went on": (any(reading.is_close for _, reading in points), RING),
        "passed, no verdict on fresh seeds": (any(row.state is State.OPEN for row in rows), HOLLOW),
    }
    for name, (is_drawn, marker) in marks.items():
        if is_drawn:
            plot.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker, row=1, col=1)

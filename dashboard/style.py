"""How trials look, everywhere: colour and dash by number, symbol by status.

The colours are Okabe and Ito's (2008), told apart with the common colour-vision deficiencies; black and
yellow are left out, since one of them vanishes on a dark or a light page.
"""

from dataclasses import dataclass

from tuner.status import Status

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
NEUTRAL = "#808080"
"""Limits and trials that are not highlighted: readable on a light and on a dark page."""


@dataclass(frozen=True)
class Dash:
    """One line style in each library's words."""

    echarts: str | list[int]
    plotly: str
    css: str
    glyph: str


SOLID = Dash("solid", "solid", "solid", "━━━")
_DASHES = (
    SOLID,
    Dash([8, 4], "dash", "dashed", "╸╸╸"),
    Dash([2, 3], "dot", "dotted", "•••"),
    Dash([9, 3, 2, 3], "dashdot", "double", "━•━"),
)

DISTINCT = len(COLOURS) * len(_DASHES)
"""Trials that can be told apart before colours and dashes come round again."""
AT_A_GLANCE = 8
"""Trials that are in colour where nobody chose any: more lines than that are a tangle."""


@dataclass(frozen=True)
class Mark:
    """A status's symbols: in text, on a Plotly figure, on an ECharts curve."""

    glyph: str
    plotly: str
    echarts: str


_CROSS = "path://M2,0 L0,2 L3,5 L0,8 L2,10 L5,7 L8,10 L10,8 L7,5 L10,2 L8,0 L5,3 Z"

_MARKS = {
    Status.WAITING: Mark("…", "square-open", "emptyRect"),
    Status.RUNNING: Mark("▶", "circle-open", "emptyCircle"),
    Status.PAUSED: Mark("‖", "diamond-open", "diamond"),
    Status.COMPLETED: Mark("✓", "circle", "circle"),
    Status.PRUNED: Mark("✕", "x", _CROSS),
    Status.FAILED: Mark("▲", "triangle-up", "triangle"),
    Status.STOPPED: Mark("■", "square", "rect"),
}


def colour(number: int) -> str:
    """Return the colour of trial `number`, the same on every chart and page."""
    return COLOURS[number % len(COLOURS)]


def dash(number: int) -> Dash:
    """Return the line style of trial `number`: trials that share a colour differ in it."""
    return _DASHES[number // len(COLOURS) % len(_DASHES)]


def heading(number: int, label: str = "") -> str:
    """Return a trial's number under its colour and dash as HTML; `label` is our own words."""
    line = f"border-top: 3px {dash(number).css} {colour(number)}; padding-top: 0.3rem"
    return f'<div style="{line}"><b>Trial {number:d}</b>{label and f" {label}"}</div>'


def mark(status: Status) -> Mark:
    """Return the symbols of `status`."""
    return _MARKS[status]


def status_label(status: Status) -> str:
    """Return the status with its symbol, so that nothing rests on colour alone."""
    return f"{mark(status).glyph} {status.value}"

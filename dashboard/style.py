"""The look of trials on all pages: colour and dash, symbol by status, and status words.

The first six colours are Okabe and Ito's (2008), distinguishable with common colour-vision deficiencies; black and
yellow are left out because each vanishes on a dark or a light page. The others are those farthest from them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuner.store import TrialRow
from tuner.study.status import Status, Wanted

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#E020E0", "#A04060", "#806020")
INKS = dict.fromkeys(("#0072B2", "#A04060", "#806020"), "#ffffff")
"""Text colour by background; black on all others."""
NEUTRAL = "#808080"
"""For limits and background trials; readable on light and dark pages."""


@dataclass(frozen=True)
class Dash:
    """A line style in each library's terms."""

    echarts: str | tuple[int, ...]
    plotly: str
    css: str
    glyph: str


SOLID = Dash("solid", "solid", "solid", "━━━")
DASHED = Dash((8, 4), "dash", "dashed", "╸╸╸")
DOTTED = Dash((2, 3), "dot", "dotted", "•••")
_DASHES = (SOLID, DASHED, DOTTED, Dash((9, 3, 2, 3), "dashdot", "double", "━•━"))

DISTINCT = 24
"""Most trials that are told apart in one picture."""
AT_A_GLANCE = 8
"""Most trials in colour by default."""


@dataclass(frozen=True)
class Mark:
    """A status's symbols: in text, on a Plotly figure, on an ECharts curve."""

    glyph: str
    plotly: str
    echarts: str


_CROSS = "path://M2,0 L0,2 L3,5 L0,8 L2,10 L5,7 L8,10 L10,8 L7,5 L10,2 L8,0 L5,3 Z"
_BARS = "path://M0,0 L3,0 L3,10 L0,10 Z M6,0 L9,0 L9,10 L6,10 Z"

SHEET = """<style>
[data-testid="stMainBlockContainer"] { padding-top: 3.75rem; padding-bottom: 3rem; }
[data-testid="stMain"] [data-testid="stVerticalBlock"] { gap: 0.75rem; }
[data-testid="stMain"] h3 { font-size: 1.2rem; padding: 0.5rem 0; }
[data-testid="stMetricValue"] { font-size: 1.5rem; }
[data-testid="stCaptionContainer"] { color: inherit; opacity: 0.75; }
.response { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.response.long { max-height: 15rem; overflow-y: auto; }
details[open] + .response.long { max-height: none; }
.st-key-marked { position: sticky; top: 3.75rem; z-index: 5; padding: 0.25rem 0; backdrop-filter: blur(12px); }
.parcoords text { text-shadow: none !important; }
[class*="st-key-gauntlet"] text { fill: currentColor !important; }
[data-testid="stPageLink-NavLink"] span { white-space: normal !important; }
@media (min-width: 641px) { [class*="-narrow-only"] { display: none; } }
@media (max-width: 640px) {
  [class*="-wide-only"] { display: none; }
  [data-testid="stButtonGroup"] button { padding-left: 0.55rem; padding-right: 0.55rem; }
}
@media (min-width: 800px) { [data-testid="stMainBlockContainer"] { padding-left: 2.5rem; padding-right: 2.5rem; } }
</style>"""
"""Style sheet for pages denser than Streamlit's default."""


_MARKS: Mapping[Status, Mark] = {
    Status.WAITING: Mark("…", "square-open", "emptyRect"),
    Status.RUNNING: Mark("▶", "circle-open", "emptyCircle"),
    Status.PAUSED: Mark("‖", "hash-open", _BARS),
    Status.COMPLETED: Mark("✓", "circle", "circle"),
    Status.PRUNED: Mark("✕", "x", _CROSS),
    Status.FAILED: Mark("▲", "triangle-up", "triangle"),
    Status.STOPPED: Mark("■", "square", "rect"),
}


def colour(place: int) -> str:
    """Return the colour at a place among things compared; trials have theirs from `looks`."""
    return COLOURS[place % len(COLOURS)]


@dataclass(frozen=True)
class Look:
    """A trial's line."""

    colour: str
    dash: Dash


def ink(colour: str) -> str:
    """Return the text colour on one of `COLOURS`, with a contrast of at least 5 : 1."""
    return INKS.get(colour, "#000000")


def looks(trials: Iterable[int]) -> dict[int, Look]:
    """Return looks by number, the first ones served first: a trial's own colour, which follows from its number, or if
    that is taken the first free one; where none is free, dashes tell apart those of one colour.

    The first colour is that of trial 0, the reference, alone.
    """
    look_of: dict[int, Look] = {}
    taken = dict.fromkeys(COLOURS, 0)
    for number in dict.fromkeys(trials):
        own = colour(1 + (number - 1) % (len(COLOURS) - 1)) if number else COLOURS[0]
        if number and taken[own]:
            own = min(COLOURS[1:], key=taken.__getitem__)
        look_of[number] = Look(own, _DASHES[taken[own] % len(_DASHES)])
        taken[own] += 1
    return dict(sorted(look_of.items()))


def heading(number: int, look: Look, label: str = "") -> str:
    """Return a trial's number under its colour and dash as HTML; `label` is our own words."""
    line = f"border-top: 3px {look.dash.css} {look.colour}; padding-top: 0.3rem"
    return f'<div style="{line}"><b>Trial {number:d}</b>{label and f" {label}"}</div>'


def status_text(row: TrialRow) -> str:
    """Return a trial's status in a word: its status, or `interrupted`; `stopping` or `pausing` if ordered."""
    if row.status is Status.RUNNING and row.wanted is not None and not row.is_interrupted:
        return {Wanted.STOP: "stopping", Wanted.PAUSE: "pausing"}[row.wanted]
    return row.shown_status


def status_cell(row: TrialRow) -> str:
    """Return a trial's status with its symbol."""
    return f"{mark(row.status).glyph} {status_text(row)}"


def mark(status: Status) -> Mark:
    """Return a status's symbols, so that colour is never the only sign."""
    return _MARKS[status]

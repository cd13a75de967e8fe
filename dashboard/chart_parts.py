"""What a chart is made of, as data: panels with lines, areas, limits and marks. `dashboard.charts` makes them.

`dashboard.echarts` draws a chart live, `dashboard.figures.saved` draws it for a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import pandas as pd

from dashboard import style
from ppo_core.metrics import METRICS
from tuner.guard import KL
from tuner.status import Status

Axis = Literal["step", "episodes", "tokens", "seconds", "KL"]
AXES: tuple[Axis, ...] = get_args(Axis)
Across = Axis | Literal["device-seconds"]
"""What lies across a chart: of a trial's curve one of `AXES`, of a whole study what its trials cost."""
AXIS_TITLES: Mapping[Across, str] = {
    "step": "Step (PPO iterations)",
    "episodes": "Episodes",
    "tokens": "Response tokens",
    "seconds": "Seconds of the trial",
    "KL": METRICS[KL].title,
    "device-seconds": "Device-seconds of all trials",
}
PANEL, GAP = 92, 30
"""Heights in pixels of one of several panels, and of what lies between two."""
FILL = "rgba(128, 128, 128, 0.10)"
FAINT = "rgba(128, 128, 128, 0.45)"
"""Grey that shows on light and on dark pages: an area, and a line behind others."""


@dataclass(frozen=True)
class Line:
    """A trial's line, or one of the study as a whole: in the trial's colour, or in grey behind the others."""

    trial: int
    points: pd.DataFrame
    """`x`, `y`."""
    name: str
    is_bright: bool = True
    label: str = ""
    """The text at its end."""
    with_points: bool = False
    dash: style.Dash = style.SOLID
    is_resting: bool = False
    """Whether the strategy paused the trial: its line is quieter than one that came to its end."""
    is_stepped: bool = False
    """Whether a height holds until the next point."""

    @property
    def colour(self) -> str:
        return style.colour(self.trial) if self.is_bright else FAINT

    @property
    def width(self) -> float:
        return 2 if self.is_bright and not self.is_resting else 1.2

    @property
    def opacity(self) -> float:
        return 0.6 if self.is_bright and self.is_resting else 1.0


@dataclass(frozen=True)
class Area:
    """Areas on top of each other, behind the lines."""

    edges: pd.DataFrame
    """`x`, and the heights of every edge from the lowest up; a column is named after the area below it."""
    colour: str
    """#rrggbb."""
    opacities: tuple[float, ...]
    """From one edge to the next."""


@dataclass(frozen=True)
class Limit:
    """A dashed line across a panel, at a height or at a place of the horizontal axis."""

    value: float
    text: str = ""
    is_upright: bool = False
    at_end: bool = False
    """Whether the text stands at the right end."""
    is_below: bool = False
    """Whether it stands below the line, where curves run above it."""
    colour: str = style.NEUTRAL
    width: float = 1.5


@dataclass(frozen=True)
class EarlyEnd:
    """The mark where a trial was pruned, stopped or failed."""

    trial: int
    status: Status
    x: float
    y: float
    is_bright: bool
    name: str
    """The trial's number and what else it is called."""
    rule: str
    """The guard's rule that ended it; may be empty."""
    on_left: bool
    """Whether the text stands left of the symbol, where there is room for it."""

    @property
    def colour(self) -> str:
        return style.colour(self.trial) if self.is_bright else FAINT

    @property
    def size(self) -> int:
        """In pixels."""
        return 12 if self.is_bright else 9


@dataclass(frozen=True)
class Point:
    """A marked point with words of its own in the tooltip."""

    x: float
    y: float
    tooltip: str
    """What the tooltip says before the value."""
    value: float
    colour: str
    mark: style.Mark
    is_bright: bool = True
    """Whether it has a tooltip and a text, and is not behind the others."""
    name: str = ""
    """The text beside it: first this, in its colour."""
    text: str = ""
    """Then this, in grey."""
    on_left: bool = False

    @property
    def size(self) -> int:
        """In pixels."""
        return 10 if self.is_bright else 6


@dataclass(frozen=True)
class Panel:
    """One plot of a chart."""

    title: str
    """Of the vertical axis, with its unit."""
    lines: Sequence[Line] = ()
    areas: Sequence[Area] = ()
    limits: Sequence[Limit] = ()
    ends: Sequence[EarlyEnd] = ()
    """The grey ones first."""
    points: Sequence[Point] = ()
    """The grey ones first."""
    shaded: tuple[float, float] | None = None
    """From one height to another."""
    span: tuple[float, float] | None = None
    """The ends of the vertical axis; None: as far as the numbers go."""
    is_log: bool = False

    def ends_by_status(self) -> dict[tuple[bool, Status], list[EarlyEnd]]:
        """Return the early ends by whether they are bright and by status."""
        found: dict[tuple[bool, Status], list[EarlyEnd]] = {}
        for end in self.ends:
            found.setdefault((end.is_bright, end.status), []).append(end)
        return found


@dataclass(frozen=True)
class Chart:
    """What a chart shows: panels over each other, all over the same part of one axis."""

    name: str
    """Of its file."""
    axis: Across
    span: tuple[float, float]
    """The ends of the horizontal axis."""
    panels: Sequence[Panel]
    right: int = 40
    """Pixels on the right for names at lines' ends."""

"""Live charts (ECharts) of curves: pure functions from step rows to options.

Points come from `dashboard.curve_points`, the building blocks from `dashboard.echarts`. Text from outside never enters
a chart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd

from dashboard import echarts, style
from dashboard.curve_points import (
    AXIS_TITLES,
    BUDGETED,
    MOST_POINTS,
    Drawing,
    band_edges,
    points_of,
    positions,
    thinned,
)
from dashboard.echarts import FAINT, DataSeries, Option, Span
from ppo_core.config.kl_budget import is_within
from ppo_core.metrics import METRICS
from ppo_core.output import decimals
from tuner.study.rules import KL, KL_STEP, RULES, WANTED_KL_STEP
from tuner.study.status import Status

EARLY = (Status.PRUNED, Status.FAILED, Status.STOPPED)
"""Statuses of trials that did not run to their end."""
MOST_LIMITS = 1.5
"""A linear KL axis ends at this multiple of the guard's limit at the latest: one blow-up would flatten the rest."""
NEAR_LIMIT = 0.7
"""A KL axis includes the guard's limit once a curve it is fitted to exceeds this share of it."""
LOG_FLOOR = 0.01
"""Lower end of a logarithmic KL axis as a share of the budget; smaller values are drawn there, since step 0 has a KL
of 0.
"""
LABEL_SHIFTS = (0, 18, -18)
"""Pixels by which the labels of early ends are lower than their symbols, in turn, so that neighbours do not overlap."""
MOST_LINES = 20
"""Most lines in colour."""
MOST_SPREADS = 3
"""Most highlighted trials for which the spread is drawn behind the line."""
LEAST_IN_BAND = 10
"""Fewer grey trials than these are a line each, also after the band of those that have ended."""
MOST_PLACES = 120
"""Most places along a chart at which its tooltip reads the lines."""
MOST_IN_ALL = 6_000
"""Most points in a chart: a refresh sends them all."""
KL_METRICS = (KL, "objective/kl", "eval/kl")
"""Metrics in nats per response, whose charts show budget, limit and target."""
PACE = (KL_STEP, "lr", "objective/kl_coef")
"""The KL step of a run that keeps it, and what the run moves for it and for its KL."""
LOG_FROM = 10.0
"""A metric of `PACE` has a logarithmic axis if its highest reading is over this many times its lowest."""


def curve(
    frame: pd.DataFrame,
    trials: pd.DataFrame,
    metric: str,
    *,
    looks: Mapping[int, style.Look],
    drawing: Drawing,
    levels: Mapping[str, float],
    targets: Mapping[str, float] | None = None,
    kl_budget: float | None = None,
    names: Mapping[int, str] | None = None,
    groups: Mapping[int, str] | None = None,
) -> Option:
    """Chart one metric over the run for every trial, with early ends marked.

    The inherited part of a fork is dotted; smoothed lines have the raw values behind them.

    Args:
        frame: Step rows (see `dashboard.data.curves`).
        trials: The trials (see `dashboard.data.Snapshot`).
        metric: Its declared name.
        looks: Trials in colour; the others are grey behind them, or one band where they are many.
        drawing: Axis, smoothing and range.
        levels: Horizontal lines by their name: budget, limit, baseline.
        targets: Levels named below their lines, so that labels do not overlap: the targets of an adaptive β.
        kl_budget: A chart of KL is shaded over it, and evaluations over it are hollow; None: neither.
        names: Labels of trials in colour, shown after their numbers: our own words alone.
        groups: The group of each trial, our own words: its mean and band are drawn in place of its trials.
    """
    if groups:
        looks, trials = {}, trials.iloc[:0]
    chart = _Chart(frame, metric, drawing, levels, trials, looks, names or {}, kl_budget)
    evaluations = _evaluations(chart)
    if groups:
        behind, lines = _means(chart, groups)
    else:
        # An evaluation metric shows points: those told apart by the budget, else its line's own.
        behind, lines = _lines(chart, with_points=chart.is_evaluation and not evaluations)
        behind += _measured(chart)
    top, is_kl = chart.top, chart.is_kl
    label_below = _labels_below(chart)
    limits = [
        echarts.limit(value, name, at_end=not is_kl, is_below=not is_kl and label_below[name])
        for name, value in levels.items()
        if value <= top
    ]
    drawn = sorted((value, name) for name, value in (targets or {}).items() if value <= top)
    limits += [  # the lowest on the left, where no star is, others on the right, so that labels do not overlap
        echarts.limit(value, name, at_end=place > 0, is_below=place == 0) for place, (value, name) in enumerate(drawn)
    ]
    vertical: Option = {"name": METRICS[metric].title if is_kl else METRICS[metric].unit or METRICS[metric].label}
    if is_kl and evaluations and not chart.is_evaluation:
        line, points = METRICS[metric].label, METRICS["eval/kl"].label
        vertical["name"] = f"{line} (line) and {points} (points), {METRICS[metric].unit}"
    if is_kl:
        vertical |= {"min": chart.floor, "type": "log"} if chart.is_log else {"min": 0}
        vertical["max"] = top
    shaded = (kl_budget, top) if is_kl and kl_budget is not None else None
    return echarts.zoomable(
        echarts.one_panel(
            chart.across,
            vertical,
            [*_spreads(chart), *behind, *lines.values(), *([] if groups else _nearest(chart))],
            [echarts.limits_alone(limits, shaded), *evaluations, *_ends(chart)],
            right=90 if names or groups else 40,
            numbers=f"%.{chart.places}f",
        )
    )


def pace(frame: pd.DataFrame, metric: str, *, look: style.Look, drawing: Drawing) -> Option:
    """Chart a metric of `PACE` of one trial, and beside its KL step the wanted one, dashed.

    A reading of 0, as of β before scores differ, is a gap.
    """
    chart = _Chart(frame, metric, drawing, {}, frame.iloc[:0], {})
    looks = {WANTED_KL_STEP: (style.NEUTRAL, style.DASHED)} if metric == KL_STEP else {}
    looks[metric] = (look.colour, style.SOLID)
    lines, known = list[DataSeries](), list[float]()
    for name, (colour, dash) in looks.items():
        points = points_of(frame, name, drawing.axis)
        points["y"] = points["y"].where(points["y"] > 0)
        numbers = points["y"].dropna().tolist()
        known += numbers
        label, is_point = METRICS[name].label, len(numbers) == 1
        lines.append(echarts.line(thinned(points), label, colour, dash=dash, with_points=is_point))
    is_log = max(known, default=0.0) > LOG_FROM * min(known, default=0.0)
    vertical = {"name": METRICS[metric].title} | ({"type": "log"} if is_log else {})
    return echarts.zoomable(echarts.one_panel(chart.across, vertical, lines, [], numbers="%.3g"))


@dataclass(frozen=True)
class _Chart:
    """Arguments of one chart (see `curve`), and what follows from them."""

    frame: pd.DataFrame
    metric: str
    drawing: Drawing
    levels: Mapping[str, float]
    trials: pd.DataFrame
    looks: Mapping[int, style.Look]
    """Looks of the trials in colour, by number."""
    names: Mapping[int, str] = field(default_factory=dict)
    kl_budget: float | None = None

    @property
    def is_kl(self) -> bool:
        return self.metric in KL_METRICS

    @property
    def is_log(self) -> bool:
        return self.is_kl and self.drawing.log_kl

    @property
    def is_evaluation(self) -> bool:
        return self.metric.startswith("eval/")

    @cached_property
    def points(self) -> pd.DataFrame:
        """The metric's points (see `points_of`), with `measured`, their height before smoothing."""
        measured = points_of(self.frame, self.metric, self.drawing.axis)
        points = points_of(self.frame, self.metric, self.drawing.axis, self.drawing.smoothing)
        points = points.assign(measured=measured["y"].to_numpy())
        return points.assign(y=points["y"].clip(lower=self.floor)) if self.is_log else points

    @cached_property
    def span(self) -> Span:
        """The ends of the shown part of the horizontal axis."""
        longest = float(self.points["x"].max()) if len(self.points) else 0.0
        low, high = (longest * share / 100 for share in self.drawing.window)
        tick = 1.0 if self.drawing.axis != "KL" else 10.0 ** math.floor(math.log10(longest / 100 or 0.1))
        low, high = (round(place(end / tick) * tick, 12) for place, end in ((math.floor, low), (math.ceil, high)))
        return low, max(high, low + tick)  # ECharts labels both ends, with all their digits

    @property
    def across(self) -> Option:
        """The horizontal axis; all but the KL are in whole numbers."""
        axis, is_whole = self.drawing.axis, self.drawing.axis != "KL"
        pointer = f"{axis.capitalize() if is_whole else axis} {{value}}"
        return echarts.axis(AXIS_TITLES[axis], self.span, pointer=pointer, is_whole=is_whole)

    @property
    def buckets(self) -> int:
        """Buckets of a band along the horizontal axis."""
        return 8 if self.is_evaluation else 60

    @property
    def budget(self) -> float:
        """The KL budget: the lowest level, or 1 without any."""
        return min(self.levels.values(), default=1.0)

    @property
    def floor(self) -> float:
        """The lower end of a logarithmic KL axis."""
        return LOG_FLOOR * self.budget

    @property
    def places(self) -> int:
        """Decimals of the chart's numbers."""
        errors = f"{self.metric}_se"
        is_reward = self.metric == "eval/reward" and errors in self.frame
        return decimals(self.points["measured"], self.frame[errors] if is_reward else ())

    @cached_property
    def top(self) -> float:
        """The top of a KL axis: above the budget and the curves it is fitted to, and above the guard's lower limit if
        they come near it. Infinity for other metrics.

        A linear axis is fitted to trials in colour that were not pruned, as far as there are any; if all were, it
        extends to the guard's upper limit.
        """
        if not self.is_kl:
            return math.inf
        levels, fitted = sorted(self.levels.values()) or [1.0], self.points[self.points["x"].between(*self.span)]
        budget, limit = self.budget, levels[:2][-1]
        most = math.inf if self.is_log else MOST_LIMITS * limit
        if not self.is_log:
            unpruned = self.trials.loc[self.trials["status"] != Status.PRUNED, "number"]
            for numbers in (self.looks, unpruned):
                wanted = fitted["trial"].isin(numbers)
                fitted = fitted[wanted] if wanted.any() else fitted
            if self.looks and not fitted["trial"].isin(unpruned).any():
                most = max(most, 1.1 * levels[-1])
        highest = float(np.fmax(fitted["measured"].max(), budget))
        top = min(1.02 * max(highest, limit if highest > NEAR_LIMIT * limit else 1.1 * budget), most)
        tick = 10.0 ** math.floor(math.log10(top)) / 2
        return math.ceil(top / tick) * tick  # the axis ends on a tick

    def points_of_trial(self, number: int) -> pd.DataFrame:
        return self.points[self.points["trial"] == number]

    def label_of(self, number: int) -> str:
        """Return a trial's number and name."""
        name = self.names.get(number)
        return f"{number}: {name}" if name else f"{number}"

    def is_near_right_edge(self, x: float | pd.Series) -> Any:
        """Return True, or a series of it, if a label at this position has more room on its left."""
        return x > self.span[0] + 0.7 * (self.span[1] - self.span[0])


def _labels_below(chart: _Chart) -> dict[str, bool]:
    """Return for each level True if its label, at the right end, has more room below the line."""
    numbers = chart.points.dropna(subset="y")
    near = numbers.loc[chart.is_near_right_edge(numbers["x"]), "y"]
    heights = [*numbers["y"], *chart.levels.values()]
    room = 0.12 * (max(heights) - min(heights)) if heights else 0.0
    return {
        name: bool(near.between(level - room, level).sum() < near.between(level, level + room).sum())
        for name, level in chart.levels.items()
    }


def _lines(chart: _Chart, *, with_points: bool) -> tuple[list[DataSeries], dict[int, DataSeries]]:
    """Return the series in the background (the band of many grey trials, inherited parts of forks), and the other lines
    by number, grey ones first: of many, those that outlast the band.
    """
    trials, looks = chart.trials, chart.looks
    others = chart.points[~chart.points["trial"].isin(looks)]
    greys = sorted(others["trial"].unique())
    behind: list[DataSeries] = []
    if len(greys) > style.DISTINCT:
        edges = band_edges(others, chart.buckets, least=LEAST_IN_BAND)
        band = edges[["x", "low", "high"]].set_axis(["x", "Other trials, lower edge", "Other trials"], axis=1)
        behind, ends = echarts.area("band", band, style.NEUTRAL, (0.225,)), others.groupby("trial")["x"].max()
        left = sorted(ends.index[ends > edges["end"].max()])
        greys = left if len(left) < LEAST_IN_BAND else []
    most = _points_per_line(len(looks) + len(greys))
    marked = set(trials.loc[trials["status"].isin(EARLY), "number"])
    forked = dict(trials[["number", "fork_step"]].dropna().itertuples(index=False))
    lines = {}
    for number in greys:
        kept = thinned(chart.points_of_trial(number), most)
        one = len(kept) == 1
        lines[number] = echarts.line(kept, f"Trial {number}", FAINT, width=1.2, with_points=one, more=echarts.BEHIND)
    for number, look in looks.items():
        kept = thinned(chart.points_of_trial(number), most)
        if kept.empty:
            continue
        if number in forked:
            inherited, kept = kept[kept["step"] <= forked[number]], kept[kept["step"] >= forked[number]]
            if len(inherited) > 1:
                name = f"Trial {number}, inherited"
                behind.append(echarts.line(inherited, name, look.colour, width=1.5, dash=style.DOTTED))
        lines[number] = echarts.line(
            kept, f"Trial {chart.label_of(number)}, line", look.colour, dash=look.dash,
            with_points=with_points or len(kept) == 1, more=echarts.NO_TOOLTIP,
        )  # fmt: skip
        if number not in marked:  # otherwise its symbol is labelled
            lines[number] = echarts.named_at_end(lines[number], chart.label_of(number), chart.span[1])
    return behind, lines


def _nearest(chart: _Chart) -> list[DataSeries]:
    """Return invisible lines for the tooltip: each trial in colour with its reading at the step nearest to each place.

    ECharts lists the lines that have a point at the pointer's place, so all of these have the same places.
    """
    numbers = chart.points[chart.points["trial"].isin(chart.looks)].dropna(subset=["x", "y"]).sort_values("x")
    places = np.unique(numbers["x"].to_numpy(float))
    places = places[:: -(-len(places) // MOST_PLACES) or 1]
    lines = []
    for number, look in chart.looks.items():
        known = numbers[numbers["trial"] == number]
        if known.empty:
            continue
        at = np.abs(known["x"].to_numpy(float)[:, None] - places).argmin(axis=0)
        points = pd.DataFrame({"x": places, "y": known["measured"].to_numpy(float)[at]})
        lines.append(echarts.line(points, f"Trial {chart.label_of(number)}", look.colour, more=echarts.UNSEEN))
    return lines


def _points_per_line(lines: int) -> int:
    return max(60, min(MOST_POINTS, MOST_IN_ALL // max(lines, 1)))


def _measured(chart: _Chart) -> list[DataSeries]:
    """Return the raw values as faded lines, for behind the smoothed ones."""
    if not chart.drawing.smoothing or chart.is_evaluation:
        return []
    points, most = points_of(chart.frame, chart.metric, chart.drawing.axis), _points_per_line(2 * len(chart.looks))
    return [
        echarts.line(
            thinned(line, most), f"Trial {number}, measured", look.colour, width=1, opacity=0.3, more=echarts.BEHIND
        )
        for number, look in chart.looks.items()
        if len(line := points[points["trial"] == number])
    ]


def _means(chart: _Chart, groups: Mapping[int, str]) -> tuple[list[DataSeries], dict[int, DataSeries]]:
    """Return the band of the middle 80% of each group's trials, and by its place the line of its mean."""
    bands, lines = list[DataSeries](), {}
    for place, group in enumerate(dict.fromkeys(groups.values())):
        edges = band_edges(chart.points[chart.points["trial"].map(groups) == group], chart.buckets)
        if edges.empty:
            continue
        colour = style.colour(place)
        band = edges[["x", "low", "high"]].set_axis(["x", f"{group}, lower edge", f"{group}, band"], axis=1)
        bands += echarts.area(group, band, colour, (0.15,))
        line = echarts.line(edges.rename(columns={"mean": "y"}), group, colour)
        lines[place] = echarts.named_at_end(line, group, chart.span[1])
    return bands, lines


def _evaluations(chart: _Chart) -> list[Option]:
    """Return the highlighted trials' evaluations as points: hollow over the KL budget, a star for the one that counts.

    In a chart of training KL they show eval KL, which the budget limits.
    """
    frame, metric = chart.frame, "eval/kl" if chart.is_kl else chart.metric
    if chart.kl_budget is None or not metric.startswith("eval/") or not {metric, *BUDGETED} <= set(frame.columns):
        return []
    counted = chart.trials.set_index("number")["value_step"]
    evaluated = frame.assign(x=positions(frame, chart.drawing.axis), y=frame[metric]).dropna(subset=["x", "y"])
    evaluated["y"] = evaluated["y"].clip(chart.floor if chart.is_log else None, chart.top)
    pairs = evaluated[list(BUDGETED)].itertuples(index=False)
    evaluated["kind"] = ["within" if is_within(kl, se, chart.kl_budget) else "over" for kl, se in pairs]
    is_counted = (evaluated["step"] > 0) & (evaluated["step"] == evaluated["trial"].map(counted))
    evaluated.loc[is_counted & (evaluated["kind"] == "within"), "kind"] = "counted"
    return [
        echarts.evaluations(number, kind, points[["x", "y"]].to_numpy().tolist(), look.colour)
        for number, look in chart.looks.items()
        for kind, points in evaluated[evaluated["trial"] == number].groupby("kind")
    ]


def _spreads(chart: _Chart) -> list[DataSeries]:
    """Return the measured spread of a few trials in colour: minimum, quartiles and maximum, or a standard error."""
    frame, axis, error = chart.frame, chart.drawing.axis, f"{chart.metric}_se"
    columns = [f"{chart.metric}_{name}" for name in ("min", "q25", "q75", "max")]
    opacities: tuple[float, ...] = (0.08, 0.2, 0.08)
    if error in frame.columns:
        y, columns, opacities = frame[chart.metric], ["one SE below", "one SE above"], (0.2,)
        low = (y - frame[error]).clip(lower=chart.floor if chart.is_log else None)
        frame = frame.assign(**dict(zip(columns, (low, y + frame[error]), strict=True)))
    if len(chart.looks) > MOST_SPREADS or axis == "KL" or not set(columns) <= set(frame.columns):
        return []
    areas: list[DataSeries] = []
    for number, look in chart.looks.items():
        steps = frame[frame["trial"] == number]
        edges = steps.assign(x=positions(steps, axis))[["x", *columns]].dropna()
        if len(edges):
            every = -(-len(edges) // (MOST_IN_ALL // 10))
            areas += echarts.area(f"trial {number}", edges.iloc[::every], look.colour, opacities)
    return areas


def _ends(chart: _Chart) -> list[Option]:
    """Return a mark for each trial that ended early, as one series per status, grey ones first.

    It lies on the curve at the step named in the reason, else at the last step; in a gap it takes the last known
    height. Above the axis it is drawn at the top, with its value in the text.
    """
    ends: dict[tuple[bool, Status], list[Option]] = {}
    shifts = cycle(LABEL_SHIFTS)
    trials = chart.trials[chart.trials["number"].isin(chart.points["trial"])]
    for trial in trials[trials["status"].isin(EARLY)].itertuples():
        line = chart.points_of_trial(trial.number)
        if not pd.isna(trial.stop_step):
            line = line[line["step"] <= trial.stop_step]
        heights = line["y"].dropna()
        if heights.empty:
            continue
        x, y, height = float(line["x"].iloc[-1]), float(heights.iloc[-1]), float(line["measured"].dropna().iloc[-1])
        # Only a rule's declared label; any other text is left out.
        rule = f" {RULES[trial.rule].label}" if trial.rule in RULES else ""
        text = f"{rule}: {height:.3g}" if height > chart.top else rule
        is_bright = trial.number in chart.looks
        end = echarts.early_end(
            trial.number, (x, min(y, chart.top)), chart.looks[trial.number].colour if is_bright else FAINT,
            (chart.label_of(trial.number), text), is_bright=is_bright, on_left=bool(chart.is_near_right_edge(x)),
            lower=next(shifts) if is_bright else 0,
        )  # fmt: skip
        ends.setdefault((is_bright, Status(trial.status)), []).append(end)
    return [
        echarts.early_ends(status, ends[is_bright, status], is_bright=is_bright)
        for is_bright, status in sorted(ends, key=lambda key: key[0])
    ]

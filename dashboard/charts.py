"""Live charts of a run: pure functions from step rows to ECharts options, built from `dashboard.echarts`.

Text from outside never enters a chart.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from dashboard import echarts, style
from dashboard.diagnosis import SIGNALS, Incident
from dashboard.echarts import FAINT, Drawn, Option, Place, Span
from ppo_core.config.kl_budget import is_within
from ppo_core.metrics import METRICS, QUANTILES
from tuner.judge.rules import KL, RULES
from tuner.search.fidelity import RungPause
from tuner.study.status import Status

Axis = Literal["step", "episodes", "tokens", "seconds", "KL"]
AXES: tuple[Axis, ...] = get_args(Axis)
AXIS_TITLES: Mapping[Axis, str] = {
    "step": "Step (PPO iterations)",
    "episodes": "Episodes",
    "tokens": "Response tokens",
    "seconds": "Seconds of the trial",
    "KL": METRICS[KL].title,
}
LENGTH = "response/length_mean"
BUDGETED = ("eval/kl", "eval/kl_se")
"""Columns that decide whether an evaluation is within the KL budget."""
NEEDED: dict[Axis, tuple[str, ...]] = {"step": (), "episodes": (), "tokens": (LENGTH,), "seconds": (), "KL": (KL,)}
"""The metrics that a horizontal axis is made of."""
LONGEST_GAP = 20
"""A gap longer than this many usual gaps is a pause, and counts as one usual gap."""
BAND_TRIALS = 60
"""Trials used for a band; more would cost reading time and not change it."""

EARLY = (Status.PRUNED, Status.FAILED, Status.STOPPED)
"""Statuses of trials that ended before their end."""
WHOLE = (0, 100)
"""The whole horizontal axis, in percent of the longest trial."""
MOST_POINTS = 600
"""Points of one drawn line."""


def points_of(curves: pd.DataFrame, metric: str, axis: Axis = "step", smoothing: float = 0.0) -> pd.DataFrame:
    """Return `trial`, `step`, `x`, `y` of one metric, in order.

    A step where the metric was not a number keeps its row, so that the line has a gap there. An evaluation's
    metric has rows only where there was one, and is never smoothed.
    """
    frame = pd.DataFrame(
        {
            "trial": curves["trial"],
            "step": curves["step"],
            "x": positions(curves, axis),
            "y": curves[METRICS[metric].name],
        }
    )
    if axis in ("tokens", "KL"):
        frame = frame.dropna(subset="x")
    if metric.startswith("eval/"):
        return frame.dropna(subset="y")
    return smoothed(frame, smoothing) if smoothing > 0 else frame


def positions(curves: pd.DataFrame, axis: Axis) -> pd.Series:
    """Return each row's position on an axis.

    `tokens`: response tokens so far, mean length x episodes; `seconds`: since the trial's first report, without pauses
    (see `LONGEST_GAP`).
    """
    by_trial = curves.groupby("trial")
    if axis == "tokens":
        new = by_trial["episode"].diff().fillna(0) * curves[LENGTH]
        return new.fillna(0).groupby(curves["trial"]).cumsum()
    if axis == "seconds":
        gaps = by_trial["at"].diff()
        usual = gaps.groupby(curves["trial"]).transform("median")
        return gaps.mask(gaps > LONGEST_GAP * usual, usual).fillna(0).groupby(curves["trial"]).cumsum()
    return curves[{"step": "step", "episodes": "episode", "KL": KL}[axis]]


def representatives(numbers: Sequence[int], chosen: Collection[int], most: int = BAND_TRIALS) -> list[int]:
    """Return at most `most` trials that are not chosen, spread evenly over the numbers.

    They do not change with the choice, so their steps are already cached.
    """
    spread = range(len(numbers)) if len(numbers) <= most else [place * len(numbers) // most for place in range(most)]
    return [numbers[place] for place in spread if numbers[place] not in set(chosen)]


def smoothed(frame: pd.DataFrame, weight: float) -> pd.DataFrame:
    """Return `points` with y as each trial's exponential moving average; `weight` (0 to 1) is the past's share.

    The average is debiased; gaps stay gaps.
    """
    means = frame.groupby("trial")["y"].transform(lambda y: y.ewm(alpha=1 - weight, ignore_na=True).mean())
    return frame.assign(y=means.where(frame["y"].notna()))


def thinned(line: pd.DataFrame, most: int = MOST_POINTS) -> pd.DataFrame:
    """Thin one trial's points to at most `most` (8 or more).

    Each bucket keeps its lowest point, its highest point and a gap, so spikes and missing stretches survive.
    """
    if len(line) <= most:
        return line
    inner = line.iloc[1:-1].reset_index(drop=True)
    bucket = inner.index // -(-len(inner) // ((most - 2) // 3))
    y = inner["y"]
    numbers, gaps = y.dropna().groupby(bucket[y.notna()]), pd.Series(bucket)[y.isna()].drop_duplicates()
    kept = sorted({*numbers.idxmin(), *numbers.idxmax(), *gaps.index})
    return pd.concat([line.iloc[:1], inner.loc[kept], line.iloc[-1:]], ignore_index=True)


def band_edges(frame: pd.DataFrame, buckets: int = 60) -> pd.DataFrame:
    """Return a band by bucket of x: `low` and `high` around the middle 80% of the points, and their `mean`.

    Buckets in which fewer than half of the remaining trials have a point are left out.
    """
    numbers = frame.dropna(subset="y")
    width = max((numbers["x"].max() - numbers["x"].min()) / buckets, 1)
    bucket = numbers.groupby(numbers["x"] // width)
    ends = numbers.groupby("trial")["x"].max()
    spread = pd.DataFrame(
        {
            "x": bucket["x"].mean(),
            "low": bucket["y"].quantile(0.1),
            "high": bucket["y"].quantile(0.9),
            "mean": bucket["y"].mean(),
        }
    )
    going = bucket["x"].min().map(lambda start: (ends >= start).sum())
    return spread[2 * bucket["trial"].nunique() >= going].reset_index(drop=True)


# One metric over the run. Labels and units come from the declared metrics.

MOST_LIMITS = 1.5
"""A linear KL axis ends at this multiple of the guard's limit: one blow-up would flatten the rest."""
NEAR_LIMIT = 0.7
"""A KL axis includes the guard's limit once a curve exceeds this share of it."""
LOG_FLOOR = 0.1
"""Lower end of a logarithmic axis; smaller values are drawn there, since step 0 has a KL of 0."""
MOST_LINES = 20
"""Most lines in colour."""
MOST_SPREADS = 3
"""Most highlighted trials for which the spread is drawn behind the line."""
MOST_IN_ALL = 6_000
"""Most points in a chart: a refresh sends them all."""
KL_METRICS = (KL, "objective/kl", "eval/kl")
"""Metrics in nats per response, whose charts show budget, limit and target."""


@dataclass(frozen=True)
class Drawing:
    """The reader's choice of axis, smoothing and range."""

    axis: Axis = "step"
    smoothing: float = 0.0
    """The past's share in each point, 0 to under 1."""
    log_kl: bool = False
    window: tuple[int, int] = WHOLE
    """The shown part of the horizontal axis, in percent of the longest trial."""
    by: str = ""
    """Setting whose value labels each line; empty: none."""
    grouped: bool = False
    """True: one line and band per value of that setting, or for its lower and upper half."""
    linked: bool = False
    """True: one combined chart with a common cursor."""


def needed(metrics: Sequence[str], axis: Axis) -> tuple[str, ...]:
    """Return the columns needed to chart these metrics, in declared order."""
    wanted = {*metrics, *BUDGETED, *NEEDED[axis], *(name for metric in metrics for name in quantiles(metric))}
    return tuple(name for name in METRICS if name in wanted)


def quantiles(metric: str) -> tuple[str, ...]:
    """Return the quantile metrics of `metric`; empty if only its mean is reported."""
    names = tuple(f"{metric}_{suffix}" for suffix in QUANTILES)
    return names if all(name in METRICS for name in names) else ()


def curve(
    frame: pd.DataFrame,
    trials: pd.DataFrame,
    metric: str,
    *,
    chosen: Collection[int],
    drawing: Drawing,
    levels: Mapping[str, float],
    targets: Mapping[str, float] | None = None,
    kl_budget: float | None = None,
    names: Mapping[int, str] | None = None,
    screened: Mapping[int, RungPause] | None = None,
    groups: Mapping[int, str] | None = None,
) -> Option:
    """Chart one metric over the run for every trial, with early ends and pauses at a rung marked.

    The inherited part of a fork is dotted; smoothed lines have the raw values behind them.

    Args:
        frame: Step rows (see `dashboard.data.curves`).
        trials: The trials (see `dashboard.data.Snapshot`).
        metric: Its declared name.
        chosen: Trials in colour; the others are grey behind them, or one band where they are many.
        drawing: Axis, smoothing and range.
        levels: Horizontal lines by their name: budget, limit, baseline.
        targets: Those named at the other end, where they do not overprint a level's name: an adaptive β's.
        kl_budget: What lies over it is shaded in a chart of KL, and evaluations over it are hollow; None: neither.
        names: What trials in colour are called besides their number: our own words alone.
        screened: Pauses of trials at their rungs (see `tuner.search.fidelity.rung_pauses`).
        groups: The group of each trial by our own words: its mean and band are drawn in place of its trials.
    """
    if groups:
        chosen, trials, screened = (), trials.iloc[:0], None
    points = points_of(frame, metric, drawing.axis, drawing.smoothing)
    is_kl = metric in KL_METRICS
    is_log = is_kl and drawing.log_kl
    if is_log:
        points = points.assign(y=points["y"].clip(lower=LOG_FLOOR))
    span = _edges(points, drawing)
    top = _kl_top(points, *span, levels, is_log) if is_kl else np.inf
    names, targets, looks = names or {}, targets or {}, style.looks(chosen)
    declared = METRICS[metric]
    evaluations = _evaluations(frame, trials, metric, looks, drawing, top, kl_budget)
    # An evaluation metric shows points: those told apart by the budget, else its line's own.
    with_points = metric.startswith("eval/") and not evaluations
    if groups:
        behind, lines = _means(points, groups, metric, span[1])
    else:
        behind, lines = _lines(points, trials, metric, looks, names, span[1], with_points)
        if drawing.smoothing and not metric.startswith("eval/"):
            behind += _measured(points_of(frame, metric, drawing.axis), looks)
    sides = _clear_sides(points, levels, span)
    limits = [
        echarts.limit(value, name, at_end=not is_kl, is_below=not is_kl and sides[name])
        for name, value in levels.items()
        if value <= top
    ]
    limits += [echarts.limit(value, name, at_end=is_kl) for name, value in targets.items() if value <= top]
    shown = {number: pause for number, pause in (screened or {}).items() if number in lines}  # not within the band
    pauses, others = _pauses(frame, points, trials, looks, span, top, names, shown)
    vertical: Option = {"name": declared.unit or declared.label}
    if is_kl:
        vertical |= {"min": LOG_FLOOR if is_log else 0, "max": top} | ({"type": "log"} if is_log else {})
    shaded = (kl_budget, top) if is_kl and kl_budget is not None else None
    pointer = drawing.axis if drawing.axis == "KL" else drawing.axis.capitalize()
    is_whole = drawing.axis not in ("KL", "seconds")
    return echarts.zoomable(
        echarts.one_panel(
            echarts.axis(AXIS_TITLES[drawing.axis], span, pointer=f"{pointer} {{value}}", is_whole=is_whole),
            vertical,
            [*_spreads(frame, metric, looks, drawing), *behind, *lines.values(), *pauses],
            [
                echarts.limits_alone(limits, shaded),
                *evaluations,
                *_ends(points, trials, looks, span, top, names),
                *others,
            ],
            right=90 if names or groups else 40,
        )
    )


def said(points: pd.DataFrame, metric: str, kl_budget: float | None, names: Mapping[Any, str]) -> str:
    """Describe in a sentence where the lines end; empty if there are none.

    Args:
        points: As the chart draws them (see `points_of`).
        metric: Its declared name.
        kl_budget: What the ends of a KL are held against.
        names: What each line is called by its `trial`.
    """
    lines = points[points["trial"].isin(names)].dropna(subset="y").groupby("trial")["y"]
    ends, better = lines.last().sort_values(), METRICS[metric].better
    if ends.empty:
        return ""
    if better == "higher":
        ends = ends[::-1]
    over = [] if metric not in KL_METRICS or kl_budget is None else [one for one, y in ends.items() if y > kl_budget]
    first, last = names[ends.index[0]].capitalize(), names[ends.index[-1]]
    if len(ends) == 1:
        budget = f", {'over' if over else 'within'} the KL budget" if metric in KL_METRICS else ""
        return f"{first} goes from {lines.first().iloc[0]:.3g} to {ends.iloc[0]:.3g}{budget}."
    sides = ("highest", "lowest") if better == "higher" else ("lowest", "highest")
    text = f"{first} ends {sides[0]}, at {ends.iloc[0]:.3g}; {last} {sides[1]}, at {ends.iloc[-1]:.3g}."
    if metric not in KL_METRICS:
        return text
    return f"{text} {len(over) or 'None'} of {len(ends)} end over the KL budget."


def over_the_axis(frame: pd.DataFrame, metric: str, drawing: Drawing, levels: Mapping[str, float]) -> str:
    """Return a sentence on the trials that leave the top of a linear KL axis (see `curve`); empty: none does."""
    if metric not in KL_METRICS or drawing.log_kl:
        return ""
    points = points_of(frame, metric, drawing.axis, drawing.smoothing)
    left, right = _edges(points, drawing)
    top = _kl_top(points, left, right, levels, is_log=False)
    over = points[points["x"].between(left, right) & (points["y"] > top)]
    return beyond_text(over, "y", top)


def beyond_text(over: pd.DataFrame, kl: str, end: float) -> str:
    """Return a sentence on the points that lie over the `end` of a KL axis (empty: none); `kl` is their column."""
    if over.empty:
        return ""
    highest, count = over.sort_values(kl).iloc[-1], over["trial"].nunique()
    return (
        f"{count} trial{'s exceed' if count > 1 else ' exceeds'} the axis at {end:.3g} nats (highest "
        f"{highest[kl]:.1f}, trial {highest['trial']:.0f}); a log KL axis shows all."
    )


def _kl_top(points: pd.DataFrame, left: float, right: float, levels: Mapping[str, float], is_log: bool) -> float:
    """Return the top of a KL axis: above curves and budget, and above the guard's limit if curves come near it."""
    budget, limit = min(levels.values(), default=1.0), max(levels.values(), default=1.0)
    highest = float(np.fmax(points.loc[points["x"].between(left, right), "y"].max(), budget))
    most = np.inf if is_log else MOST_LIMITS * limit
    top = min(1.02 * max(highest, limit if highest > NEAR_LIMIT * limit else 1.1 * budget), most)
    step = 10 ** np.floor(np.log10(top)) / 2
    return float(np.ceil(top / step) * step)  # the axis ends on a tick


def _clear_sides(points: pd.DataFrame, levels: Mapping[str, float], span: Span) -> dict[str, bool]:
    """Return for each level whether its label, at the right end, has more room below the line."""
    numbers = points.dropna(subset="y")
    near = numbers[numbers["x"] >= span[0] + 0.7 * (span[1] - span[0])]["y"]
    heights = [*numbers["y"], *levels.values()]
    room = 0.12 * (max(heights) - min(heights)) if heights else 0.0
    return {
        name: int(near.between(level - room, level).sum()) < int(near.between(level, level + room).sum())
        for name, level in levels.items()
    }


def _lines(
    points: pd.DataFrame,
    trials: pd.DataFrame,
    metric: str,
    looks: Mapping[int, style.Look],
    names: Mapping[int, str],
    right: float,
    with_points: bool,
) -> tuple[list[Drawn], dict[int, Drawn]]:
    """Return what lies behind (the band of many grey trials, inherited parts of forks), and the other lines by number,
    grey ones first; `right` is the chart's right end.
    """
    others = points[~points["trial"].isin(looks)]
    sparse = metric.startswith("eval/")
    is_band = others["trial"].nunique() > style.DISTINCT
    count = len(looks) + (0 if is_band else others["trial"].nunique())
    most = max(60, min(MOST_POINTS, MOST_IN_ALL // max(count, 1)))
    behind, greys = list[Drawn](), sorted(others["trial"].unique())
    if is_band:
        edges = band_edges(others, buckets=8 if sparse else 60)
        edges = edges.drop(columns="mean").set_axis(["x", "Other trials, lower edge", "Other trials"], axis=1)
        behind, greys = echarts.area("band", edges, style.NEUTRAL, (0.225,)), []
    at_rung = set(trials.loc[trials["kind"] == style.SCREENED, "number"])
    marked = {*trials.loc[trials["status"].isin(EARLY), "number"], *at_rung}
    lines = {}
    forked = dict(trials[["number", "fork_step"]].dropna().itertuples(index=False))
    for number in (*greys, *looks):
        kept = thinned(points[points["trial"] == number], most)
        if kept.empty:
            continue
        if number in forked and number in looks:
            inherited, kept = kept[kept["step"] <= forked[number]], kept[kept["step"] >= forked[number]]
            if len(inherited) > 1:
                name = f"Trial {number}, inherited"
                behind.append(echarts.line(inherited, name, looks[number].colour, width=1.5, dash=style.DOTTED))
        called, is_single = _called(number, names), len(kept) == 1
        name = f"Trial {called}"
        if number not in looks:
            lines[number] = echarts.behind(echarts.line(kept, name, FAINT, width=1.2, with_points=is_single))
            continue
        width, opacity = (1.2, 0.6) if number in at_rung else (2.0, 1.0)  # paused trials are fainter than ended ones
        line = echarts.line(
            kept, name, looks[number].colour, width=width, opacity=opacity, dash=looks[number].dash,
            with_points=is_single or with_points,
        )  # fmt: skip
        lines[number] = (
            line if number in marked else echarts.named_at_end(line, called, right)
        )  # otherwise its symbol is labelled
    return behind, lines


def _measured(points: pd.DataFrame, looks: Mapping[int, style.Look]) -> list[Drawn]:
    """Return the raw values as faded lines, for behind the smoothed ones."""
    most = max(60, min(MOST_POINTS, MOST_IN_ALL // (2 * max(len(looks), 1))))
    own = {number: thinned(points[points["trial"] == number], most) for number in looks}
    return [
        echarts.behind(echarts.line(kept, f"Trial {number}, measured", looks[number].colour, width=1, opacity=0.3))
        for number, kept in own.items()
        if len(kept)
    ]


def _means(
    points: pd.DataFrame, groups: Mapping[int, str], metric: str, right: float
) -> tuple[list[Drawn], dict[int, Drawn]]:
    """Return the band of the middle 80% of each group's trials, and by its place the line of its mean."""
    bands, lines = list[Drawn](), {}
    of = points["trial"].map(groups)
    for place, group in enumerate(dict.fromkeys(groups.values())):
        edges = band_edges(points[of == group], buckets=8 if metric.startswith("eval/") else 60)
        if edges.empty:
            continue
        colour = style.colour(place)
        band = edges[["x", "low", "high"]].set_axis(["x", f"{group}, lower edge", f"{group}, band"], axis=1)
        bands += echarts.area(group, band, colour, (0.15,))
        line = echarts.line(edges.rename(columns={"mean": "y"}), group, colour)
        lines[place] = echarts.named_at_end(line, group, right)
    return bands, lines


def _evaluations(
    frame: pd.DataFrame,
    trials: pd.DataFrame,
    metric: str,
    looks: Mapping[int, style.Look],
    drawing: Drawing,
    top: float,
    kl_budget: float | None,
) -> list[Option]:
    """Return the highlighted trials' evaluations as points: hollow over the KL budget, a star for the one that counts.

    In a chart of training KL they show eval KL, which the budget limits.
    """
    height = "eval/kl" if metric in KL_METRICS else metric
    if kl_budget is None or not height.startswith("eval/") or not {height, *BUDGETED} <= set(frame.columns):
        return []
    found, counted = [], trials.set_index("number")["value_step"]
    evaluated = frame.assign(x=positions(frame, drawing.axis), y=frame[height]).dropna(subset=["x", "y"])
    evaluated["y"] = evaluated["y"].clip(LOG_FLOOR if drawing.log_kl and metric in KL_METRICS else None, top)
    for number, look in looks.items():
        own = evaluated[evaluated["trial"] == number]
        if own.empty:
            continue
        within = np.array(
            [is_within(kl, se, kl_budget) for kl, se in own[list(BUDGETED)].itertuples(index=False)], bool
        )
        is_counted = (own["step"] == counted[number]).to_numpy()
        kinds = {"over": ~within, "within": within & ~is_counted, "counted": within & is_counted}
        for kind, is_of in kinds.items():
            if is_of.any():
                places = list(own.loc[is_of, ["x", "y"]].itertuples(index=False, name=None))
                found.append(echarts.evaluations(number, kind, places, look.colour))
    return found


def _called(number: int, names: Mapping[int, str]) -> str:
    """Return a trial's number and label."""
    by = names.get(number, "")
    return f"{number}: {by}" if by else f"{number}"


def _spreads(frame: pd.DataFrame, metric: str, looks: Mapping[int, style.Look], drawing: Drawing) -> list[Drawn]:
    """Return the measured spread of a few highlighted trials, unsmoothed."""
    names = quantiles(metric)
    if not names or not set(names) <= set(frame.columns) or len(looks) > MOST_SPREADS or drawing.axis == "KL":
        return []
    areas: list[Drawn] = []
    for number in looks:
        own = frame[frame["trial"] == number]
        edges = own[list(names)].set_axis(list(QUANTILES), axis=1).assign(x=positions(own, drawing.axis))
        edges = edges.dropna()[["x", "min", "q25", "q75", "max"]]
        if len(edges):
            every = -(-len(edges) // (MOST_IN_ALL // 10))
            edges = edges.iloc[::every].set_axis(["x", "spread", "min to q25", "q25 to q75", "q75 to max"], axis=1)
            areas += echarts.area(f"trial {number}", edges, looks[number].colour, (0.08, 0.2, 0.08))
    return areas


def _ends(
    points: pd.DataFrame,
    trials: pd.DataFrame,
    looks: Mapping[int, style.Look],
    span: Span,
    top: float,
    names: Mapping[int, str],
) -> list[Option]:
    """Return a mark for each trial that ended early, as one series per status, grey ones first.

    It lies on the curve at the step named in the reason, else at the last step; in a gap it takes the last known
    height. Above the axis it is drawn at the `top`, with its value in the text.
    """
    found: dict[tuple[bool, Status], list[Option]] = {}
    lines = dict(iter(points.groupby("trial")))
    for trial in trials[trials["status"].isin(EARLY) & trials["number"].isin(lines)].itertuples():
        line = lines[trial.number]
        if not pd.isna(trial.stop_step):
            line = line[line["step"] <= trial.stop_step]
        heights = line["y"].dropna()
        if heights.empty:
            continue
        x, y = float(line["x"].iloc[-1]), float(heights.iloc[-1])
        # Only a rule's declared label; any other text is left out.
        rule = f" {RULES[trial.rule].label}" if trial.rule in RULES else ""
        text = f"{rule}: {y:.3g}" if y > top else rule
        is_bright = trial.number in looks
        end = echarts.early_end(
            trial.number, (x, min(y, top)), looks[trial.number].colour if is_bright else FAINT,
            (_called(trial.number, names), text), is_bright=is_bright, on_left=_is_right(x, span),
        )  # fmt: skip
        found.setdefault((is_bright, Status(trial.status)), []).append(end)
    return [
        echarts.early_ends(status, found[is_bright, status], is_bright=is_bright)
        for is_bright, status in sorted(found, key=lambda key: key[0])
    ]


def _is_right(x: float, span: Span) -> bool:
    """Return True if a label at this position has more room on its left."""
    return x > span[0] + 0.7 * (span[1] - span[0])


def _pauses(
    frame: pd.DataFrame,
    points: pd.DataFrame,
    trials: pd.DataFrame,
    looks: Mapping[int, style.Look],
    span: Span,
    top: float,
    names: Mapping[int, str],
    screened: Mapping[int, RungPause],
) -> tuple[list[Drawn], list[Option]]:
    """Return a mark at each pause at a rung: single ones for highlighted trials, one series for grey ones.

    Trials still paused are labelled; others show their screening score in the tooltip.
    """
    found, greys, mark = [], list[Place](), style.mark(style.SCREENED)
    at_rung = set(trials.loc[trials["kind"] == style.SCREENED, "number"])
    for number, pause in screened.items():
        line = points[points["trial"] == number].dropna(subset="y")
        steps = frame.loc[frame["trial"] == number, ["step", "episode"]]
        before = line[line["step"].isin(steps.loc[steps["episode"] <= pause.episode, "step"])]
        if before.empty:
            continue
        x, y = float(before["x"].iloc[-1]), min(float(before["y"].iloc[-1]), top)
        if number not in looks:
            greys.append((x, y))
            continue
        words = (_called(number, names), f" {screened_text(pause.score)}") if number in at_rung else ("", "")
        said, score = f"Trial {number} {style.SCREENED}, score", np.nan if pause.score is None else pause.score
        point = echarts.point(said, (x, y), score, looks[number].colour, mark, words, on_left=_is_right(x, span))
        found.append(point)
    return found, [echarts.points_behind(greys, mark)] if greys else []


def screened_text(score: float | None) -> str:
    """Return the status text of a screened trial: `screened (score 0.67)`."""
    return style.SCREENED if score is None else f"{style.SCREENED} (score {score:.2f})"


def zoomed(frame: pd.DataFrame, axis: Axis, span: Span) -> tuple[int, int]:
    """Convert a selection on the axis to percent of the longest trial.

    At least 1%; an empty selection (a click) is the whole axis.
    """
    longest = float(positions(frame, axis).max())
    low, high = (min(max(100 * place / longest, 0.0), 100.0) for place in span)
    return (math.floor(low), math.ceil(high)) if high > low else WHOLE


def _edges(points: pd.DataFrame, drawing: Drawing) -> Span:
    """Return the ends of the shown part of the horizontal axis."""
    longest = float(points["x"].max()) if len(points) else 0.0
    low, high = (longest * share / 100 for share in drawing.window)
    if drawing.axis not in ("KL", "seconds"):
        low, high = round(low), round(high)  # the axis's first label is a whole number
    return low, max(high, low + 1)


# Best value over cost.


def progress(found: pd.DataFrame, spent: float, baseline: float | None) -> Option:
    """Chart the best value so far over the device-seconds spent by all trials.

    Args:
        found: Where it rose, in order: `seconds`, `value`, and whose it was: `trial`, `step`.
        spent: Device-seconds in all.
        baseline: The SFT policy's eval reward; None: not known.
    """
    end, colour = max(spent, 1.0), style.colour(0)
    first = [] if baseline is None else [(0.0, baseline)]
    risen = list(found[["seconds", "value"]].itertuples(index=False, name=None))
    last = [(end, value) for _, value in risen[-1:]]
    drawn = []
    if risen:
        points, series = echarts.line(pd.DataFrame([*first, *risen, *last], columns=["x", "y"]), "Best so far", colour)
        drawn.append((points, series | {"step": "end"}))  # a step function
    drawn += [
        echarts.point(f"Trial {trial:.0f} at step {step:.0f}", (x, y), y, colour, style.mark(Status.COMPLETED))
        for x, y, trial, step in found[["seconds", "value", "trial", "step"]].itertuples(index=False)
    ]
    limits = [] if baseline is None else [echarts.limit(baseline, f"SFT baseline {baseline:.2f}", at_end=True)]
    across = echarts.axis("Device-seconds of the search", (0.0, end), pointer="Device-seconds {value}")
    vertical = {"name": METRICS["eval/reward"].unit}
    return echarts.one_panel(across, vertical, drawn, [echarts.limits_alone(limits)])


# A trial's incident: one small panel a signal, all over the same steps.

MOVED = "#D55E00"
"""Vermilion: stands out from the usual grey and blue."""


def incident(steps: pd.DataFrame, found: Incident | None, *, number: int, lines: Mapping[str, float]) -> Option:
    """Chart KL and every measured signal of a trial in panels; `lines` are drawn into the KL panel.

    A grey line marks the crossing; a coloured one marks where a signal left its usual range, which is shaded.
    """
    metrics = [KL, *(signal.metric for signal in SIGNALS)]
    shown = [metric for metric in metrics if metric == KL or steps[metric].notna().any()]
    moves = {} if found is None else {move.signal.metric: move for move in found.moves}
    drawn = []
    for metric in shown:
        points = thinned(steps[["step", metric]].rename(columns={"step": "x", metric: "y"}))
        limits = []
        if metric == KL:  # labels at alternating ends, so that close ones do not overlap
            heights = enumerate(lines.items())
            limits = [echarts.limit(at, f"{name} {at:g}", at_end=place % 2 == 1) for place, (name, at) in heights]
        if found is not None:
            limits.append(echarts.limit(found.step, is_upright=True))
        moved = moves.get(metric)
        if moved is not None and moved.step is not None:
            limits.append(echarts.limit(moved.step, f"step {moved.step}", is_upright=True, colour=MOVED, width=2))
        shaded = None if moved is None else (moved.low, moved.high)
        source, series = echarts.line(points, METRICS[metric].label, style.colour(number))
        drawn.append((source, series | {"symbolSize": 4} | echarts.marks(limits, shaded)))
    first, last = float(steps["step"].min()), float(steps["step"].max())
    across = echarts.axis(AXIS_TITLES["step"], (first, max(last, first + 1)))
    return echarts.panels(across, [METRICS[metric].title for metric in shown], drawn)

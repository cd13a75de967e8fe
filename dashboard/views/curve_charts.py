"""Live charts of metrics over the run: which trials are in colour, what is behind them, and captions."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import analysis, charts, data, echarts, style
from dashboard.charts import KL_METRICS, WHOLE, Axis, Drawing
from dashboard.data import Snapshot
from dashboard.echarts import Option
from dashboard.views import common
from ppo_core.metrics import METRICS
from tuner.judge.rules import KL
from tuner.search import fidelity
from tuner.store import Store, TrialRow
from tuner.study.status import Origin, Status

SHOWN_FIRST = (KL, "eval/reward", "objective/scores")
"""Default metrics."""
ROLLOUT_KLS = tuple(metric for metric in KL_METRICS if not metric.startswith("eval/"))


def read(
    store: Store,
    snapshot: Snapshot,
    chosen: tuple[int, ...] = (),
    metrics: tuple[str, ...] = (),
    axis: Axis = "episodes",
) -> tuple[tuple[int, ...], list[int], pd.DataFrame]:
    """Return the trials in colour, those in grey, and the steps of both."""
    bright = common.highlighted(snapshot, chosen, charts.MOST_LINES)
    numbers = [row.number for row in snapshot.view.trials]
    others = charts.representatives(numbers, bright)
    columns = charts.needed((*SHOWN_FIRST, *metrics), axis)
    return bright, others, data.curves(store, snapshot, columns, numbers=[*bright, *others])


@dataclass(frozen=True)
class Drawn:
    """Data and settings shared by all charts of a page."""

    snapshot: Snapshot
    frame: pd.DataFrame
    stamp: str
    bright: tuple[int, ...]
    others: Sequence[int]
    drawing: Drawing

    @classmethod
    def of(
        cls,
        store: Store,
        snapshot: Snapshot,
        chosen: tuple[int, ...],
        metrics: tuple[str, ...] = (),
        drawing: Drawing | None = None,
        *,
        with_others: bool = True,
    ) -> "Drawn":
        """Read the data. Other trials are grey in the background, or left out."""
        drawing = drawing or Drawing(axis="episodes")
        bright, others, frame = read(store, snapshot, chosen, metrics, drawing.axis)
        if not with_others:
            others, frame = [], frame[frame["trial"].isin(bright)]
        stamp = data.stamp(store, snapshot, [*bright, *others])
        return cls(snapshot, frame, stamp, bright, others, drawing)

    @property
    def rows(self) -> list[TrialRow]:
        """The trials in colour."""
        return [row for row in self.snapshot.view.trials if row.number in self.bright]


def draw(drawn: Drawn, metrics: Sequence[str], *, height: int, full_width: int = 0) -> None:
    """Draw the charts, the first `full_width` ones over the whole width, the others in pairs."""
    baseline = data.baseline(drawn.frame)
    shown = [metric for metric in metrics if not drawn.frame[metric].isna().all()]
    if drawn.drawing.linked and len(shown) > 1:
        made = [_made(drawn, metric, baseline) for metric in shown]
        titles = [METRICS[metric].title for metric in shown]
        option = echarts.stacked([option for option, _ in made], titles, height)
        alt = f"{', '.join(titles)} over {drawn.drawing.axis}, one line a trial"
        st.subheader("Curves with one cursor", anchor=False, help=_help(drawn, shown[0]))
        _echarts(option, f"linked curves {' '.join(shown)}", drawn, height * len(shown), alt)
        for title, (_, texts) in zip(titles, made, strict=True):
            st.caption(f"{title}: {texts}")
        return
    for metric in metrics[:full_width]:
        _chart(drawn, metric, baseline, height)
    if len(metrics) > full_width:
        with st.grid(2, min_column_width=320):
            for metric in metrics[full_width:]:
                with st.container():
                    _chart(drawn, metric, baseline, height)


def _chart(drawn: Drawn, metric: str, baseline: float | None, height: int) -> None:
    declared = METRICS[metric]
    st.subheader(declared.label, anchor=False, help=_help(drawn, metric))
    if drawn.frame[metric].isna().all():
        st.caption("Not measured in these trials.")
        return
    option, text = _made(drawn, metric, baseline)
    alt = f"{declared.title} over {drawn.drawing.axis}, one line a trial"
    _echarts(option, f"{metric} curves", drawn, height, alt)
    if text:
        st.caption(text)


def _made(drawn: Drawn, metric: str, baseline: float | None) -> tuple[Option, str]:
    """Return a metric's chart and caption."""
    lines = levels(drawn.snapshot, metric, baseline)
    return _shown(f"{drawn.stamp}|{metric}|{drawn.bright}|{drawn.drawing}|{lines}", drawn, metric, lines)


def _echarts(option: Option, key: str, drawn: Drawn, height: int, alt: str) -> None:
    key = key if drawn.drawing.window == WHOLE else f"{key} {drawn.drawing.window}"
    st.echarts_chart(option, key=key, height=height, alt=alt, on_select=partial(_zoom, key, drawn))


# The shown part of the run, set for all charts by a drag or the slider on Curves.

WINDOW = "window"
"""Session key of the shown part, in percent of the longest trial."""
_NEW_WINDOW = "new window"
"""Session key of a part chosen on a chart, until the next rerun."""


def window() -> tuple[int, int]:
    """Return the shown part of the run. Call before drawing the slider, so that slider and link get a new value."""
    if _NEW_WINDOW in st.session_state:
        st.session_state[WINDOW] = st.session_state.pop(_NEW_WINDOW)
    low, high = st.session_state.get(WINDOW, WHOLE)
    return low, high


def whole_run_button(shown: tuple[int, int]) -> None:
    """Show which part of the run is visible, with a button for all of it; nothing if all is visible."""
    low, high = shown
    if shown != WHOLE:
        label = f"Zoomed in on {low}% to {high}% of the run: show all"
        st.button(label, icon=":material/zoom_out:", key="whole run", on_click=_set_window, args=(WHOLE,))


def _zoom(key: str, drawn: Drawn) -> None:
    """Apply a selection on a chart."""
    areas = st.session_state[key].selection.areas
    if areas:
        low, high = areas[0]["coord_range"]
        _set_window(charts.zoomed(drawn.frame, drawn.drawing.axis, (low, high)))


def _set_window(span: tuple[int, int]) -> None:
    st.session_state[_NEW_WINDOW] = span
    common.ask_for_the_whole_page()


def _help(drawn: Drawn, metric: str) -> str:
    """Return a chart's help: the metric, and how to read the lines."""
    count, others = len(drawn.snapshot.view.trials) - len(drawn.bright), len(drawn.others)
    band = ""
    if others > style.DISTINCT:
        of = f"{others} of the other {count}" if others < count else f"the other {count}"
        band = f"The grey band holds the middle 80% of {of} trials."
    paused = ", ◇ paused by the strategy" if drawn.snapshot.view.spec.pauses_trials else ""
    marks = f"The number at a line's end is its trial; ✕ pruned, with the rule{paused}, ▲ failed, ■ stopped."
    before = ""
    if paused and metric in ROLLOUT_KLS:
        before = "It is of a step's rollouts, before its update; the KL printed at a pause is evaluated after it."
    return " ".join(part for part in (METRICS[metric].doc, band, marks, before) if part)


def _spread_text(drawn: Drawn, metric: str) -> str:
    """Explain the areas behind the lines, or how to get them; empty if the metric has none."""
    names = charts.quantiles(metric)
    if not names or drawn.frame[list(names)].isna().all(axis=None) or drawn.drawing.axis == "KL":
        return ""
    if len(drawn.bright) > charts.MOST_SPREADS:
        return f"Choose up to {charts.MOST_SPREADS} trials to see the spread over their rollouts."
    return "Shaded behind each line: its rollouts from minimum to maximum, darker between the quartiles."


def in_colour(drawn: Drawn, chosen: tuple[int, ...]) -> str:
    """Caption: which trials are in colour, why, and what the points mean."""
    return f"{_in_colour(drawn, chosen)} {POINTS}".strip()


POINTS = "Points are evaluations: hollow ones are over the KL budget, and ★ is the one that counts."


def _in_colour(drawn: Drawn, chosen: tuple[int, ...]) -> str:
    """Caption: which trials are in colour, and why; empty if all are."""
    if len(chosen) > len(drawn.bright):
        return f"In colour: the first {len(drawn.bright)} of the {len(chosen)} chosen trials."
    if not chosen and len(drawn.bright) == len(drawn.snapshot.view.trials):
        return ""
    best, pruned = drawn.snapshot.view.best(), set(drawn.snapshot.kl_pruned)
    named = [_named(row, best, pruned) for row in drawn.rows]
    return f"In colour: trial{'s' if len(named) > 1 else ''} {', '.join(named)}." if named else ""


def _named(row: TrialRow, best: TrialRow | None, pruned: Collection[int]) -> str:
    """Return a trial's number and role."""
    kinds = {
        "reference": row.origin is Origin.REFERENCE,
        "best": best is not None and row.number == best.number,
        "pruned for KL": row.number in pruned,
        "running": row.status is Status.RUNNING and not row.is_interrupted,
    }
    what = ", ".join(kind for kind, holds in kinds.items() if holds)
    return f"{row.number} ({what})" if what else f"{row.number}"


@st.cache_resource(max_entries=200, show_spinner=False)
def _shown(key: str, _drawn: Drawn, _metric: str, _levels: Mapping[str, float]) -> tuple[Option, str]:
    """Return the cached chart for `key`, and its caption."""
    drawing, grouped = _drawn.drawing, _groups(_drawn)
    points = charts.points_of(_drawn.frame, _metric, drawing.axis, drawing.smoothing)
    names: dict[Any, str] = {number: f"trial {number}" for number in _drawn.bright}
    if grouped:
        kept = points[points["trial"].isin(grouped)]
        points = kept.assign(trial=kept["trial"].map(grouped)).groupby(["trial", "x"], as_index=False)["y"].mean()
        names = {name: name for name in grouped.values()}
    texts = (
        charts.said(points, _metric, _drawn.snapshot.view.spec.kl_budget, names),
        GROUPED if grouped else _spread_text(_drawn, _metric),
        charts.over_the_axis(_drawn.frame, _metric, drawing, _levels),
    )
    option = charts.curve(
        _drawn.frame,
        _drawn.snapshot.trials,
        _metric,
        chosen=_drawn.bright,
        drawing=_drawn.drawing,
        levels=_levels,
        targets=targets(_drawn.snapshot, _drawn.bright, _drawn.frame) if _metric in KL_METRICS else None,
        kl_budget=_drawn.snapshot.view.spec.kl_budget,
        names=_names(_drawn),
        screened=fidelity.rung_pauses(_of_frame(_drawn)),
        groups=grouped,
    )
    return option, " ".join(text for text in texts if text)


def _of_frame(drawn: Drawn) -> list[TrialRow]:
    numbers = set(drawn.frame["trial"])
    return [row for row in drawn.snapshot.view.trials if row.number in numbers]


GROUPED = "Lines are the means of the trials with each value, areas the middle 80% of them."
MOST_VALUES = 4
"""Most values of a setting that form groups of their own; more are split into a lower and an upper half."""


def _groups(drawn: Drawn) -> dict[int, str]:
    """Return each trial's group by the chosen setting; empty if not grouped."""
    by = drawn.drawing.by
    if not by or not drawn.drawing.grouped:
        return {}
    rows = _of_frame(drawn)
    values = {row.number: float(found) for row in rows if isinstance(found := row.config.get(by), int | float)}
    few, middle = sorted(set(values.values())), statistics.median(values.values() or [0.0])
    if len(few) > MOST_VALUES:
        named = {number: f"{'up to' if value <= middle else 'over'} {middle:.3g}" for number, value in values.items()}
    else:
        named = {number: f"{value:.4g}" for number, value in values.items()}
    return {number: named[number] for number in sorted(values, key=lambda one: values[one])}


def _names(drawn: Drawn) -> dict[int, str]:
    """Return labels for the highlighted trials by the chosen setting; empty if none is chosen."""
    by = drawn.drawing.by
    return {row.number: analysis.name(row, by) for row in drawn.rows} if by else {}


def levels(snapshot: Snapshot, metric: str, baseline: float | None = None) -> dict[str, float]:
    """Return a chart's horizontal lines by name: budget and limit, or the SFT baseline."""
    spec = snapshot.view.spec
    if metric in KL_METRICS:
        return {f"KL budget {spec.kl_budget:g}": spec.kl_budget, f"Guard stops at {spec.kl_limit:g}": spec.kl_limit}
    if metric == "eval/reward" and baseline is not None:
        return {f"SFT baseline {baseline:.2f}": baseline}
    return {}


def targets(snapshot: Snapshot, bright: Sequence[int], frame: pd.DataFrame) -> dict[str, float]:
    """Return the KL targets of the highlighted trials by name, equal ones once; empty if they are many."""
    begun = set(bright) & set(frame["trial"])
    of: dict[float, list[int]] = {}
    for row in snapshot.view.trials:
        target = row.config.get("kl_target")
        if row.number in begun and isinstance(target, int | float):
            of.setdefault(target, []).append(row.number)
    few = of if len(of) <= charts.MOST_SPREADS else {}
    names = {to: f"Target of trial {numbers[0]}" if len(numbers) == 1 else "KL target" for to, numbers in few.items()}
    return {f"{name}: {to:.3g}": to for to, name in names.items()}

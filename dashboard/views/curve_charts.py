"""Live charts of metrics over the run: which trials are in colour, and what is behind them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import streamlit as st

from dashboard import analysis, charts, data, echarts, style
from dashboard.charts import KL_METRICS
from dashboard.curve_points import WHOLE, Drawing, needed, representatives, spread, zoomed
from dashboard.data import Snapshot
from dashboard.echarts import Option
from dashboard.views import common
from ppo_core.metrics import METRICS
from ppo_core.output import decimals, fixed, pluralize
from tuner.store import Store, TrialRow
from tuner.study.rules import KL, KL_STEP, WANTED_KL_STEP

DEFAULT_METRICS = (KL, "eval/reward", "objective/scores")
PACE_READ = (*charts.PACE, WANTED_KL_STEP)


@dataclass(frozen=True)
class ChartData:
    """Data shared by all charts on a page."""

    snapshot: Snapshot
    frame: pd.DataFrame
    """The steps of the trials in colour and in grey."""
    stamp: str
    """Changes whenever the trials change (see `data.stamp`)."""
    looks: Mapping[int, style.Look]
    """Looks of the trials in colour, by number."""
    drawing: Drawing

    @classmethod
    def read(
        cls,
        store: Store,
        snapshot: Snapshot,
        chosen: common.Numbers = (),
        metrics: tuple[str, ...] = (),
        drawing: Drawing | None = None,
        *,
        with_others: bool = True,
    ) -> "ChartData":
        """Read the steps. Other trials than those in colour are grey in the background, or left out."""
        drawing = drawing or Drawing(axis="episodes")
        bright = common.highlighted(snapshot, chosen, charts.MOST_LINES)
        others = representatives([row.number for row in snapshot.view.trials], bright) if with_others else []
        numbers = [*bright, *others]
        columns = needed((*DEFAULT_METRICS, *metrics), drawing.axis)
        frame = data.curves(store, snapshot, columns, numbers=numbers)
        return cls(snapshot, frame, data.stamp(store, snapshot, numbers), common.looks(snapshot, bright), drawing)

    @property
    def rows(self) -> list[TrialRow]:
        """The trials in colour."""
        return [row for row in self.snapshot.view.trials if row.number in self.looks]

    def is_measured(self, metric: str) -> bool:
        """Return whether any trial has a reading of a metric."""
        return bool(self.frame[metric].notna().any())


def draw(curves: ChartData, metrics: Sequence[str], *, height: int, is_first_wide: bool = False) -> None:
    """Draw the charts in pairs; of an odd number `is_first_wide`, so that no place stays empty."""
    sft_reward = data.sft_reward(curves.frame)
    measured = [metric for metric in metrics if curves.is_measured(metric)]
    if curves.drawing.linked and len(measured) > 1:
        _draw_linked(curves, measured, sft_reward, height)
    else:
        wide = len(measured) % 2 if is_first_wide else 0
        for metric in measured[:wide]:
            _draw_one(curves, metric, sft_reward, height)
        if len(measured) > wide:
            with st.grid(2, min_column_width=320):
                for metric in measured[wide:]:
                    with st.container():
                        _draw_one(curves, metric, sft_reward, height)
    missing = [METRICS[metric].label for metric in metrics if metric not in measured]
    if missing:
        st.caption(f"Not measured in these trials: {', '.join(missing)}.")


def draw_pace(curves: ChartData, number: int) -> None:
    """Draw the metrics `charts.PACE` of a trial in `curves` that keeps its KL step; of another nothing."""
    if not curves.is_measured(KL_STEP):
        return
    common.heading(
        "KL step, learning rate and β",
        "The learning rate follows the KL step towards the wanted one (dashed); β brings the KL to its target and "
        "keeps it there.",
    )
    with st.grid(3, min_column_width=280):
        for metric in charts.PACE:
            option = charts.pace(curves.frame, metric, look=curves.looks[number], drawing=curves.drawing)
            _echarts(option, f"{metric} pace", curves, 200, METRICS[metric].title)


def _draw_linked(curves: ChartData, metrics: Sequence[str], sft_reward: float | None, height: int) -> None:
    options = [_chart(curves, metric, sft_reward) for metric in metrics]
    titles = [METRICS[metric].title for metric in metrics]
    common.heading("Curves with one cursor", _help(curves, metrics[0]))
    key = f"linked curves {' '.join(metrics)}"
    _echarts(echarts.stacked(options, titles, height), key, curves, height * len(metrics), ", ".join(titles))


def _draw_one(curves: ChartData, metric: str, sft_reward: float | None, height: int) -> None:
    common.heading(METRICS[metric].label, _help(curves, metric))
    _echarts(_chart(curves, metric, sft_reward), f"{metric} curves", curves, height, METRICS[metric].title)


def _echarts(option: Option, key: str, curves: ChartData, height: int, title: str) -> None:
    key = key if curves.drawing.window == WHOLE else f"{key} {curves.drawing.window}"
    alt = f"{title} over {curves.drawing.axis}; in colour: trials {', '.join(map(str, curves.looks))}"
    st.echarts_chart(option, key=key, height=height, alt=alt, on_select=partial(_zoom, key, curves))


# The shown part of the run, set for all charts by a drag or the slider on Curves.

WINDOW = "window"
"""Session key of the shown part, in percent of the longest trial."""
_NEW_WINDOW = "new window"
"""Session key of a part chosen on a chart, until the next rerun."""


def apply_pending_zoom() -> None:
    """Give a part chosen on a chart to the slider and the link. Call before drawing the slider."""
    if _NEW_WINDOW in st.session_state:
        st.session_state[WINDOW] = st.session_state.pop(_NEW_WINDOW)


def window() -> tuple[int, int]:
    """Return the shown part of the run."""
    low, high = st.session_state.get(WINDOW, WHOLE)
    return low, high


def whole_run_button() -> None:
    """Show which part of the run is visible, with a button for all of it; nothing if all is visible."""
    low, high = window()
    if (low, high) != WHOLE:
        label = f"Zoomed in on {low}% to {high}% of the run: show all"
        st.button(label, icon=":material/zoom_out:", key="whole run", on_click=_set_window, args=(WHOLE,))


def _zoom(key: str, curves: ChartData) -> None:
    """Apply a selection on a chart."""
    areas = st.session_state[key].selection.areas
    if areas:
        low, high = areas[0]["coord_range"]
        _set_window(zoomed(curves.frame, curves.drawing.axis, (low, high)))


def _set_window(span: tuple[int, int]) -> None:
    st.session_state[_NEW_WINDOW] = span
    common.ask_for_the_whole_page()


def _help(curves: ChartData, metric: str) -> str:
    """Return a chart's help: the metric, how to read lines, areas and marks, and what else labelled lines differ in."""
    texts = [METRICS[metric].doc, "The number at a line's end is its trial; grey are the other trials."]
    if metric in KL_METRICS:
        if not metric.startswith("eval/"):
            texts.append("The line is of a step's rollouts, before its update; evaluations are after it.")
        texts.append("What exceeds a linear axis is shown by a log KL axis.")
    if metric in KL_METRICS or metric.startswith("eval/"):
        texts.append(
            "Points are evaluations. At hollow ones, KL plus one standard error exceeds the KL budget; ★ marks "
            "the one that gives the trial its value."
        )
    names = spread(metric)
    if names:
        what = "the standard error over the eval prompts" if len(names) == 1 else "the rollouts from minimum to maximum"
        texts.append(f"Shaded, for up to {charts.MOST_SPREADS} trials: {what}.")
    texts.append("✕ pruned, ▲ failed, ■ stopped. Of trials averaged by a setting the area holds the middle 80%.")
    if curves.drawing.by:
        texts.append(analysis.also_differ(curves.rows, curves.drawing.by))
    return " ".join(texts)


def _chart(curves: ChartData, metric: str, sft_reward: float | None) -> Option:
    lines = levels(curves.snapshot, metric, sft_reward)
    return _build_chart(
        f"{curves.stamp}|{curves.snapshot.view.spec.kl_budget}|{metric}|{curves.looks}|{curves.drawing}|{lines}",
        curves,
        metric,
        lines,
    )


@st.cache_resource(max_entries=200, show_spinner=False)
def _build_chart(key: str, _curves: ChartData, _metric: str, _levels: Mapping[str, float]) -> Option:
    """Return the chart, cached by `key`."""
    snapshot, frame, drawing = _curves.snapshot, _curves.frame, _curves.drawing
    return charts.curve(
        frame,
        snapshot.trials,
        _metric,
        looks=_curves.looks,
        drawing=drawing,
        levels=_levels,
        targets=targets(snapshot, list(_curves.looks), frame) if _metric in KL_METRICS else None,
        kl_budget=snapshot.view.spec.kl_budget,
        names={row.number: analysis.name(row, drawing.by) for row in _curves.rows} if drawing.by else {},
        groups=_groups(_curves),
    )


MOST_VALUES = 4
"""Most values of a setting that form groups of their own; more are split into a lower and an upper half."""


def _groups(curves: ChartData) -> dict[int, str]:
    """Return each trial's group by the chosen setting; empty if not grouped."""
    setting = curves.drawing.by
    if not setting or not curves.drawing.grouped:
        return {}
    begun = set(curves.frame["trial"])
    values = {
        row.number: float(value)
        for row in curves.snapshot.view.trials
        if row.number in begun and isinstance(value := row.config.get(setting), int | float)
    }
    middle, is_split = statistics.median(values.values() or [0.0]), len(set(values.values())) > MOST_VALUES
    groups = {}
    for number, value in sorted(values.items(), key=lambda item: item[1]):
        half = f"{'up to' if value <= middle else 'over'} {middle:.3g}"
        groups[number] = half if is_split else f"{value:.4g}"
    return groups


def levels(snapshot: Snapshot, metric: str, sft_reward: float | None = None) -> dict[str, float]:
    """Return a chart's horizontal lines by name: budget and limit, or the SFT policy."""
    spec = snapshot.view.spec
    if metric in KL_METRICS:
        guard, limit = spec.guard, spec.kl_limit
        lines = {f"KL budget {spec.kl_budget:g}": spec.kl_budget}
        if "kl_limit" not in guard.off:
            lines[f"Guard stops after {pluralize(guard.patience, 'step')} over {limit:g}"] = limit
        if "kl_hard" not in guard.off:
            at_once = limit * guard.limits["kl_hard"]
            lines[f"Guard stops at once over {at_once:g}"] = at_once
        return lines
    if metric == "eval/reward" and sft_reward is not None:
        places = decimals([sft_reward, *snapshot.trials["value"]], snapshot.trials["value_se"])
        return {f"SFT policy {fixed(sft_reward, places)}": sft_reward}
    return {}


def targets(snapshot: Snapshot, bright: Sequence[int], frame: pd.DataFrame) -> dict[str, float]:
    """Return the KL targets of the highlighted trials by name, equal ones once; empty if they are many."""
    started = set(bright) & set(frame["trial"])
    numbers_of: dict[float, list[int]] = {}
    for row in snapshot.view.trials:
        target = row.config.get("kl_target")
        if row.number in started and isinstance(target, int | float):
            numbers_of.setdefault(target, []).append(row.number)
    if len(numbers_of) > charts.MOST_SPREADS:
        return {}
    return {
        f"{f'Target of trial {numbers[0]}' if len(numbers) == 1 else 'KL target'}: {target:.3g}": target
        for target, numbers in numbers_of.items()
    }

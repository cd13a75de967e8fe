"""The incident's chart, as a pure function: one small chart a signal, all over the same steps."""

from collections.abc import Mapping

import pandas as pd

from dashboard import appearance, curves, echarts
from dashboard.echarts import Option
from dashboard.incident import SIGNALS, Incident
from ppo_core.metrics import METRICS
from tuner.guard import KL

PANEL, GAP, TOP = 92, 30, 30
"""Heights in pixels of one small chart, of what lies between two, and over the first."""
MOVED = "#D55E00"
"""Vermilion, as far from the trials' usual grey and blue as can be told apart."""


def incident(steps: pd.DataFrame, found: Incident | None, *, number: int, lines: Mapping[str, float]) -> Option:
    """Return KL and every measured signal of trial `number`; `lines` are drawn into the KL.

    A dashed line marks the crossing in each, a coloured one where the signal left its usual range, which is shaded.
    """
    metrics = [KL, *(signal.metric for signal in SIGNALS)]
    shown = [metric for metric in metrics if metric == KL or steps[metric].notna().any()]
    last = len(shown) - 1
    left, right = float(steps["step"].min()), float(max(steps["step"].max(), steps["step"].min() + 1))
    datasets, series = [], []
    for place, metric in enumerate(shown):
        own = curves.thinned(steps[["step", metric]].rename(columns={"step": "x", metric: "y"}))
        datasets.append({"source": own.rename(columns={"y": METRICS[metric].label})})
        series.append(_line(metric, place, number) | _marks(metric, found, lines))
    option: Option = {
        "animation": False,
        "dataset": datasets,
        "axisPointer": {"link": [{"xAxisIndex": "all"}]},
        "tooltip": {"trigger": "axis", "confine": True, "valueFormatter": "%.4g"},
        "grid": [
            {"left": 70, "right": 40, "top": TOP + place * (PANEL + GAP), "height": PANEL} for place in range(last + 1)
        ],
        "xAxis": [
            {
                "type": "value", "gridIndex": place, "min": left, "max": right, "splitLine": {"show": False},
                "minInterval": 1, "axisLabel": {"show": place == last},
                **({"name": "Step (PPO iterations)", "nameLocation": "middle", "nameGap": 26} if place == last else {}),
            }
            for place in range(last + 1)
        ],
        "yAxis": [
            {
                "type": "value", "gridIndex": place, "scale": True, "name": METRICS[metric].title, "splitNumber": 2,
                "nameTextStyle": {"align": "left", "padding": [0, 0, 0, -50]},
            }
            for place, metric in enumerate(shown)
        ],
        "series": series,
    }  # fmt: skip
    return echarts.compact(echarts.downloadable(option, f"incident_{number}"))


def height(option: Option) -> int:
    """Return the height that the chart needs, in pixels."""
    return TOP + len(option["grid"]) * (PANEL + GAP) + GAP


def _line(metric: str, place: int, number: int) -> Option:
    name = METRICS[metric].label
    return {
        "type": "line",
        "name": name,
        "datasetIndex": place,
        "xAxisIndex": place,
        "yAxisIndex": place,
        "encode": {"x": "x", "y": name, "tooltip": [name]},
        "symbolSize": 4,
        "showSymbol": False,
        "lineStyle": {"color": appearance.colour(number), "width": 2},
        "itemStyle": {"color": appearance.colour(number)},
    }


def _marks(metric: str, found: Incident | None, lines: Mapping[str, float]) -> Option:
    dashed = {"color": appearance.NEUTRAL, "type": "dashed", "width": 1.5}
    marks = []
    if metric == KL:
        for place, (name, value) in enumerate(lines.items()):  # at either end, so that close ones stay apart
            label = {"position": ("insideStartTop", "insideEndTop")[place % 2], "color": appearance.NEUTRAL}
            marks.append({"yAxis": value, "lineStyle": dashed, "label": label | {"formatter": f"{name} {value:g}"}})
    if found is not None:
        marks.append({"xAxis": found.step, "lineStyle": dashed, "label": {"show": False}})
    moved = next((move for move in found.moves if move.signal.metric == metric), None) if found else None
    if moved is not None and moved.step is not None:
        told = {"formatter": f"step {moved.step}", "color": MOVED, "position": "end"}
        marks.append({"xAxis": moved.step, "lineStyle": {"color": MOVED, "width": 2}, "label": told})
    option: Option = {"markLine": {"silent": True, "symbol": "none", "data": marks}}
    if moved is not None:
        area = [{"yAxis": moved.low}, {"yAxis": moved.high}]
        option["markArea"] = {"silent": True, "itemStyle": {"color": echarts.FILL}, "data": [area]}
    return option

"""The evidence of the answer: the picture of its three numbers, and what the confirmation on fresh seeds read."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import streamlit as st

from dashboard import echarts, style
from dashboard.data import Snapshot
from dashboard.echarts import Option
from dashboard.views import common
from ppo_core.output import KL_UNIT, decimals, nats, pluralize, plus_minus
from tuner.confirm.answer import Answer
from tuner.confirm.intervals import Interval, places_of
from tuner.confirm.plan import label_of
from tuner.confirm.result import Confirmation, Confirmed, runs_text
from tuner.judge.diagnose import course_of
from tuner.judge.hacking import length_ratio
from tuner.judge.paired import ERRORS, reward_difference
from tuner.judge.results import value_kl
from tuner.store import Store, TrialRow
from tuner.study.rules import SIGNS
from tuner.study.status import Origin

ROW_HEIGHT, AXIS_HEIGHT = 34, 94
"""Heights in pixels: of a configuration in the picture, and of its axis."""


class Measurement(NamedTuple):
    """A configuration's mean of one quantity and its interval; of lengths, none but the readings of its runs."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    dots: tuple[float, ...] = ()


class Row(NamedTuple):
    """One configuration of the picture: its reward over the reference's, its KL, and its length ratio."""

    number: int
    label: str
    measurements: tuple[Measurement, Measurement, Measurement]


def draw_picture(store: Store, snapshot: Snapshot, answer: Answer) -> None:
    """Draw the answer's three numbers and those of what it is compared with."""
    rows = rows_of(store, snapshot, answer)
    chart = picture(rows, common.looks(snapshot, [row.number for row in rows]), snapshot.view.spec.kl_budget)
    st.echarts_chart(
        chart, key="three numbers", height=AXIS_HEIGHT + ROW_HEIGHT * len(rows),
        alt="Reward over the reference, KL with its budget, and response length over its start, by configuration",
    )  # fmt: skip


def rows_of(store: Store, snapshot: Snapshot, answer: Answer) -> list[Row]:
    """Return the confirmed configurations, the answer first; without them the answer and the reference, of one seed."""
    view, done = snapshot.view, answer.confirmation if answer.confirmed is not None else None
    if done is not None:
        ordered = sorted(done.read, key=lambda one: one.trial.number != answer.number)
        return [_confirmed(store, snapshot, one) for one in ordered]
    reference = next((row for row in view.trials if row.origin is Origin.REFERENCE), None)
    pair = [answer.trial, *([reference] if reference is not None and reference.number != answer.number else [])]
    return [_searched(store, snapshot, row, reference) for row in pair]


def _confirmed(store: Store, snapshot: Snapshot, one: Confirmed) -> Row:
    gain, kl = one.over_reference, one.kl
    return Row(
        one.trial.number,
        one.label,
        (
            Measurement(0.0 if one.is_reference else None)
            if gain is None
            else Measurement(gain.mean, gain.low, gain.high),
            Measurement() if kl is None else Measurement(kl.mean, kl.low, kl.high, tuple(one.kls.values())),
            Measurement(dots=_lengths(store, snapshot, one.trial, on_fresh_seeds=True)),
        ),
    )


def _searched(store: Store, snapshot: Snapshot, row: TrialRow, reference: TrialRow | None) -> Row:
    """Return a trial's numbers in the search, with two standard errors."""
    gain, kl = (
        None if reference is None or row is reference else reward_difference(store, reference, row),
        value_kl(store, row),
    )
    return Row(
        row.number,
        label_of(row),
        (
            Measurement() if gain is None else _with_error(gain.mean, gain.se),
            Measurement() if kl is None or not row.value_step else _with_error(kl.mean, kl.se),
            Measurement(dots=_lengths(store, snapshot, row, on_fresh_seeds=False)),
        ),
    )


def _with_error(mean: float, se: float | None) -> Measurement:
    return Measurement(mean, *(() if se is None else (mean - ERRORS * se, mean + ERRORS * se)))


def _lengths(store: Store, snapshot: Snapshot, trial: TrialRow, *, on_fresh_seeds: bool) -> tuple[float, ...]:
    """Return the length ratio of each run."""
    course = course_of(store, trial, snapshot.view)
    ratios = map(length_ratio, course.fresh if on_fresh_seeds else [course.steps])
    return tuple(ratio for ratio in ratios if ratio is not None)


def picture(rows: Sequence[Row], looks: Mapping[int, style.Look], kl_budget: float) -> Option:
    """Chart the rows in three panels side by side: means with intervals, dots of seeds, and limits."""
    longer, seeds = SIGNS["longer"].limit, max(len(row.measurements[1].dots) for row in rows)
    panels = {
        f"Reward − reference\n{pluralize(seeds, 'fresh seed') if seeds else 'one seed'}": (0.0, ""),
        "KL\nand its budget": (kl_budget, f"{kl_budget:g}"),
        "Length ×\nand its limit": (longer, f"{longer:g}"),
    }
    labels = [row.label for row in reversed(rows)]  # the axis rises
    chart: Option = {
        "animation": False,
        "tooltip": {"confine": True},
        "grid": [],
        "xAxis": [],
        "yAxis": [],
        "series": [],
    }
    for place, (title, (limit, text)) in enumerate(panels.items()):
        chart["grid"].append({"left": f"{17 + 28 * place}%", "width": "24%", "top": 20, "bottom": 58})
        chart["xAxis"].append(
            {"type": "value", "gridIndex": place, "name": title, "nameLocation": "middle", "nameGap": 30,
             "nameTextStyle": {"lineHeight": 15}, "scale": True,
             "splitLine": {"show": False}, "splitNumber": 2,
             "axisLabel": {"showMinLabel": False, "showMaxLabel": False, "hideOverlap": True},
             **_ends(rows, place, limit)}
        )  # fmt: skip
        names = {"axisLabel": {"show": place == 0}, "axisTick": {"show": False}, "axisLine": {"show": False}}
        chart["yAxis"].append({"type": "category", "data": labels, "gridIndex": place, **names})
        at: Option = {"xAxisIndex": place, "yAxisIndex": place}
        for row in rows:
            chart["series"] += [series | at for series in _series(row, place, title, looks[row.number].colour)]
        chart["series"].append(echarts.limits_alone([echarts.limit(limit, text, is_upright=True)]) | at)
    return chart


def _ends(rows: Sequence[Row], place: int, limit: float) -> Option:
    """Return the ends of a panel's axis: all that is drawn, and its limit, with some room."""
    numbers = [number for row in rows for number in _numbers(row.measurements[place])] + [limit]
    low, high = min(numbers), max(numbers)
    room = 0.12 * (high - low) or 1.0
    step = 10.0 ** -decimals([high - low])
    return {"min": round((low - room) // step * step, 6), "max": round(((high + room) // step + 1) * step, 6)}


def _numbers(measurement: Measurement) -> list[float]:
    ends = (measurement.mean, measurement.low, measurement.high)
    return [*measurement.dots, *(end for end in ends if end is not None)]


def _series(row: Row, place: int, title: str, colour: str) -> list[Option]:
    """Return a configuration's interval, its dots and its mean in one panel."""
    one, name = row.measurements[place], f"{row.label}: {title.splitlines()[0]}"
    places = decimals(_numbers(one))
    if one.mean is not None and one.low is not None and one.high is not None:
        name += f" {Interval(one.mean, one.low, one.high, 0).with_places(places)}"
    look: Option = {"name": name, "itemStyle": {"color": colour}, "tooltip": {"valueFormatter": f"%.{places}f"}}
    series: list[Option] = []
    if one.low is not None and one.high is not None:
        ends = [[one.low, row.label], [one.high, row.label]]
        line = {"type": "line", "lineStyle": {"color": colour, "width": 2}, "symbol": "none", "silent": True}
        series.append({**look, **line, "data": ends})
    dots = {"type": "scatter", "symbolSize": 6, "data": [[dot, row.label] for dot in one.dots]}
    series.append({**look, **dots, "itemStyle": {"color": colour, "opacity": 0.6}})
    if one.mean is not None:
        series.append(
            {**look, "type": "scatter", "symbol": "diamond", "symbolSize": 13, "data": [[one.mean, row.label]]}
        )
    return series


def draw(snapshot: Snapshot) -> None:
    """Draw what was read on fresh seeds, if anything."""
    if snapshot.confirmations:
        confirmation = _choose(snapshot.confirmations)
        common.heading("On fresh seeds", _help(snapshot, confirmation))
        common.table(table(confirmation), key="confirmed")


def _choose(every: Sequence[Confirmation]) -> Confirmation:
    """Return the confirmation of the length in the link, else the longest."""
    by_length = {f"{confirmation.total_episodes:,}": confirmation for confirmation in every}
    if len(every) == 1:
        return every[0]
    lengths = list(by_length)
    length = st.segmented_control(
        "Episodes per run", lengths, default=lengths[-1], required=True, key="length", bind="query-params"
    )
    return by_length[length]


def _help(snapshot: Snapshot, confirmation: Confirmation) -> str:
    sft = confirmation.sft
    said = "" if sft is None else f" The SFT policy scores {plus_minus(sft.reward, sft.reward_se)} there."
    return (
        f"Each configuration ran {confirmation.total_episodes:,} episodes on the same fresh seeds. A run's checkpoint "
        f"was chosen on the eval prompts, within {nats(snapshot.view.spec.kl_budget)}, and evaluated once on "
        f"{pluralize(confirmation.prompts, 'test prompt')}. Intervals are 95% t-intervals over the seeds, with "
        f"a pooled standard deviation. Those of differences are adjusted for comparing several configurations "
        f"and for repeated looks; the winner's own interval is not adjusted for having been selected.{said}"
    )


def table(confirmation: Confirmation) -> pd.DataFrame:
    """Return one row per configuration."""

    read = confirmation.configurations
    searched = decimals([one.trial.value for one in read], [one.trial.value_se for one in read])
    columns = ("reward", "kl", "over_reference", "under_best")
    places = {name: places_of(getattr(one, name) for one in read) for name in columns}

    def text(config: Confirmed, name: str, *, signed: bool = False) -> str:
        interval: Interval | None = getattr(config, name)
        return "–" if interval is None else interval.with_places(places[name], signed=signed)

    return pd.DataFrame(
        {
            "configuration": config.label,
            "seeds": 0 if config.reward is None else config.reward.n,
            "reward [95%]": text(config, "reward"),
            f"KL [95%], {KL_UNIT}": text(config, "kl"),
            "reward over the reference": text(config, "over_reference", signed=True),
            "best over this one": text(config, "under_best", signed=True),
            "complete in budget": "–"
            if config.reward is None or len(config.lost) == len(config.rewards)
            else f"{config.ends_within} of {config.reward.n}",
            "value in the search": plus_minus(config.trial.value, config.trial.value_se, searched),
            "note": runs_text(config),
        }
        for config in read
    )

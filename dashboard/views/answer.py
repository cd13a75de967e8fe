"""Answer: what to do and how sure that is, the trials that compete for it, and what they cost."""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pandas as pd
import streamlit as st

from dashboard import analysis, data, diagnosis, echarts, safe_text, style
from dashboard.curve_points import Drawing
from dashboard.data import Snapshot
from dashboard.echarts import DataSeries, Option
from dashboard.health import Card
from dashboard.views import common, confirm, curve_charts, running, settings, trials_table
from dashboard.views.curve_charts import DEFAULT_METRICS, ChartData
from ppo_core.errors import ConfigError
from ppo_core.metrics import METRICS
from ppo_core.output import decimals, fixed, measured, nats, plus_minus
from tuner.confirm.answer import Answer, Badge, study_answer
from tuner.confirm.plan import Plan, cost_line, missing
from tuner.judge.best import best_trial
from tuner.judge.results import StudyView, spent
from tuner.judge.scoring import with_running
from tuner.store import Store

CHARTS = DEFAULT_METRICS[:2]
"""KL and eval reward."""


@common.study_page(with_answer=False)
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    is_large = len(snapshot.view.trials) > trials_table.MOST_LIVE
    first = study_answer(store, snapshot.view) if snapshot.view.trials else None
    common.live(snapshot, partial(_live, chosen=chosen, drawn=snapshot, first=first, is_large=is_large))
    if is_large:
        trials_table.draw(snapshot, chosen, first)
    if first is not None:
        confirm.draw(snapshot)
        common.heading(f"Settings of trial {first.number}")
        settings.draw(snapshot.view, first.trial)
    if snapshot.view.trials:
        _cost(snapshot)
        _report(store, snapshot.view.row.name)


def _live(
    store: Store, snapshot: Snapshot, chosen: common.Numbers, drawn: Snapshot, first: Answer | None, is_large: bool
) -> None:
    """Draw the live part; `drawn` is what the rest of the page is of, and `first` its answer.

    The table of trials is in it unless `is_large`.
    """
    view = snapshot.view
    common.draw_status(view)
    if not view.trials:
        text = "The study is recorded, and its first trial has not started: loading a task takes seconds."
        common.not_started(snapshot, text)
        return
    answer = first if snapshot is drawn else study_answer(store, view)
    cards = running.read_cards(store, snapshot)
    left, right = st.columns([4, 5], gap="medium")
    with left, st.container(border=True, key="answer"):
        if answer is None:
            st.info(_no_answer(store, view))
        else:
            draw_card(snapshot, answer)
    if answer is not None:
        with right:
            confirm.draw_picture(store, snapshot, answer)
    with st.container():  # so that what is below is not built anew as a problem comes or goes
        _problems(snapshot, answer, cards)
    _curves(store, snapshot, chosen)
    running.draw(snapshot, cards)
    if not is_large:
        trials_table.draw(snapshot, chosen, answer)
    elif (more := view.ended - drawn.view.ended) > 0 and st.button(
        f"{more} more trials ended: refresh the table", icon=":material/refresh:"
    ):
        st.rerun()


def draw_card(snapshot: Snapshot, answer: Answer) -> None:
    """Draw the decision, what could change it, and the command to run now."""
    words, cost = command_of(snapshot, answer), ""
    if words[:1] == ("confirm",):
        with suppress(ConfigError):
            wanted = missing(snapshot.view.trials, snapshot.view.spec, Plan())
            cost = f" {cost_line(wanted, snapshot.view.trials, snapshot.view.row.workers or 1)}."
    common.heading(safe_text.in_markdown(answer.decision), f"{answer.evidence} {answer.badge.meaning}{cost}")
    for text in filter(None, (answer.gained, answer.doubt)):
        st.text(text)
    if words:
        common.show_commands(data.command(words))


def command_of(snapshot: Snapshot, answer: Answer) -> tuple[str, ...]:
    """Return the command to run now: what settles the doubt on one seed, else the launch; none during the search."""
    if answer.badge is Badge.ONE_SEED and (answer.remedy or snapshot.view.state != "finished"):
        return answer.remedy
    return answer.launch


def _problems(snapshot: Snapshot, answer: Answer | None, cards: Sequence[Card]) -> None:
    """Draw what needs a person, each with its command."""
    boxes = {"error": st.error, "warning": st.warning, "info": st.info}
    for advice in diagnosis.problems(snapshot, answer, cards):
        boxes[advice.level](advice.text)
        if advice.command:
            common.show_commands(data.command(advice.command))


def _no_answer(store: Store, view: StudyView) -> str:
    """Return why there is no answer yet, and what leads so far."""
    leader = best_trial(with_running(store, view.trials, view.spec), view.spec.kl_budget)
    if leader is None:
        return f"No trial has an evaluation within {nats(view.spec.kl_budget)} yet, except the SFT policy's."
    value, kl = plus_minus(leader.value, leader.value_se), measured(leader.kl)
    return f"Nothing yet: trial {leader.number} leads, at {value} and a KL of {kl}."


def _curves(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    curve_charts.apply_pending_zoom()
    curve_charts.whole_run_button()
    curves = ChartData.read(store, snapshot, chosen, drawing=Drawing("episodes", window=curve_charts.window()))
    if curves.frame.empty:
        st.info("No trial has reported a step yet.")
    else:
        curve_charts.draw(curves, CHARTS, height=260)


def _cost(snapshot: Snapshot) -> None:
    """Draw the best value over device time, and device time by outcome; reads the evaluations only when opened."""
    part = st.expander("Cost: best value over device time, and what the time went into", key="cost", on_change="rerun")
    if part.open:
        with part:
            common.live(snapshot, _draw_cost)


def _draw_cost(store: Store, snapshot: Snapshot) -> None:
    left, right = st.columns(2)
    with left:
        st.markdown("**Best value so far, over the device time of the search**")
        _best_so_far(store, snapshot)
    with right:
        st.markdown("**Where the device time went**")
        costs, confirming = spent(store, snapshot.view), snapshot.view.confirming
        uses = dict(costs.by)
        if confirming:
            uses["confirming runs"] = len(confirming), sum(run.seconds for run in confirming)
        total, number = sum(seconds for _, seconds in uses.values()) or 1.0, st.column_config.NumberColumn
        common.table(
            pd.DataFrame(
                [(use, trials, seconds, 100 * seconds / total) for use, (trials, seconds) in uses.items()],
                columns=["on", "trials", "seconds", "share"],
            ),
            "spent",
            {
                "on": st.column_config.TextColumn("Spent on", width=165),
                "trials": number("Trials", format="%d", width=55),
                "seconds": number("Device s", format="%.0f", width=75, help="Device time used."),
                "share": st.column_config.ProgressColumn(
                    "Share", format="%.0f%%", max_value=100, width=95, color="gray", help="Of all device-seconds."
                ),
            },
        )


def _best_so_far(store: Store, snapshot: Snapshot) -> None:
    view = snapshot.view
    steps = data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True)
    if steps.empty:
        return
    best = analysis.best_so_far(view.trials, steps, view.spec)
    seconds = sum(row.seconds for row in view.trials if row.counts_toward_total)
    alt = "The best value within the KL budget over the device time of the search"
    chart = progress(best, math.ceil(seconds), data.sft_reward(steps))
    st.echarts_chart(chart, key="best so far", height=260, alt=alt)


def progress(rises: pd.DataFrame, spent: float, sft_reward: float | None) -> Option:
    """Chart the best value so far (see `analysis.best_so_far`) over the device-seconds `spent` by all trials, with the
    SFT policy's eval reward where that is known.
    """
    end, colour = max(spent, 1.0), style.colour(0)
    data_series: list[DataSeries] = []
    if len(rises):
        line = rises[["seconds", "value"]].to_numpy().tolist()
        line = [*([] if sft_reward is None else [[0.0, sft_reward]]), *line, [end, line[-1][1]]]
        source, series = echarts.line(pd.DataFrame(line, columns=["x", "y"]), "Best so far", colour)
        data_series.append((source, series | {"step": "end"}))  # a step function
    data_series += [
        echarts.point(f"Trial {trial:.0f} at step {step:.0f}", (x, y), y, colour)
        for x, y, trial, step in rises[["seconds", "value", "trial", "step"]].itertuples(index=False)
    ]
    places = decimals(rises["value"]) if sft_reward is None else decimals([*rises["value"], sft_reward])
    text = f"SFT policy {fixed(sft_reward, places)}"
    limits = [] if sft_reward is None else [echarts.limit(sft_reward, text, at_end=True)]
    across = echarts.axis("Device-seconds of the search", (0.0, end), pointer="Device-seconds {value}")
    vertical = {"name": METRICS["eval/reward"].unit}
    return echarts.one_panel(across, vertical, data_series, [echarts.limits_alone(limits)], numbers=f"%.{places}f")


def _report(store: Store, name: str) -> None:
    """Draw a button that downloads the study's report."""

    def report() -> str:
        from dashboard import report  # imported on demand: its libraries take a second

        return report.report(store, name)

    st.download_button(
        "Download the report",
        report,
        file_name=f"{safe_text.file_name(name)}-report.html",
        mime="text/html",
        icon=":material/description:",
        on_click="ignore",
        help="What to launch, how sure that is and why, with charts and samples, to mail or attach: the file of "
        "`ppo-tuner report`. It needs no network.",
    )

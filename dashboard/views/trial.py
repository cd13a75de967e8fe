"""One trial: its numbers, curves, PPO health, what moved first, changes to try, settings, samples, lineage and log."""

from functools import partial
from pathlib import Path

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import safe_text, style
from dashboard.curve_points import Drawing
from dashboard.data import Snapshot
from dashboard.views import changes, common, compare, curve_charts, incident, ppo_health, running, samples, settings
from dashboard.views.curve_charts import ChartData
from ppo_core.metrics import METRICS
from ppo_core.output import duration
from tuner.files import trial_log
from tuner.store import Store, TrialRow
from tuner.study.rules import blame_of

CHARTS = ("objective/kl_exact", "eval/reward")
LOG_LINES = 40


@common.study_page("A trial appears here as soon as it starts.")
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    head, title = st.container(), st.container(horizontal=True, vertical_alignment="center")
    with title:
        number = _choose(snapshot, chosen)
        title = st.container(horizontal=True, vertical_alignment="center")
    common.live(snapshot, partial(_live, number=number, title=title), head)
    row = _row(snapshot, number)
    changes.draw(store, snapshot, number)
    common.heading("Its settings")
    settings.draw(snapshot.view, row)
    samples.draw(store, snapshot, (number,))
    compare.lineage(snapshot, [row])
    if not blame_of(row.reason):  # else what to change has the commands
        common.heading("Train it again")
        common.show_commands(*changes.go_on(store, snapshot.view, row))


def _choose(snapshot: Snapshot, chosen: common.Numbers) -> int:
    """Return the selected trial: by default the first chosen in the sidebar, else the answer."""
    numbers = [row.number for row in snapshot.view.trials]
    first = next(number for number in (*chosen, *snapshot.defaults) if number in numbers)
    number = st.selectbox(
        "Trial", numbers, index=None, key="n", bind="query-params", width=240, label_visibility="collapsed",
        placeholder=f"Trial {first}: choose another", filter_mode="prefix",
    )  # fmt: skip
    return first if number is None else int(number)


def _row(snapshot: Snapshot, number: int) -> TrialRow:
    return next(row for row in snapshot.view.trials if row.number == number)


def _live(store: Store, snapshot: Snapshot, number: int, title: DeltaGenerator) -> None:
    """Draw what changes while the trial runs, its status into `title`."""
    row, look = _row(snapshot, number), common.looks(snapshot, [number])[number]
    title.html(style.heading(number, look, style.status_cell(row)), width="content")
    told = [f"label: {safe_text.one_line(row.label)}"] if row.label else []
    told += [safe_text.visible(row.reason.message)] if row.reason else []
    if told:
        title.text("\n".join(told))
    _key_numbers(snapshot, row)
    if draw_curves(store, snapshot, number):
        ppo_health.draw(store, snapshot, [number])
        incident.draw(store, snapshot, number)
    _log(snapshot, number)


def draw_curves(store: Store, snapshot: Snapshot, number: int) -> bool:
    """Draw a trial's KL and reward, and its pace if it keeps one; return whether it has a step."""
    curve_charts.apply_pending_zoom()
    drawing = Drawing("episodes", window=curve_charts.window())
    drawn = ChartData.read(store, snapshot, (number,), curve_charts.PACE_READ, drawing, with_others=False)
    if drawn.frame.empty:
        st.info(f"Trial {number} has not reported a step yet.")
        return False
    curve_charts.whole_run_button()
    curve_charts.draw(drawn, CHARTS, height=400)
    curve_charts.draw_pace(drawn, number)
    return True


def _key_numbers(snapshot: Snapshot, row: TrialRow) -> None:
    """Draw the trial's reward and KL, and its cost."""
    headline, total = snapshot.headline(row), int(row.config.get("total_episodes") or 0)
    about = "On fresh seeds: the mean over the runs that confirm it, on the test prompts, with its 95% interval. Else "
    progress = f"{row.episodes:,}" + (f" of {total:,}" if total else "")
    time = filter(None, [duration(row.seconds), running.time_left(row)])
    numbers = [
        ("Reward", headline.text(), headline.label, f"{about}its value ± one standard error. {common.VALUE_IS}"),
        ("Eval KL", headline.kl_text(), f"budget {snapshot.view.spec.kl_budget:g}", METRICS["eval/kl"].title),
        ("Episodes", progress, ", ".join(time), "Trained so far, with the training time over all attempts."),
    ]
    with st.grid(len(numbers), min_column_width=130):
        for label, value, note, about in numbers:
            st.metric(label, value, note, delta_color="off", delta_arrow="off", help=about)


def _log(snapshot: Snapshot, number: int) -> None:
    """Draw the end of the trial's log, if it is on this machine."""
    folder = snapshot.view.row.folder
    text = "" if folder is None else trial_log.tail(Path(folder) / str(number), LOG_LINES)
    with st.expander("Log", icon=":material/terminal:"):
        if text:
            st.code(safe_text.visible(text), language=None, height=300)
        else:
            st.text("Its log is not on this machine.")

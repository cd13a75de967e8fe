"""One trial: status, curves, what moved first, what to change, samples, lineage, log."""

from functools import partial
from pathlib import Path

import streamlit as st

from dashboard import charts, data, safe_text, style
from dashboard.charts import Drawing
from dashboard.data import Snapshot
from dashboard.views import answer, changes, common, compare, curve_charts, incident, samples
from dashboard.views.curve_charts import Drawn
from ppo_core.output import KL_UNIT, NOTHING, measured, plus_minus
from tuner.files import trial_log
from tuner.judge.scoring import ends_within
from tuner.store import Store, TrialRow

CHARTS = ("objective/kl_exact", "eval/reward")
LOG_LINES = 40


def page(choice: common.Choice) -> None:
    """Draw the page."""
    common.of_a_study(choice, _study)


def _study(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    if not snapshot.view.trials:
        common.line(store, snapshot)
        common.not_begun(snapshot, "No trials yet", "A trial appears here as soon as it starts.")
        return
    head = st.container()
    number = _choose(snapshot, chosen)
    common.live(snapshot, partial(_live, number=number), head)
    row = _row(snapshot, number)
    changes.draw(store, snapshot, number)
    st.subheader("Its settings", anchor=False)
    answer.draw_changed(snapshot.view, row)
    samples.section(store, snapshot, (number,))
    compare.lineage(snapshot, [row])
    _commands(snapshot, row)


def _choose(snapshot: Snapshot, chosen: tuple[int, ...]) -> int:
    """Return the selected trial: by default the first chosen in the sidebar, else the best."""
    rows, best = {row.number: row for row in snapshot.view.trials}, snapshot.view.best()
    first = next((number for number in chosen if number in rows), best.number if best else max(rows))
    number = st.selectbox(
        "Trial", list(rows), index=None, key="n", bind="query-params", width=240, label_visibility="collapsed",
        placeholder=f"Trial {first}: choose another",
    )  # fmt: skip
    return first if number is None else int(number)


def _row(snapshot: Snapshot, number: int) -> TrialRow:
    return next(row for row in snapshot.view.trials if row.number == number)


def _live(store: Store, snapshot: Snapshot, number: int) -> None:
    """Draw what changes while the trial runs."""
    row, best = _row(snapshot, number), snapshot.view.best()
    with st.container(horizontal=True, vertical_alignment="center"):
        st.html(style.heading(number, style.status_cell(row)), width="content")
        if best is not None and best.number == number:
            st.badge("best", color="green")
        if row.label:
            st.text(safe_text.one_line(row.label))
    if row.reason is not None:
        st.text(safe_text.visible(row.reason.message))
    common.figures(_figures(snapshot, row))
    drawn = Drawn.of(
        store, snapshot, (number,), drawing=Drawing(axis="episodes", window=curve_charts.window()), with_others=False
    )
    if drawn.frame.empty:
        st.info(f"Trial {number} has not reported a step yet.")
    else:
        curve_charts.whole_run_button(drawn.drawing.window)
        curve_charts.draw(drawn, CHARTS, height=280)
        st.caption(curve_charts.POINTS)
        st.subheader("What moved first", anchor=False)
        incident.draw(store, snapshot, number)
    _log(snapshot, number)


def _figures(snapshot: Snapshot, row: TrialRow) -> tuple[common.Figure, ...]:
    """Return the trial's results: value, end, and cost."""
    spec, total = snapshot.view.spec, int(row.config.get("total_episodes") or 0)
    at = "no checkpoint" if row.value_step is None else f"step {row.value_step}, KL {measured(row.kl)}"
    ends = {None: None, True: f"within {spec.kl_budget:g}", False: f"over {spec.kl_budget:g}"}[ends_within(row, spec)]
    return (
        ("Best in the budget", plus_minus(row.value, row.value_se), at, "Eval reward of its best checkpoint within the "
         "KL budget, ± its standard error over the eval prompts."),
        ("End reward", measured(row.end_reward), None, "Eval reward of its last evaluation, whatever its KL."),
        ("End KL", NOTHING if row.end_kl is None else f"{row.end_kl:.2f}", ends, f"In {KL_UNIT}."),
        ("Episodes", f"{row.episodes:,}", f"of {total:,}" if total else None, "Trained so far."),
        ("Time", common.duration(row.seconds), charts.screened_text(row.rung_score) if row.is_at_rung else None,
         "Training time over all attempts."),
    )  # fmt: skip


def _log(snapshot: Snapshot, number: int) -> None:
    """Draw the end of the trial's log, if it is on this machine."""
    folder = snapshot.view.row.folder
    said = "" if folder is None else trial_log.tail(Path(folder) / str(number), LOG_LINES)
    with st.expander("Log", icon=":material/terminal:"):
        if said:
            st.code(safe_text.visible(said), language=None, height=300)
        else:
            st.text("Its log is not on this machine.")


def _commands(snapshot: Snapshot, row: TrialRow) -> None:
    st.subheader("Go on with it", anchor=False, help="Train its configuration longer, or fork it at a checkpoint.")
    study = snapshot.view.row.name
    st.code(data.train_for_real(study, row), language=None, wrap_lines=True)
    if row.episodes:
        st.code(data.go_on(study, row, row.episodes), language=None, wrap_lines=True)
    st.code(data.command(["show", study, str(row.number)]), language=None, wrap_lines=True)

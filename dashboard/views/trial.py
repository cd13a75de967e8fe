"""Trial: status, curves, what moved first, what to change, samples, lineage and log of one trial."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import streamlit as st

from dashboard import data, safe_text, style
from dashboard.charts import Drawing
from dashboard.data import Snapshot
from dashboard.views import answer as settings
from dashboard.views import changes, common, compare, curve_charts, curves, incident, running, samples
from dashboard.views.common import KeyNumber
from dashboard.views.curve_charts import ChartData
from ppo_core.output import KL_UNIT, NOTHING, decimals, duration, fixed, measured, plus_minus
from tuner.confirm.result import Confirmation, Interval, confirmations, places_of, runs_text
from tuner.files import trial_log
from tuner.judge.answer import of_study
from tuner.judge.results import StudyView, as_view
from tuner.store import Store, TrialRow
from tuner.study.status import Origin

CHARTS = ("objective/kl_exact", "eval/reward")
LOG_LINES = 40


@common.study_page("A trial appears here as soon as it starts.")
def page(store: Store, snapshot: Snapshot, chosen: common.Numbers) -> None:
    """Draw the page."""
    head = st.container()
    number = _choose(snapshot, chosen)
    common.live(snapshot, partial(_live, number=number), head)
    row = _row(snapshot, number)
    changes.draw(store, snapshot, number)
    common.heading("Its settings")
    settings.draw_changed(snapshot.view, row)
    with st.expander("All settings"):
        common.table(settings.all_settings(snapshot.view, row), key="all settings")
    samples.draw(store, snapshot, (number,))
    compare.lineage(snapshot, [row])
    _commands(store, snapshot, row)


def _choose(snapshot: Snapshot, chosen: common.Numbers) -> int:
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
        look = common.looks(snapshot, [number])[number]
        st.html(style.heading(number, look, style.status_cell(row)), width="content")
        if best is not None and best.number == number:
            st.badge("best in the search", color="green")
        if row.label:
            st.text(f"label: {safe_text.one_line(row.label)}")
    if row.reason is not None:
        st.text(safe_text.visible(row.reason.message))
    found = confirmations(store, as_view(snapshot.view.row, (*snapshot.view.trials, *snapshot.view.confirming)))
    common.key_numbers([*_on_fresh_seeds(found, number), *_key_numbers(snapshot, row)])
    reference = next((each for each in snapshot.view.trials if each.origin is Origin.REFERENCE), row)
    lines = [] if reference is row else [compare.against(store, reference, row)]
    for line in filter(None, [*lines, *confirmed(found, snapshot.view, number)]):
        st.text(line)
    answer = of_study(store, snapshot.view)
    if answer is not None and answer.number == number:
        st.badge(f"to launch, {answer.badge}", color="green", help=answer.badge.meaning)
    elif answer is not None:
        common.trial_link(answer.number, f"To launch: {answer.name} ({answer.badge})")
    curve_charts.apply_pending_zoom()
    drawing = Drawing("episodes", window=curve_charts.window())
    drawn = ChartData.read(store, snapshot, (number,), curve_charts.PACE_READ, drawing, with_others=False)
    if drawn.frame.empty:
        st.info(f"Trial {number} has not reported a step yet.")
    else:
        curve_charts.whole_run_button()
        curve_charts.draw(drawn, CHARTS, height=280)
        st.caption(curve_charts.POINTS)
        curve_charts.draw_pace(drawn, number, height=200)
        curves.draw_health(curves.courses_of(store, snapshot, [number]))
        common.page_link("curves", "PPO health of other trials", view=curves.VIEWS[1])
        common.heading("What moved first")
        incident.draw(store, snapshot, number)
    _log(snapshot, number)


def _key_numbers(snapshot: Snapshot, row: TrialRow) -> list[KeyNumber]:
    """Return the trial's results: value, end, and cost."""
    spec, total = snapshot.view.spec, int(row.config.get("total_episodes") or 0)
    checkpoint = "no trained checkpoint" if not row.value_step else f"step {row.value_step}, eval KL {measured(row.kl)}"
    is_within = compare.ended_within(row, spec)
    places = decimals([row.value, row.end_reward], [row.value_se])
    end = None if is_within is None else f"{'within' if is_within else 'over'} {spec.kl_budget:g}"
    share = f", {row.episodes / total:.0%}" if total and row.episodes < total else ""
    return [
        KeyNumber(
            "Best in budget, one seed",
            plus_minus(row.value, row.value_se) if row.value_step else NOTHING,
            checkpoint,
            f"{common.VALUE_IS} ± is one standard error over the eval prompts.",
        ),
        KeyNumber(
            "Eval reward at its end", fixed(row.end_reward, places), None, "Of its last evaluation, whatever its KL."
        ),
        KeyNumber("Eval KL at its end", measured(row.end_kl), end, f"In {KL_UNIT}."),
        KeyNumber("Episodes", f"{row.episodes:,}", f"of {total:,}{share}" if total else None, "Trained so far."),
        KeyNumber("Time", duration(row.seconds), running.time_left(row) or None, "Training time over all attempts."),
    ]


def _on_fresh_seeds(found: Sequence[Confirmation], number: int) -> list[KeyNumber]:
    """Return the mean reward of the latest confirming runs, if any."""
    read = [one.reward for each in found for one in each.configurations if one.trial.number == number and one.reward]
    return [
        KeyNumber(
            "Reward on fresh seeds",
            fixed(reward.mean, places_of([reward])),
            reward.span,
            "Mean over the runs that confirm it, on the test prompts. The search's number beside it is the highest of "
            "many, so part of it is luck.",
        )
        for reward in read[-1:]
    ]


def confirmed(found: Sequence[Confirmation], view: StudyView, number: int) -> list[str]:
    """Return what a trial's configuration reached on fresh seeds under the study's own KL budget, a line per length."""
    lines = []
    for each in found:
        for one in each.configurations:
            if one.trial.number == number:
                runs = [run for run in view.confirming if run.parent == number]
                numbers = [str(run.number) for run in runs if run.config["total_episodes"] == one.length]
                reached = runs_text(one) if one.reward is None else f"reward {one.reward.text} on the test prompts"
                kl = "" if one.kl is None else f", KL {one.kl.text}"
                where = f"trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}, {one.length:,} episodes each"
                lines.append(f"On fresh seeds: {reached}{kl}{_rank(one.over_reference)}; {where}.")
    return lines


def _rank(lead: Interval | None) -> str:
    """Say whether a configuration is better than the reference on fresh seeds; empty if that is not known."""
    if lead is None or lead.low is None or lead.high is None:
        return ""
    how = "better than" if lead.low > 0 else "behind" if lead.high < 0 else "tied with"
    return f", {how} the reference (difference {lead.signed})"


def _log(snapshot: Snapshot, number: int) -> None:
    """Draw the end of the trial's log, if it is on this machine."""
    folder = snapshot.view.row.folder
    text = "" if folder is None else trial_log.tail(Path(folder) / str(number), LOG_LINES)
    with st.expander("Log", icon=":material/terminal:"):
        if text:
            st.code(safe_text.visible(text), language=None, height=300)
        else:
            st.text("Its log is not on this machine.")


def _commands(store: Store, snapshot: Snapshot, row: TrialRow) -> None:
    common.heading(
        "Go on with it",
        "If the guard ended it, the first untried change takes the place of training it again.",
    )
    show = {"Show it in a terminal": data.command(["show", snapshot.view.row.name, str(row.number)])}
    common.show_captioned(changes.go_on(store, snapshot.view, row) | show)
    compare.draw_known(snapshot.view, [row])

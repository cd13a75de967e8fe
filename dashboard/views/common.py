"""Parts that pages share: the sidebar's study, the status line, empty states, figures and tables."""

import math
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import analysis, data, diagnosis, safe_text, style
from dashboard.data import Shown, Snapshot
from dashboard.views import sidebar
from ppo_core.errors import PPOTunerError, StoreError
from ppo_core.output import counted
from tuner.judge.best import VALUE
from tuner.judge.hacking import Finding
from tuner.judge.results import StudyView, kl_prunings
from tuner.store import Store
from tuner.study.status import Role, Status
from tuner.study.study_file import STRATEGIES

REFRESH_SECONDS = 2
"""Refresh interval while a controller is alive."""
Draw = Callable[[Store, Snapshot, tuple[int, ...]], None]
"""Draws a page of a study, with the trials that are chosen in the sidebar."""


@dataclass(frozen=True)
class Choice:
    """The choices in the sidebar."""

    store: Store
    snapshot: Snapshot
    """The study, under its own KL budget."""
    trials: tuple[int, ...]
    """The chosen trials' numbers; empty: none."""
    budget: float
    """The KL budget, in nats per response."""


@contextmanager
def problems_shown() -> Iterator[None]:
    """Show a user's problem (no store, a foreign one, a study that is gone) in place of the rest of the page."""
    try:
        yield
    except PPOTunerError as problem:
        _show(problem)
        st.stop()  # stops the rest of the page, too


def open_store() -> Store:
    """Return the store of PPO_TUNER_STORAGE or the default one; raises StoreError."""
    return data.open_store(data.storage())


def choose() -> Choice:
    """Draw the sidebar and return the choice; without a study, explain why and stop."""
    with problems_shown():
        store = open_store()
        name = sidebar.choose_study(store)
        if name is None:
            text = f"The store is empty. A study appears here as soon as its first trial starts. {OWN_STUDY}"
            guide("No studies yet", text, [data.command(["demo"]), *new_study()])
            st.stop()
        snapshot = data.snapshot(store, name)
        return Choice(store, snapshot, sidebar.choose_trials(snapshot), sidebar.choose_budget(snapshot))


def of_a_study(choice: Choice, draw: Draw, *, under_own_budget: bool = False) -> None:
    """Draw a page for the chosen study; a user's problem is shown in its place.

    Args:
        choice: What is chosen in the sidebar.
        draw: Draws the page of a study and the trials chosen in it.
        under_own_budget: Whether it is about the study under its own KL budget, whatever the sidebar has.
    """
    with problems_shown():
        shown = choice.snapshot if under_own_budget else data.under_budget(choice.store, choice.snapshot, choice.budget)
        sidebar.describe(shown, choice.trials)
        draw(choice.store, shown, choice.trials)


def again(store: Store, drawn: Snapshot) -> Snapshot:
    """Return the study of `drawn` as it stands now, under the same KL budget."""
    return data.under_budget(store, data.snapshot(store, drawn.view.row.name), drawn.view.spec.kl_budget)


def highlighted(snapshot: Snapshot, chosen: tuple[int, ...], most: int = style.AT_A_GLANCE) -> tuple[int, ...]:
    """Return the trials in colour: the chosen ones, else all if they are few, else the default ones, the running ones,
    and the best completed ones.
    """
    if chosen:
        return chosen[:most]
    rows = snapshot.view.trials
    if len(rows) <= style.AT_A_GLANCE:
        return tuple(row.number for row in rows)
    running = [row.number for row in rows if row.status is Status.RUNNING]
    ended = sorted((row for row in rows if row.status is Status.COMPLETED), key=lambda row: -(row.value or -math.inf))
    best = [row.number for row in ended]
    return tuple(dict.fromkeys([*snapshot.default_trials, *running, *best]))[: style.AT_A_GLANCE]


def refresh_every(view: StudyView) -> int | None:
    """Return the refresh interval in seconds; None if no controller runs the study."""
    return REFRESH_SECONDS if view.row.is_held else None


_WHOLE_PAGE = "whole page"


def ask_for_the_whole_page() -> None:
    """Request a rerun of the whole page, after a choice inside a fragment that affects the rest."""
    st.session_state[_WHOLE_PAGE] = True


def draw_the_whole_page_if_asked() -> None:
    """Rerun the whole page if requested; called at the start of each fragment."""
    if st.session_state.pop(_WHOLE_PAGE, False):
        st.rerun()


def live(snapshot: Snapshot, draw: Callable[[Store, Snapshot], None], head: DeltaGenerator | None = None) -> None:
    """Draw live content: now from `snapshot`, then from fresh data at each refresh.

    The status line is drawn into `head`, if given.
    """
    st.fragment(_look, run_every=refresh_every(snapshot.view))(snapshot, [snapshot], draw, head)


def _look(
    drawn: Snapshot, fresh: list[Snapshot], draw: Callable[[Store, Snapshot], None], head: DeltaGenerator | None
) -> None:
    """Draw once; `drawn` is the rest of the page's snapshot, `fresh` a newly read one, if any."""
    with problems_shown():
        draw_the_whole_page_if_asked()
        store = open_store()
        snapshot = fresh.pop() if fresh else again(store, drawn)
        if snapshot.view.state != drawn.view.state:
            st.rerun()  # rerun the whole page, to start or stop its timer
        if head is not None:
            with head:
                status(snapshot.view)
        draw(store, snapshot)


# The status line at the top of every page.

_BADGES: dict[Shown, tuple[str, str, Literal["green", "blue", "orange", "red"]]] = {
    "running": ("running", ":material/play_arrow:", "green"),
    "stopping": ("stopping", ":material/stop:", "orange"),
    "paused": ("paused", ":material/pause:", "orange"),
    "finished": ("finished", ":material/check:", "blue"),
    "unfinished": ("not running", ":material/stop_circle:", "orange"),
    "stalled": ("not responding", ":material/hourglass_disabled:", "red"),
}


def status(view: StudyView, at: float | None = None) -> None:
    """Draw the status line; `at` is when the page was read, in seconds since the epoch (None: now)."""
    state = data.shown_state(view)
    label, icon, color = _BADGES[state]
    st.set_page_config(page_title=tab_title(view))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge(label, icon=icon, color=color)
        st.text(status_text(view, time.time() if at is None else at), help=_about(view))
    if state in ("running", "stopping") and not view.confirming:
        said = time_left(view) if state == "running" else "Ends once each running trial has finished its step"
        st.progress(min(1.0, view.extent.done), text=said)


_TAB = {"running": "▶", "stopping": "■", "paused": "‖", "finished": "✓", "unfinished": "…", "stalled": "?"}


def tab_title(view: StudyView) -> str:
    """Return the browser tab's title: state, name, and number of trials that the guard stopped."""
    pruned = sum(len(numbers) for numbers in kl_prunings(view.trials).values())
    guard = f" ✕{pruned}" if pruned else ""
    return f"{_TAB[data.shown_state(view)]}{guard} {safe_text.one_line(view.row.name)} - PPO Tuner"


def time_left(view: StudyView) -> str:
    """Estimate the search's remaining time from the device-seconds spent so far."""
    done = view.extent.done
    if not 0.02 < done < 1:
        return "Time left: not known yet" if done < 1 else "About to end"
    seconds = sum(row.seconds for row in view.trials if row.role is Role.SEARCH)
    return f"About {duration(seconds * (1 - done) / done / (view.row.workers or 1))} left"


def status_text(view: StudyView, at: float) -> str:
    """Return the study's name, progress and time of reading."""
    silence = data.silence(view)
    silent = f", no sign of life for {duration(silence or 0.0)}" if data.shown_state(view) == "stalled" else ""
    return f"{safe_text.one_line(view.row.name)}: {view.extent.text}{silent}. Updated {_clock(at)}"


def _about(view: StudyView) -> str:
    """Return the status line's help text."""
    spec, row = view.spec, view.row
    where = f"Its controller is process {row.lease_pid} on {row.lease_host or 'an unknown host'}"
    several = "" if row.workers is None else f", {counted(row.workers, 'trial')} at a time"
    runs = f"{where}{several}. " if row.is_held else "No controller is running, so nothing changes. "
    return safe_text.in_markdown(
        f"Task {spec.task}. Strategy {spec.strategy}: {STRATEGIES[spec.strategy]}. A "
        f"trial's value is {VALUE}. Started {ago(row.created_at)}, last activity "
        f"{ago(data.last_sign(view))}. {runs}"
        + (f"Live pages refresh every {REFRESH_SECONDS} s." if row.is_held else "")
    )


def trial_link(number: int, label: str) -> None:
    """Draw a link to a trial's page."""
    st.page_link(
        st.Page(_trial, url_path="trial"), label=label, icon=":material/search:", query_params={"n": f"{number}"}
    )


def _trial() -> None:
    """Placeholder: `st.page_link` needs a page with this address."""


def guide(title: str, text: str, commands: list[str], problem: str = "") -> None:
    """Draw an empty state with the commands to run next. Only `problem` may hold text from outside."""
    with st.container(border=True):
        st.subheader(title, anchor=False)
        if problem:
            st.text(safe_text.visible(problem))
        st.write(text)
        show_commands(commands)
        st.button("Refresh", icon=":material/refresh:", key=f"again {title}")


def show_commands(commands: Sequence[str]) -> None:
    """Draw commands, each with a button that copies it."""
    for command in commands:
        st.code(command, language=None, wrap_lines=True)


OWN_STUDY = (
    "For a study of your own, copy the built-in one's file, which explains every key; give the study another name, "
    "change what you like, see what it takes, and run it."
)
"""Lead-in to the commands of `new_study`."""


def new_study() -> list[str]:
    """Return the commands that copy the built-in study's file and run the copy."""
    built_in = str(resources.files("studies") / "reviews.toml")
    copy = safe_text.one_line(shlex.join(["cp", built_in, "my-study.toml"]), data.MOST_OF_A_COMMAND)
    return [copy, *(data.command([word, "my-study.toml"]) for word in ("estimate", "run"))]


def not_begun(snapshot: Snapshot, title: str, text: str) -> None:
    """Draw the empty state of a new study; `text` says what will appear."""
    lead = f"{text} If the study is not running, resume it:"
    guide(title, lead, [data.command(["run", snapshot.view.row.name])])


def ago(seconds_since_epoch: float) -> str:
    """Return how long ago a time was."""
    return f"{duration(max(0.0, time.time() - seconds_since_epoch))} ago"


def duration(seconds: float) -> str:
    """Return a time span in its largest fitting unit."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def device_time(hours: float) -> str:
    """Return a number of device-hours in seconds, minutes or hours, with digits as it needs them."""
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{60 * hours:.0f} min" if 60 * hours >= 2 else f"{3_600 * hours:.0f} s"


def _show(problem: PPOTunerError) -> None:
    demo, default = "ppo-tuner demo", "ppo-tuner dashboard --storage sqlite:///runs/ppo-tuner.db"
    if not isinstance(problem, StoreError):
        guide(
            "This study cannot be shown",
            "Choose another study in the sidebar, or start a new one.",
            [demo],
            str(problem),
        )
    elif data.is_missing(data.storage()):
        text = "The first run of a study creates the store. The demo takes about five minutes on two cores."
        guide("No store yet", f"{text} {OWN_STUDY}", [data.command(["demo"]), *new_study()], str(problem))
    else:
        text = "Open the dashboard on a PPO Tuner store (--storage or PPO_TUNER_STORAGE), or start a new one."
        guide("This store cannot be shown", text, [default, demo], str(problem))


# The chosen trials of a page: those that have started, as many as fit.


def begun(snapshot: Snapshot, chosen: tuple[int, ...], most: int | None = None) -> tuple[int, ...]:
    """Return the chosen trials that have started, in order of choice, at most `most`, and say what was left out."""
    there = {row.number for row in snapshot.view.trials}
    missing = [str(number) for number in chosen if number not in there]
    if missing:
        st.info(f"Not started yet: trial{'s' if len(missing) > 1 else ''} {', '.join(missing)}.")
    found = tuple(number for number in chosen if number in there)
    if most is not None and len(found) > most:
        st.info(f"Shown are {most} of {len(found)} trials. Choose others in the sidebar.")
        found = found[:most]
    return found


# Figures and tables, shared by all pages.

CONFIG = {"displaylogo": False, "toImageButtonOptions": {"format": "png", "scale": 2}}


def figure(
    drawn: go.Figure, key: str, alt: str, says: str = "", on_select: Callable[[], None] | Literal["ignore"] = "ignore"
) -> None:
    """Draw a Plotly figure; its tool bar saves a PNG.

    `says` describes it, as Markdown. `on_select` is called when points are selected.
    """
    st.plotly_chart(drawn, key=key, config=CONFIG, alt=alt, on_select=on_select, selection_mode=("points", "box"))
    if says:
        st.caption(says)


Figure = tuple[str, str, str | None, str]
"""One number on a page: label, value, note below it, help."""


def figures(shown: Sequence[Figure]) -> None:
    """Draw numbers beside each other."""
    with st.grid(len(shown), min_column_width=130):
        for label, value, note, help_text in shown:
            st.metric(label, value, note, delta_color="off", delta_arrow="off", help=help_text)


MOST_ROWS = 16
"""Most rows of a table without a scroll bar."""
MARKS = {"✓": "rgba(0, 158, 115, 0.18)", "▲": "rgba(230, 159, 0, 0.35)", "✕": "rgba(213, 94, 0, 0.45)"}
"""Background of a cell by its first character: fine, worth a look, bad."""


def table(rows: pd.DataFrame, key: str, columns: Mapping[str, Any] | None = None, *, marked: bool = False) -> None:
    """Draw a table of already safe texts; its tool bar saves it as CSV.

    Columns without configuration have their name as title; `marked` cells are coloured.
    """
    titles = {name: f"{name[:1].upper()}{name[1:]}" for name in rows.columns}
    drawn = rows.style.map(lambda cell: f"background-color: {MARKS.get(str(cell)[:1], '')}") if marked else rows
    height: Literal["content", "auto"] = "content" if len(rows) <= MOST_ROWS else "auto"  # ten rows, and a scroll bar
    st.dataframe(
        drawn, key=key, hide_index=True, placeholder="", column_config=titles | dict(columns or {}), height=height
    )


def hacking_table(findings: Sequence[Finding]) -> None:
    """Draw the signs of reward hacking, one row per trial, with worsened readings marked."""
    st.text(diagnosis.hacking_said(findings))
    rows = diagnosis.hacking_rows(findings)
    columns = {"trial": st.column_config.NumberColumn("Trial", width=60, pinned=True)}
    table(rows, "hacking", columns | diagnosis.HACKING_TITLES, marked=True)
    st.caption(diagnosis.HACKING_MEANS)


# Status line of pages that do not refresh by themselves, so that a zoom stays; a button redraws them.


@dataclass(frozen=True)
class Standing:
    """State of the data that a page shows."""

    state: str
    evaluations: int
    ended: int
    """Number of ended trials."""


def line(store: Store, snapshot: Snapshot, numbers: Collection[int] | None = None) -> None:
    """Draw the status line; while the study runs, watch for new data and offer to redraw the page.

    Args:
        store: Where the study is.
        snapshot: What the page draws.
        numbers: Trials whose evaluations it draws; None: all.
    """
    drawn = standing(store, snapshot, numbers)
    look = st.fragment(_look_again, run_every=refresh_every(snapshot.view))
    look(snapshot.view.row.name, drawn, time.time(), [snapshot], numbers)


def standing(store: Store, snapshot: Snapshot, numbers: Collection[int] | None = None) -> Standing:
    """Return the state of the study and of these trials' evaluations (None: all)."""
    evaluated = data.curves(store, snapshot, analysis.EVALUATED, numbers=numbers, evaluations_only=True)
    return Standing(data.shown_state(snapshot.view), len(analysis.evaluations(evaluated)), snapshot.ended)


def news(drawn: Standing, now: Standing) -> str:
    """Describe what is new since the page was drawn; empty if nothing."""
    said = [
        f"{more} new {thing}{'s' if more > 1 else ''}{what}"
        for more, thing, what in (
            (now.evaluations - drawn.evaluations, "evaluation", ""),
            (now.ended - drawn.ended, "trial", " ended"),
        )
        if more > 0
    ]
    state = {"unfinished": "not running", "stalled": "not responding"}.get(now.state, now.state)
    return ", ".join([*said, f"the study is {state}"] if now.state != drawn.state else said)


def _look_again(
    name: str, drawn: Standing, drawn_at: float, fresh: list[Snapshot], numbers: Collection[int] | None
) -> None:
    """Check once; `fresh` holds a newly read snapshot, if any. Never redraws the page by itself."""
    with problems_shown():
        store = open_store()
        snapshot = fresh.pop() if fresh else data.snapshot(store, name)
        with st.container(horizontal=True, vertical_alignment="center"):
            status(snapshot.view, drawn_at)
            more = news(drawn, standing(store, snapshot, numbers))
            # Always there: appearing later, it would push the figures down.
            held = snapshot.view.row.is_held
            label = f"{more}: refresh" if more else "Up to date"
            if (more or held) and st.button(label, icon=":material/refresh:", key="redraw", disabled=not more):
                st.rerun()


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))

"""Parts that pages share: the chosen study, refreshing, the status line, empty states, figures and tables."""

import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, Literal, TypeVar

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import analysis, data, safe_text, style
from dashboard.data import Shown, Snapshot
from dashboard.views import sidebar
from ppo_core.errors import PPOTunerError, StoreError
from ppo_core.output import duration, pluralize
from tuner.confirm.answer import study_answer
from tuner.judge.best import VALUE
from tuner.judge.results import StudyView, kl_prunings
from tuner.store import DEFAULT_STORAGE, Store
from tuner.study.status import Role, Status

VALUE_IS = f"A trial's value is the eval reward of {VALUE}."
ANSWER, ONE_TRIAL = "answer", "One trial"
"""Address of the first page, and the part of Runs that is about one trial."""
REFRESH_SECONDS = 2
"""Refresh interval while a controller is alive."""
Numbers = tuple[int, ...]
"""Numbers of trials."""
DrawPage = Callable[[Store, Snapshot, Numbers], None]
"""Draws a page of a study, given the trials chosen in the sidebar."""
DrawPart = Callable[[Store, Snapshot], None]


@dataclass(frozen=True)
class Choice:
    """The choices in the sidebar."""

    store: Store
    snapshot: Snapshot
    """The study, under its own KL budget."""
    trials: Numbers
    """The chosen trials' numbers; empty: none."""
    budget: float
    """The KL budget, in nats per response."""


@contextmanager
def problems_shown() -> Iterator[None]:
    """Show a user's problem (no store, a foreign one, a deleted study) instead of the rest of the page."""
    try:
        yield
    except PPOTunerError as problem:
        _show(problem)
        st.stop()


def choose(*, with_budget: bool = True) -> Choice:
    """Draw the sidebar and return the choice; without a study, explain why and stop.

    `with_budget`: the page judges trials by the sidebar's KL budget, not only by the study's own.
    """
    with problems_shown():
        store = data.open_store(data.storage())
        name = sidebar.choose_study(store)
        if name is None:
            text = "A study appears here as soon as its first trial starts."
            guide("No studies yet", text, [data.command(["demo"])], own=new_study())
            st.stop()
        with st.sidebar:
            page_link("studies", "All studies")
        snapshot = data.snapshot(store, name)
        trials = sidebar.choose_trials(snapshot)
        budget = sidebar.choose_budget(snapshot) if with_budget else snapshot.view.spec.kl_budget
        return Choice(store, snapshot, trials, budget)


def of_a_study(choice: Choice, draw: DrawPage, *, with_answer: bool = True) -> None:
    """Draw a page of the chosen study, or the user's problem in its place; `with_answer`: below a line with that."""
    with problems_shown():
        snapshot = data.under_budget(choice.store, choice.snapshot, choice.budget)
        if with_answer and (answer := study_answer(choice.store, snapshot.view)) is not None:
            page_link(ANSWER, answer.decision)
        draw(choice.store, snapshot, choice.trials)


def study_page(without_trials: str = "", *, with_answer: bool = True) -> Callable[[DrawPage], Callable[[Choice], None]]:
    """Turn a function that draws the chosen study into a page; `with_answer`: see `of_a_study`.

    `without_trials` is shown until the first trial has started; empty: the function draws a study without, too.
    """

    def decorate(draw: DrawPage) -> Callable[[Choice], None]:
        def draw_or_wait(store: Store, snapshot: Snapshot, chosen: Numbers) -> None:
            if snapshot.view.trials or not without_trials:
                draw(store, snapshot, chosen)
            else:
                watch(store, snapshot)
                not_started(snapshot, without_trials)

        return partial(of_a_study, draw=draw_or_wait, with_answer=with_answer)

    return decorate


def highlighted(snapshot: Snapshot, chosen: Numbers, most: int = style.AT_A_GLANCE) -> Numbers:
    """Return the trials in colour, by number: the chosen, else all if they are few, else default and running ones."""
    rows = snapshot.view.trials
    if not chosen and len(rows) > style.AT_A_GLANCE:
        running = [row.number for row in rows if row.status is Status.RUNNING]
        chosen, most = tuple(dict.fromkeys([*snapshot.defaults, *running])), style.AT_A_GLANCE
    return tuple(sorted(chosen[:most] or (row.number for row in rows)))


def looks(snapshot: Snapshot, numbers: Collection[int]) -> dict[int, style.Look]:
    """Return the looks of trials: default and highlighted ones have theirs on all pages, others what these leave."""
    shared = highlighted(snapshot, tuple(st.session_state.get(sidebar.TRIALS, ())), style.DISTINCT)
    look_of = style.looks([*snapshot.defaults, *shared, *sorted(numbers)])
    return {number: look_of[number] for number in sorted(numbers)}


def refresh_every(view: StudyView) -> int | None:
    """Return the refresh interval in seconds; None if no controller runs the study."""
    return REFRESH_SECONDS if view.row.has_controller else None


_WHOLE_PAGE = "whole page"


def ask_for_the_whole_page() -> None:
    """Request a rerun of the whole page, after a choice inside a fragment that affects the rest."""
    st.session_state[_WHOLE_PAGE] = True


def draw_the_whole_page_if_asked() -> None:
    """Rerun the whole page if requested; called at the start of each fragment."""
    if st.session_state.pop(_WHOLE_PAGE, False):
        st.rerun()


def live(snapshot: Snapshot, draw: DrawPart, head: DeltaGenerator | None = None) -> None:
    """Draw from `snapshot`, and again from fresh data at each refresh; rerun the page when the study's state changes.

    The status line is drawn into `head`, if given.
    """

    def redraw(store: Store, latest: Snapshot) -> None:
        draw_the_whole_page_if_asked()
        latest = data.under_budget(store, latest, snapshot.view.spec.kl_budget)
        if (latest.view.state, bool(latest.view.trials)) != (snapshot.view.state, bool(snapshot.view.trials)):
            st.rerun()  # the page's timer and sections depend on both
        if head is not None:
            with head:
                draw_status(latest.view)
        draw(store, latest)

    _at_each_refresh(snapshot, redraw)


def _at_each_refresh(snapshot: Snapshot, draw: DrawPart) -> None:
    """Call `draw` with `snapshot`, and in each later run of this fragment with the study as it is then."""
    first = iter([snapshot])

    def refresh() -> None:
        with problems_shown():
            store = data.open_store(data.storage())
            draw(store, next(first, None) or data.snapshot(store, snapshot.view.row.name))

    st.fragment(refresh, run_every=refresh_every(snapshot.view))()


# The status line at the top of every page.

_BADGES: dict[Shown, tuple[str, Literal["green", "blue", "orange", "red"]]] = {
    "running": (":material/play_arrow:", "green"),
    "stopping": (":material/stop:", "orange"),
    "paused": (":material/pause:", "orange"),
    "finished": (":material/check:", "blue"),
    "unfinished": (":material/stop_circle:", "orange"),
    "stalled": (":material/hourglass_disabled:", "red"),
}
"""Icon and colour of each state."""


def _state_text(state: Shown) -> str:
    return data.WORDS[state].partition(" ")[2]


def draw_status(view: StudyView, read_at: float | None = None) -> None:
    """Draw the status line; `read_at` is in seconds since the epoch (None: now)."""
    state = data.shown_state(view)
    icon, color = _BADGES[state]
    clock = time.strftime("%H:%M:%S", time.localtime(read_at))
    st.set_page_config(page_title=tab_title(view))
    with st.container():  # one place, with or without a bar: what is below keeps the reader's zoom
        with st.container(horizontal=True, vertical_alignment="center"):
            st.badge(_state_text(state), icon=icon, color=color, help=_about(view, clock))
            if view.state != "finished":
                st.text(status_text(view, clock))
        if state in ("running", "stopping") and not view.confirming:
            st.progress(min(1.0, view.tally.done))


def tab_title(view: StudyView) -> str:
    """Return the browser tab's title: state, name, and number of trials that the guard stopped."""
    pruned = sum(len(numbers) for numbers in kl_prunings(view.trials).values())
    guard = f" ✕{pruned}" if pruned else ""
    return f"{data.WORDS[data.shown_state(view)][0]}{guard} {safe_text.one_line(view.row.name)} - PPO Tuner"


def time_left(view: StudyView) -> str:
    """Estimate the search's remaining time from the device-seconds spent so far; empty: not known."""
    done = view.tally.done
    if not 0.02 < done < 1 or view.confirming:
        return ""
    seconds = sum(row.seconds for row in view.trials if row.role is Role.SEARCH)
    return f"≈ {duration(seconds * (1 - done) / done / (view.row.workers or 1))} left"


def status_text(view: StudyView, clock: str) -> str:
    """Return the study's progress and `clock`, the time of reading."""
    more = {
        "running": time_left(view),
        "stopping": "ends after each running trial's step",
        "stalled": f"silent for {duration(data.silence(view) or 0.0)}",
    }
    return " · ".join(filter(None, [view.tally.text, more.get(data.shown_state(view)), clock]))


def _about(view: StudyView, clock: str) -> str:
    """Return the status line's help text."""
    spec, row = view.spec, view.row
    controller = "No controller is running, so nothing changes. "
    if row.has_controller:
        several = "" if row.workers is None else f", {pluralize(row.workers, 'trial')} at a time"
        controller = (
            f"Its controller is process {row.lease_pid} on {row.lease_host or 'an unknown host'}{several}. "
            f"Live pages refresh every {REFRESH_SECONDS} s."
        )
    return safe_text.in_markdown(
        f"Task {spec.task}. {view.tally.text}. {VALUE_IS} "
        f"Read at {clock}. Started {ago(row.created_at)}, last activity {ago(data.last_sign(view))}. "
        f"{controller}"
    )


def page_link(address: str, label: str, **query: str) -> None:
    """Draw a link to the page at this address; `label` is our own words."""
    page = st.Page(_page, url_path=address, default=address == ANSWER)
    st.page_link(page, label=label, icon=":material/arrow_forward:", query_params=query)


def _page() -> None:
    """Placeholder: `st.page_link` needs a page with its address."""


def guide(title: str, text: str, commands: Sequence[str], problem: str = "", own: Sequence[str] = ()) -> None:
    """Draw an empty state with the commands to run next, or that of the demo and those of one's `own` study. Only
    `problem` may hold text from outside.
    """
    with st.container(border=True):
        st.subheader(title, anchor=False)
        if problem:
            st.text(safe_text.visible(problem).replace("`", '"'))
        st.write(text)
        if own:
            st.caption("Try the demo")
        show_commands(*commands)
        if own:
            st.caption("Your own study: copy the built-in one's file, which explains every key, estimate, run")
        show_commands(*own)
        st.button("Refresh", icon=":material/refresh:", key=f"again {title}")


def heading(title: str, help_text: str | None = None) -> None:
    """Draw a heading without an anchor."""
    st.subheader(title, anchor=False, help=help_text)


def show_commands(*commands: str) -> None:
    """Draw commands, each with a button that copies it."""
    for command in commands:
        st.code(command, language=None, wrap_lines=True)


def new_study() -> list[str]:
    """Return the commands that copy the built-in study's file and run the copy."""
    built_in = str(resources.files("studies") / "reviews.toml")
    copy = safe_text.one_line(shlex.join(["cp", built_in, "my-study.toml"]), data.MAX_COMMAND_CHARS)
    return [copy, *(data.command([word, "my-study.toml"]) for word in ("estimate", "run"))]


def not_started(snapshot: Snapshot, text: str, title: str = "No trials yet") -> None:
    """Draw the empty state of a new study; `text` says what will appear."""
    guide(title, f"{text} If the study is not running, resume it:", [data.command(["run", snapshot.view.row.name])])


def ago(seconds_since_epoch: float) -> str:
    """Return how long ago a time was."""
    return f"{duration(max(0.0, time.time() - seconds_since_epoch))} ago"


def _show(problem: PPOTunerError) -> None:
    demo, own = "ppo-tuner demo", list[str]()
    if not isinstance(problem, StoreError):
        title, commands = "This study cannot be shown", [demo]
        text = "Choose another study in the sidebar, or start a new one."
    elif data.is_missing(data.storage()):
        title, commands, own = "No store yet", [data.command(["demo"])], new_study()
        text = "The demo takes about five minutes on two cores."
    else:
        title, commands = "This store cannot be shown", [f"ppo-tuner dashboard --storage {DEFAULT_STORAGE}", demo]
        text = "Open the dashboard on a PPO Tuner store (--storage or PPO_TUNER_STORAGE), or start a new one."
    guide(title, text, commands, str(problem), own)


def started(snapshot: Snapshot, chosen: Numbers, most: int | None = None) -> Numbers:
    """Return the chosen trials that have started, in order of choice, at most `most`, and say which are left out."""
    known = {row.number for row in snapshot.view.trials}
    missing = [str(number) for number in chosen if number not in known]
    if missing:
        st.info(f"Not started yet: trial{'s' if len(missing) > 1 else ''} {', '.join(missing)}.")
    numbers = tuple(number for number in chosen if number in known)
    if most is not None and len(numbers) > most:
        st.info(f"Showing {most} of {len(numbers)} trials. Choose others in the sidebar.")
    return numbers[:most]


Item = TypeVar("Item")


def paginate(items: Sequence[Item], per_page: int, key: str) -> Sequence[Item]:
    """Return the items on the chosen page, which is in the link; the choice is drawn if there are several pages."""
    pages = -(-len(items) // per_page)
    page = st.pagination(pages, key=key, bind="query-params") if pages > 1 else 1
    return items[(page - 1) * per_page : page * per_page]


PLOTLY_CONFIG = {"displaylogo": False, "toImageButtonOptions": {"format": "png", "scale": 2}}


def selected_trials(key: str) -> list[int]:
    """Return the numbers of the trials whose points are selected in a figure, each once."""
    found = (point.get("customdata") for point in st.session_state[key].selection.points)
    numbers = (one[0] if isinstance(one, list) else one for one in found if one not in (None, []))
    return list(dict.fromkeys(map(int, numbers)))


def figure(plot: go.Figure, key: str, alt: str, on_select: Callable[[], None] | Literal["ignore"] = "ignore") -> None:
    """Draw a Plotly figure; its tool bar saves a PNG. `on_select` is called when points are selected."""
    st.plotly_chart(plot, key=key, config=PLOTLY_CONFIG, alt=alt, on_select=on_select, selection_mode=("points", "box"))


def for_each_width(key: str, draw: Callable[[bool], None]) -> None:
    """Call `draw` for a wide window, and with True for a phone; the style sheet hides the one that is not for it."""
    for width in ("wide", "narrow"):
        with st.container(key=f"{key} {width} only"):
            draw(width == "narrow")


MOST_ROWS = 16
"""Most rows of a table without a scroll bar."""
MARKS = {"✓": "rgba(0, 158, 115, 0.18)", "▲": "rgba(230, 159, 0, 0.35)", "✕": "rgba(213, 94, 0, 0.45)"}
"""Background of a cell by its first character: fine, worth a look, bad."""


def table(
    rows: pd.DataFrame,
    key: str,
    columns: Mapping[str, Any] | None = None,
    *,
    placeholder: str = "",
    marked: bool = False,
) -> None:
    """Draw a table of already safe texts; its tool bar saves it as CSV.

    Columns without configuration have their name as title; missing values show the `placeholder`, and `marked` cells
    are coloured.
    """
    titles = {name: f"{name[:1].upper()}{name[1:]}" for name in rows.columns}
    styled = rows.style.map(lambda cell: f"background-color: {MARKS.get(str(cell)[:1], '')}") if marked else rows
    height: Literal["content", "auto"] = "content" if len(rows) <= MOST_ROWS else "auto"  # ten rows, and a scroll bar
    config = titles | dict(columns or {})
    st.dataframe(styled, key=key, hide_index=True, placeholder=placeholder, column_config=config, height=height)


# Pages that do not refresh by themselves, so that a zoom stays: a status line with a button that redraws them.


def watch(store: Store, snapshot: Snapshot, numbers: Collection[int] | None = None) -> None:
    """Draw the status line; while the study runs, watch for new evaluations of these trials (None: of all) and for
    trials that end, and offer to redraw the page.
    """

    def evaluations(store: Store, of: Snapshot) -> int:
        read = data.curves(store, of, analysis.EVALUATED, numbers=numbers, evaluations_only=True)
        return len(analysis.evaluations(read))

    before, drawn_at = evaluations(store, snapshot), time.time()

    def redraw(store: Store, latest: Snapshot) -> None:
        with st.container(horizontal=True, vertical_alignment="center"):
            draw_status(latest.view, drawn_at)
            more = news(snapshot.view, latest.view, evaluations(store, latest) - before)
            # Drawn even if there is nothing new: appearing later, it would push the figures down.
            label = f"{more}: refresh" if more else "Up to date"
            is_offered = more or latest.view.row.has_controller
            if is_offered and st.button(label, icon=":material/refresh:", key="redraw", disabled=not more):
                st.rerun()

    _at_each_refresh(snapshot, redraw)


def news(before: StudyView, now: StudyView, evaluations: int) -> str:
    """Describe what is new since the page was drawn, so many evaluations among it; empty if nothing."""
    ended, state = now.ended - before.ended, data.shown_state(now)
    parts = {
        pluralize(evaluations, "new evaluation"): evaluations > 0,
        f"{pluralize(ended, 'more trial')} ended": ended > 0,
        f"the study is {_state_text(state)}": state != data.shown_state(before),
    }
    return ", ".join(part for part, is_new in parts.items() if is_new)

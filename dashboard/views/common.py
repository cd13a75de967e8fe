"""What pages share: the chosen study and trials, what can be downloaded, and how fresh a page is."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from streamlit.errors import StreamlitAPIException

from dashboard import analysis, data, figures, safe_text, style
from dashboard.charts import Chart
from dashboard.data import Snapshot
from dashboard.echarts import Option
from ppo_core.errors import PPOTunerError, StoreError
from tuner.results import StudyView
from tuner.status import Status
from tuner.store import Store

REFRESH_SECONDS = 2
"""How often a page looks again while a controller lives."""
CHOSEN_TRIALS = "trial"
"""The key of the choice of trials, in the link and in the session."""


@contextmanager
def problems_told() -> Iterator[None]:
    """Tell a user's problem (no store, a foreign one, a study that is gone) in place of the rest of the page."""
    try:
        yield
    except PPOTunerError as problem:
        _tell(problem)
        st.stop()  # also what comes after the part of the page that met it


def open_store() -> Store:
    """Return the store of PPO_TUNER_STORAGE or the default one; raises StoreError."""
    return data.open_store(data.storage())


def of_a_study(draw: Callable[[Store, Snapshot], None]) -> None:
    """Draw a page of the study that the selector names; a user's problem is told in its place."""
    with problems_told():
        store = open_store()
        name = choose_study(store)
        if name is not None:
            draw(store, data.snapshot(store, name))


def choose_study(store: Store, place: DeltaGenerator | None = None) -> str | None:
    """Return the study's name from the selector, which is in the link; None: there is none yet, and it is said.

    The selector stands in `place`, else in a row of its own.
    """
    names = [study.name for study in data.studies(store)]
    if not names:
        guide(
            "No studies yet",
            "The store is there, and empty. Start a study; it appears here as soon as its first trial runs.",
            ["ppo-tuner demo", "ppo-tuner run STUDY.toml"],
        )
        return None
    _put_into_link(names)
    chosen = (place or st.columns([1, 2])[0]).selectbox(
        "Study",
        names,
        index=None,
        placeholder="Choose a study",
        format_func=safe_text.one_line,
        key="study",
        bind="query-params",
        persist_state="session",
        help="Of the store in PPO_TUNER_STORAGE, or else of runs/ppo-tuner.db",
    )
    if chosen is None:
        st.info("Choose a study above.")
    return chosen


def _put_into_link(names: list[str]) -> None:
    """Name the first study in the link where it names none that exists, so that the link keeps showing this one.

    Only before the selector first exists: from then on the link is its own.
    """
    _keep_chosen("study")
    if "study" in st.session_state:
        return
    linked, first = st.query_params.get("study"), names[0]
    if linked is not None and linked not in [safe_text.one_line(name) for name in names]:
        st.query_params["study"] = safe_text.one_line(first)
        st.session_state["study not found"] = True
        st.rerun()  # the selector would drop what the link named when this run began
    if st.session_state.pop("study not found", False):
        st.warning("The study in the link is not in this store; this is its latest one.")
    if linked is None:
        st.query_params["study"] = safe_text.one_line(first)
        st.session_state["study"] = first


def _keep_chosen(key: str) -> None:
    """Have a choice outlast a change of the page: there Streamlit drops, once, what the link does not name."""
    kept = st.session_state.get(key)
    if kept and key not in st.query_params:
        st.session_state[key] = kept
        with suppress(StreamlitAPIException):  # the page did not change: its selector writes the link itself
            st.query_params[key] = [str(one) for one in kept] if isinstance(kept, list) else safe_text.one_line(kept)


def choose_trials(snapshot: Snapshot, help_text: str) -> tuple[int, ...]:
    """Return the chosen trials by number, which are in the link and stay when the page changes; empty: none is."""
    _keep_chosen(CHOSEN_TRIALS)
    total = snapshot.total
    chosen = st.multiselect(
        "Trials",
        range(len(snapshot.view.trials) if total is None else total),
        key=CHOSEN_TRIALS,
        bind="query-params",
        persist_state="session",
        placeholder="Choose by number",
        help=help_text,
    )
    return tuple(chosen)


def highlighted(snapshot: Snapshot, chosen: tuple[int, ...], most: int = style.AT_A_GLANCE) -> tuple[int, ...]:
    """Return the trials drawn in colour: those chosen, else all where they are few, else the default ones and what
    runs.
    """
    if chosen:
        return chosen[:most]
    rows = snapshot.view.trials
    if len(rows) <= style.AT_A_GLANCE:
        return tuple(row.number for row in rows)
    running = [row.number for row in rows if row.status is Status.RUNNING]
    return tuple(dict.fromkeys([*snapshot.default_trials, *running]))[: style.AT_A_GLANCE]


def refresh_every(view: StudyView) -> int | None:
    """Return the seconds between two looks; None: nothing runs the study, so that it stays as it is."""
    return REFRESH_SECONDS if view.row.is_held else None


def live(snapshot: Snapshot, draw: Callable[[Store, Snapshot], None]) -> None:
    """Draw what changes while the study runs: now from `snapshot`, then again and again from what is new."""
    st.fragment(_look, run_every=refresh_every(snapshot.view))(snapshot, [snapshot], draw)


def _look(drawn: Snapshot, fresh: list[Snapshot], draw: Callable[[Store, Snapshot], None]) -> None:
    """Draw once; `drawn` is what the rest of the page shows, `fresh` holds what the page has read just now."""
    with problems_told():
        store = open_store()
        snapshot = fresh.pop() if fresh else data.snapshot(store, drawn.view.row.name)
        if snapshot.view.state != drawn.view.state:
            st.rerun()  # the whole page: with or without its timer
        st.text(freshness(snapshot.view))
        draw(store, snapshot)


def freshness(view: StudyView) -> str:
    """Return when this was read, and whether it will be read again by itself."""
    read = time.strftime("%H:%M:%S", time.localtime())
    silence = data.silence(view)
    if not view.row.is_held:
        return f"As of {read}. No controller runs this study, so the page does not refresh by itself."
    sign = "" if silence is None else f", the controller's last sign of life {silence:.0f} s before"
    return f"As of {read}{sign}. Looked at again every {REFRESH_SECONDS} s."


def guide(title: str, text: str, commands: list[str], problem: str = "") -> None:
    """Draw an empty state: what there is, and the commands that lead on. Only `problem` may be others' words."""
    with st.container(border=True):
        st.subheader(title, anchor=False)
        if problem:
            st.text(safe_text.visible(problem))
        st.write(text)
        for command in commands:
            st.code(command, language=None)
        st.button("Look again", icon=":material/refresh:", key=f"again {title}")


def not_begun(snapshot: Snapshot, title: str, text: str) -> None:
    """Draw the empty state of a study that has nothing to show yet; `text` says what is to come."""
    lead = f"{text} If nothing runs the study, run it again: it goes on where it is."
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


def _tell(problem: PPOTunerError) -> None:
    demo, default = "ppo-tuner demo", "ppo-tuner dashboard --storage sqlite:///runs/ppo-tuner.db"
    if not isinstance(problem, StoreError):
        guide("This study cannot be shown", "Choose another one, or run a new one.", [demo], str(problem))
    elif data.is_missing(data.storage()):
        text = "A study writes its store when it first runs. The demo takes about four minutes on two cores."
        guide("No store yet", text, [demo], str(problem))
    else:
        text = "Open the dashboard on a PPO Tuner store (PPO_TUNER_STORAGE names it too), or start a new one."
        guide("This store cannot be shown", text, [default, demo], str(problem))


# The chosen trials as an analysis page needs them: those that have begun, and no more than it has room for.


def trials(snapshot: Snapshot, help_text: str, most: int | None = None) -> tuple[int, ...]:
    """Return the chosen trials that have begun, in order of their choice, at most `most`; empty: nothing is chosen.

    What is left out of the choice is said.
    """
    chosen = choose_trials(snapshot, help_text)
    begun = {row.number for row in snapshot.view.trials}
    missing = [str(number) for number in chosen if number not in begun]
    if missing:
        st.info(f"Not begun yet: trial{'s' if len(missing) > 1 else ''} {', '.join(missing)}.")
    found = tuple(number for number in chosen if number in begun)
    if most is not None and len(found) > most:
        st.info(f"Shown are the first {most} of the chosen trials; there is no room for more.")
        found = found[:most]
    return found


# Figures and tables as every page draws them: each can be taken away.

CONFIG = {"displaylogo": False, "toImageButtonOptions": {"format": "png", "scale": 2}}
Latest = dict[str, tuple[Chart, str, str]]
"""Live charts as they were drawn last, by key: each with its study's name and what it shows."""


def figure(drawn: go.Figure, key: str, alt: str) -> None:
    """Draw a Plotly figure; its tool bar saves a PNG, the button below it a page that needs nothing else."""
    st.plotly_chart(drawn, key=key, config=CONFIG, alt=alt)
    _save_as_html(lambda: drawn, key, file=key.replace(" ", "-"))


def live_chart(
    chart: Chart, option: Option, *, key: str, height: int, alt: str, study: str, what: str, latest: Latest
) -> None:
    """Draw a live chart, `height` pixels high, whose own button saves a PNG, and keep it in `latest` for `save_live`.

    `option` is the chart as ECharts draws it; `what` it shows is told in our own words.
    """
    st.echarts_chart(option, key=key, height=height, alt=alt)
    latest[key] = (chart, study, what)


def save_live(latest: Latest) -> None:
    """Draw a button for each of the live charts; it saves the one drawn last as a page that needs nothing else.

    This belongs outside of what refreshes: a button that is drawn anew forgets how to answer a click on its last one.
    """
    with st.container(horizontal=True):
        for key, (chart, study, what) in latest.items():
            file = f"{safe_text.file_name(study)}-{chart.name}"
            _save_as_html(partial(_saved, latest, key), key, file=file, label=f"Save as HTML: {what}")


def _saved(latest: Latest, key: str) -> go.Figure:
    """Return the chart that was drawn last, as high as the page that it is opened in."""
    chart, study, what = latest[key]
    return figures.saved(chart, f"{safe_text.one_line(study)}: {what}").update_layout(height=None)


def table(rows: pd.DataFrame, key: str, columns: Mapping[str, Any] | None = None) -> None:
    """Draw a table whose texts are safe cells already; its tool bar saves it as CSV."""
    st.dataframe(rows, key=key, hide_index=True, placeholder="", column_config=columns)


def _save_as_html(make: Callable[[], go.Figure], key: str, file: str, label: str = "Save as HTML") -> None:
    st.download_button(
        label,
        lambda: make().to_html(include_plotlyjs=True, config=CONFIG),
        file_name=f"{file}.html",
        mime="text/html",
        key=f"save {key}",
        type="tertiary",
        icon=":material/download:",
        on_click="ignore",
        help="One file that opens without a network: the chart with its zoom and tooltips.",
    )


# How fresh an analysis page is: its figures stand still, so that a zoom stays, and a button draws them anew.


@dataclass(frozen=True)
class Standing:
    """What a page draws from, as it stood at one moment."""

    state: str
    evaluations: int
    ended: int
    """Trials of the study that have ended."""


def line(store: Store, snapshot: Snapshot, numbers: Collection[int] | None = None) -> None:
    """Say when the page was drawn; while the study runs, look for more, and offer to draw the page anew.

    Args:
        store: Where the study is.
        snapshot: What the page draws.
        numbers: Trials whose evaluations it draws; None: all.
    """
    drawn = standing(store, snapshot, numbers)
    look = st.fragment(_look_again, run_every=refresh_every(snapshot.view))
    look(snapshot.view.row.name, drawn, time.time(), [snapshot], numbers)


def standing(store: Store, snapshot: Snapshot, numbers: Collection[int] | None = None) -> Standing:
    """Return how the study and the evaluations of the trials `numbers` (None: of all) stand."""
    evaluated = data.curves(store, snapshot, analysis.EVALUATED, numbers=numbers, evaluations_only=True)
    return Standing(data.shown_state(snapshot.view), len(analysis.evaluations(evaluated)), snapshot.ended)


def news(drawn: Standing, now: Standing) -> str:
    """Return what there is now that the page does not show yet; empty: nothing."""
    said = [
        f"{more} new {thing}{'s' if more > 1 else ''}{what}"
        for more, thing, what in (
            (now.evaluations - drawn.evaluations, "evaluation", ""),
            (now.ended - drawn.ended, "trial", " ended"),
        )
        if more > 0
    ]
    state = now.state if now.state != "unfinished" else "not run any more"
    return ", ".join([*said, f"the study is {state}"] if now.state != drawn.state else said)


def _look_again(
    name: str, drawn: Standing, drawn_at: float, fresh: list[Snapshot], numbers: Collection[int] | None
) -> None:
    """Look once; `fresh` holds what the page has read just now. It never draws the rest of the page by itself."""
    with problems_told():
        store = open_store()
        snapshot = fresh.pop() if fresh else data.snapshot(store, name)
        st.caption(f"Drawn at {_clock(drawn_at)}. {_looked(snapshot)}")
        more = news(drawn, standing(store, snapshot, numbers))
        # It is there without news, too: as it came, it would push the figures down under the reader.
        held = snapshot.view.row.is_held
        label = f"{more}: refresh" if more else "Nothing new"
        if (more or held) and st.button(label, icon=":material/refresh:", key="draw anew", disabled=not more):
            st.rerun()


def _looked(snapshot: Snapshot) -> str:
    state = data.shown_state(snapshot.view)
    if refresh_every(snapshot.view) is None:
        return "No controller runs this study, so nothing new is looked for."
    sign = "" if state != "stalled" else f", stalled: no sign of life for {data.silence(snapshot.view) or 0.0:.0f} s"
    return (
        f"The study is {state}{sign}. Looked for more at {_clock(time.time())}, every {REFRESH_SECONDS} s; the "
        "figures stay as you left them until you refresh."
    )


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))

"""Search: importance, linked figures of trials over hyperparameters, and early ends."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import plotly.graph_objects as go
import streamlit as st

from dashboard import analysis, data, figures, importance_figures, safe_text, sentences, style
from dashboard.data import Snapshot
from dashboard.importance_figures import Measure
from dashboard.views import common
from dashboard.views.sidebar import TRIALS
from ppo_core.output import KL_UNIT, NOTHING
from tuner.search import fidelity, importance
from tuner.search.fidelity import Fidelity
from tuner.search.importance import Importance, Outcome
from tuner.store import Store, TrialRow

MOST_AXES = 8
"""Default number of axes of the parallel coordinates."""
MEASURES: dict[str, Measure] = {"reward": "value", "KL": "kl"}


def page(choice: common.Choice) -> None:
    """Draw the page."""
    common.of_a_study(choice, _study)


def _study(store: Store, snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    common.line(store, snapshot)
    if not snapshot.view.trials:
        common.not_begun(snapshot, "No trials yet", "What the search finds appears here once trials have ended.")
        return
    evaluated = analysis.evaluations(data.curves(store, snapshot, analysis.EVALUATED, evaluations_only=True))
    at = _fidelity(snapshot)
    at_rung = {(row.trial, row.episode): (row.reward, row.kl) for row in evaluated.itertuples()}
    trials = fidelity.read(snapshot.view.trials, at, at_rung)
    if said := fidelity.read_where(snapshot.view.trials, at, snapshot.view.spec):
        st.caption(said)
    shown = Snapshot.of(replace(snapshot.view, trials=trials))
    names = figures.searched(shown.trials)
    ranked = [name for name in _importance(store, shown, at, len(snapshot.view.trials)) if name in names]
    _linked(snapshot, shown, at, [*ranked, *(name for name in names if name not in ranked)], chosen)
    _ended_early(snapshot)
    _report(store, snapshot)


def _fidelity(snapshot: Snapshot) -> Fidelity:
    """Return the point at which trials are compared; it is in the link.

    Default: at screening, if the strategy screens.
    """
    offered = {at.name: at for at in fidelity.offered(snapshot.view.spec)}
    if len(offered) == 1:
        return next(iter(offered.values()))
    chosen = st.segmented_control(
        "Compare trials", list(offered), default=next(iter(offered)), required=True, key="read at",
        bind="query-params",
        help="Most trials of this study were screened, not finished. Values read after different lengths of "
        f"training are never mixed. {' '.join(f'{name}: {at.doc}' for name, at in offered.items())}",
    )  # fmt: skip
    return offered[chosen]


# Importance


def _importance(store: Store, snapshot: Snapshot, at: Fidelity, all_trials: int) -> list[str]:
    """Draw importances and return the hyperparameters in that order; empty if there are too few trials."""
    view, at_rung = snapshot.view, at.at_rung
    usable = importance.usable(view.trials, view.spec, at_rung=at_rung)
    st.subheader(
        "What mattered for reward, and for KL", anchor=False,
        help=_importance_help(all_trials - len(usable), at_rung=at_rung),
    )  # fmt: skip
    if refused := importance.refusal(view.trials, view.spec, at_rung=at_rung):
        st.info(refused)
        return []
    key = f"{store.url}|{view.row.id}|{view.row.created_at}|{sorted(view.spec.search)}|{at.at_rung}"
    ids = tuple((row.id, row.attempts, row.value) for row in usable)
    with st.spinner("Resampling", show_time=True):
        found = _resampled(key, ids, snapshot, usable)
    kl, reward = (name.removeprefix("Eval ") for name in at.short)
    titles: dict[Outcome, str] = {"reward": f"high {reward.lower()}", "KL": f"low {kl}"}
    for place, (outcome, title) in zip(st.columns(2), titles.items(), strict=True):
        with place:
            st.markdown(f"**For a {title}**")
            common.figure(
                importance_figures.importance_bars(found[outcome]),
                key=f"importance for {outcome}",
                alt=f"Each hyperparameter's share of the importance for {outcome}, with its spread over resamples",
            )
            st.text(importance.certainty(found[outcome], len(usable)))
    return [item.name for item in found["reward"]]


def _importance_help(left_out: int, *, at_rung: bool) -> str:
    why = "not screened, or forked" if at_rung else "pruned, failed, forked, not ended or without a value"
    pruned = "" if at_rung else " The charts of one hyperparameter below include the pruned trials."
    return (
        f"{importance.MEANING} Bars are shares; a whisker holds the middle 80% of {importance.RESAMPLES} bootstrap "
        f"resamples of the trials; a pale bar is one that {importance.RESAMPLES} shuffles of the outcomes reach by "
        f"chance. Trials left out: {left_out} ({why}).{pruned}"
    )


@st.cache_resource(max_entries=40, show_spinner=False)
def _resampled(
    study: str,
    ids: tuple[tuple[int, int, float | None], ...],
    _snapshot: Snapshot,
    _usable: Sequence[TrialRow],
) -> dict[Outcome, list[Importance]]:
    return importance.importances(_usable, _snapshot.view.spec)


# Linked figures: a selection in one is marked in all.


def _linked(snapshot: Snapshot, shown: Snapshot, at: Fidelity, names: list[str], chosen: tuple[int, ...]) -> None:
    """Draw the figures of `shown`: the trials of `snapshot`, compared `at` one point."""
    key = f"marked {snapshot.view.row.id}"
    # Trials chosen on other pages are marked at first.
    marked = tuple(number for number in st.session_state.get(key, chosen) if number in set(shown.trials["number"]))
    _bar(key, marked)
    if shown.trials["value"].notna().sum() < 2 or not names:
        st.info(
            f"These charts need two trials that {'were screened' if at.at_rung else 'ended'} with a value and "
            "differ in a searched hyperparameter."
        )
        return
    _front_and_slices(snapshot, shown, at, names, marked, key)
    _parallel(shown, at, names, marked)
    numbers = [name for name in names if importance_figures.is_number(shown.trials[figures.PARAMS + name])]
    if len(numbers) > 1:
        _pair(shown, numbers, marked, key)


def _bar(key: str, marked: tuple[int, ...]) -> None:
    """Draw the marked trials with their actions; it stays in view while scrolling."""
    with st.container(horizontal=True, vertical_alignment="center", key="marked"):
        if not marked:
            st.text("Drag over points in a figure to mark their trials in all.")
            return
        listed = ", ".join(map(str, marked[: style.AT_A_GLANCE]))
        st.text(f"Marked: {listed}{' …' if len(marked) > style.AT_A_GLANCE else ''}")
        st.button(
            f"Use {'this trial' if len(marked) == 1 else f'these {len(marked)} trials'}",
            icon=":material/check:",
            on_click=_use,
            args=(key, marked),
            disabled=len(marked) > style.DISTINCT,
            help=f"Choose them on all pages; at most {style.DISTINCT}.",
        )
        st.button("Clear", on_click=st.session_state.update, args=({key: ()},), type="tertiary")


def _use(key: str, marked: tuple[int, ...]) -> None:
    st.session_state[TRIALS] = list(marked)
    st.session_state.pop(key, None)


def _select(key: str, figure: str) -> None:
    """Mark the trials whose points are selected in a figure."""
    points = st.session_state[figure].selection.points
    numbers = (point["customdata"] for point in points if "customdata" in point)
    st.session_state[key] = tuple(
        dict.fromkeys(int(number[0] if isinstance(number, list) else number) for number in numbers)
    )


def _figure(drawn: go.Figure, figure: str, alt: str, says: str, marked: tuple[int, ...], key: str) -> None:
    """Draw a figure of points whose selection marks trials."""
    common.figure(
        importance_figures.mark(drawn, marked), key=figure, alt=alt, says=says, on_select=partial(_select, key, figure)
    )


def _front_and_slices(
    snapshot: Snapshot, shown: Snapshot, at: Fidelity, names: list[str], marked: tuple[int, ...], key: str
) -> None:
    early = " Pruned and stopped trials are shown at their last values." if not at.at_rung else ""
    st.subheader("Reward, KL and one hyperparameter", anchor=False, help=f"Each point is a trial.{early}")
    name = st.selectbox(
        "Hyperparameter",
        names,
        label_visibility="collapsed",
        key="setting",
        bind="query-params",
        width=320,
        help="Searched ones that vary; the most important for reward comes first.",
    )
    spec, best = snapshot.view.spec, snapshot.view.best()
    # Use the KL of the best checkpoint, as for the value, not that of the end.
    trials = shown.trials if at.at_rung else snapshot.trials
    titles: dict[Measure, str] = {"value": at.reward, "kl": at.kl}
    first, *others = st.columns(3)
    with first:
        _figure(
            figures.reward_against_kl(
                trials, kl_budget=spec.kl_budget, baseline=None, best=best.number if best else None, chosen=marked
            ).update_layout(height=360),
            "front of trials",
            "Every trial's value against its eval KL, and the front of them",
            sentences.of_front(figures.front_of(trials), spec.kl_budget),
            marked,
            key,
        )
    for place, measure in zip(others, MEASURES.values(), strict=True):
        with place:
            _figure(
                importance_figures.slice_points(
                    shown.trials, name, measure, spec, titles[measure], with_budget=not at.at_rung
                ),
                f"slice of {measure}",
                f"{titles[measure]} of every trial over {name}",
                sentences.of_slice(shown.trials, name, measure),
                marked,
                key,
            )


def _parallel(shown: Snapshot, at: Fidelity, names: list[str], marked: tuple[int, ...]) -> None:
    st.subheader(
        "All hyperparameters",
        anchor=False,
        help="Drag along an axis to keep the lines through a part of it; drag its name to move it.",
    )
    all_fit = len(names) <= MOST_AXES
    picked = st.multiselect(
        "Axes", names, key="axes", bind="query-params", label_visibility="collapsed",
        placeholder="Axes: all that vary" if all_fit else f"Axes: the {MOST_AXES} that mattered most for reward",
    )  # fmt: skip
    axes = picked or names[:MOST_AXES]
    common.figure(
        importance_figures.parallel(shown.trials, axes, shown.view.spec, at.short, marked),
        key="parallel coordinates",
        alt="Parallel coordinates: each trial a line through its searched values, its KL and its reward",
        says=sentences.of_parallel(shown.trials, axes),
    )


def _pair(shown: Snapshot, names: list[str], marked: tuple[int, ...], key: str) -> None:
    st.subheader(
        "Two hyperparameters",
        anchor=False,
        help="Each point is a trial; the colour is its reward or KL.",
    )
    row = st.container(horizontal=True, vertical_alignment="bottom")
    with row:
        x = st.selectbox("Horizontal", names, key="across", bind="query-params", width=260)
        y = st.selectbox("Vertical", names, index=1, key="up", bind="query-params", width=260)
        what = st.segmented_control(
            "Colour", list(MEASURES), default="reward", required=True, key="of", bind="query-params"
        )
    both = shown.trials.dropna(subset=[figures.PARAMS + x, figures.PARAMS + y, MEASURES[what]])
    if x == y:
        st.info("Choose two different hyperparameters.")
    elif both.empty:
        st.info(f"No trial has both hyperparameters set and a {what} value.")
    else:
        _figure(
            importance_figures.pair(shown.trials, x, y, MEASURES[what], shown.view.spec),
            "pair",
            f"{what} over {x} and {y}, with the trials as points",
            sentences.of_pair(shown.trials, x, y, MEASURES[what]),
            marked,
            key,
        )


# Early ends


def _ended_early(snapshot: Snapshot) -> None:
    st.subheader("What ending trials early saved", anchor=False)
    early, screened = analysis.ended_early(snapshot.trials), snapshot.view.extent.screened
    if screened:
        st.text(
            f"{screened} trial{' is' if screened == 1 else 's are'} screened and not counted here: each may "
            "still be promoted."
        )
    if early.empty:
        st.info("No trial was pruned or stopped.")
        return
    saved = analysis.savings(snapshot.trials)
    with st.grid(3, min_column_width=150):
        for label, value, help_text in (
            ("Ended early", f"{saved.trials}", "Trials that a rule pruned or a person stopped."),
            ("Episodes saved", f"{saved.episodes:,} ({saved.share:.0%})",
             "Against running them to their end; the share is of all that the ended trials would have taken."),
            ("Time saved", _time(saved.seconds), "Their episodes left, at the median pace of completed trials."),
        ):  # fmt: skip
            st.metric(label, value, border=True, height="stretch", help=help_text)
    number = st.column_config.NumberColumn
    columns = {
        "number": number("Trial", width=60),
        "status": st.column_config.TextColumn("Status", width=110),
        "rule": st.column_config.TextColumn("Ended by"),
        "trials": number("Trials", width=70),
        "share": st.column_config.NumberColumn("Ended at", format="percent", help="Share of its episodes it had run."),
        "episodes_saved": number("Episodes saved", format="localized"),
        "seconds_saved": number("Seconds saved", format="%.0f"),
        "value": number("Value so far", format="%.3f"),
        "kl": number(f"KL so far ({KL_UNIT})", format="%.2f"),
    }
    common.table(
        analysis.by_rule(early),
        key="ended by rule",
        columns=columns | {"share": number("Median ended at", format="percent")},
    )
    with st.expander("Trial by trial"):
        cells = early.assign(status=[style.kind_label(status) for status in early["status"]])
        common.table(cells, key="ended early", columns=columns)


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return NOTHING
    for unit, size in (("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# The report


def _report(store: Store, snapshot: Snapshot) -> None:
    name = snapshot.view.row.name

    def made() -> str:
        from dashboard.report import report  # imported on demand: its libraries take a second

        return report(store, name)

    st.subheader("The study in one file", anchor=False)
    st.download_button(
        "Download the report",
        made,
        file_name=f"{safe_text.file_name(name)}-report.html",
        mime="text/html",
        icon=":material/description:",
        on_click="ignore",
        help="What to launch, how sure that is and why, with charts and samples, to mail or attach: the file of "
        "`ppo-tuner report`. It needs no network.",
    )

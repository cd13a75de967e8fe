"""The first page: all studies, then the chosen one. How it stands, what runs, what ended why, what to do next."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import data, diagnosis, health, safe_text, style
from dashboard.data import Shown, Snapshot
from dashboard.health import HEALTH_MARKS as MARKS
from dashboard.health import LEAST_SECONDS, NEAR, TIMES_USUAL, Card
from dashboard.views import by_beta, common, search
from dashboard.views.common import Latest, duration
from ppo_core.hyperparameters import HYPERPARAMETERS
from ppo_core.metrics import METRICS
from tuner.best import RULE
from tuner.confirmed import recommendation
from tuner.results import StudyView
from tuner.search import fidelity
from tuner.search.matching import finished_by
from tuner.spec import OBJECTIVES
from tuner.status import Objective, Status
from tuner.store import Store, StudyRow

# The table of all studies in the store: state, best so far, cost, last sign of life.

A_PAGE = 20
"""Studies that are read and shown at a time."""
SLOW_SECONDS = 10
"""Between two looks at all studies."""


def section(store: Store) -> None:
    """Draw the studies; it refreshes by itself while any of them runs."""
    rows = data.studies(store)
    if not rows:
        return  # the page says so where a study would be chosen
    running = any(row.is_held for row in rows)
    st.fragment(_table, run_every=SLOW_SECONDS if running else None)(store)


def _table(store: Store) -> None:
    with common.problems_told():
        rows = data.studies(store)
        archived = sum(row.archived_at is not None for row in rows)
        with st.container(horizontal=True, vertical_alignment="bottom"):
            st.subheader("Studies", anchor=False)
            if archived:
                shown = st.toggle(f"Archived ones too ({archived})", key="archived", bind="query-params")
                rows = rows if shown else [row for row in rows if row.archived_at is None]
        if not rows:
            st.info("All studies are archived: switch them on above.")
            return
        pages = -(-len(rows) // A_PAGE)
        page = st.pagination(pages, key="studies", bind="query-params") if pages > 1 else 1
        listed = rows[(page - 1) * A_PAGE : page * A_PAGE]
        table = table_of([(row, data.view(store, row)) for row in listed])
        st.dataframe(table, key="all studies", hide_index=True, placeholder="–", column_config=_study_columns())


def table_of(studies: list[tuple[StudyRow, StudyView | None]]) -> pd.DataFrame:
    """Return a row a study, safe to show and to export; one that cannot be read has only its name."""
    table = pd.DataFrame([_row(row, view) for row, view in studies])
    has_budget = "spent" in table.columns and table["spent"].fillna("").ne("").any()
    return table if has_budget else table.drop(columns="spent", errors="ignore")


def _row(row: StudyRow, view: StudyView | None) -> dict[str, object]:
    name: dict[str, object] = {"study": safe_text.cell(row.name)}
    if view is None:
        return name | {"state": "cannot be read"}
    best, spent, extent = view.best(), data.cost(view), view.extent
    return name | {
        "state": data.WORDS[data.shown_state(view)] + (", archived" if row.archived_at is not None else ""),
        "ended": _ended(view.ended, data.total(view), extent.resting),
        "spent": "" if extent.budget is None else f"{extent.spent:.1f} of {extent.budget:g}",
        "best": None if best is None else best.value,
        "kl": None if best is None else best.kl,
        "budget": view.spec.kl_budget,
        "hours": spent.hours,
        "seconds": spent.seconds_a_trial,
        "pruned": None if spent.pruned_share is None else 100 * spent.pruned_share,
        "sign": common.ago(data.last_sign(view)),
    }


def _ended(ended: int, total: int | None, resting: int) -> str:
    """Return how many trials have ended, of how many where that is known, and how many the strategy paused."""
    return f"{ended}{'' if total is None else f' of {total}'}{f', {resting} paused' if resting else ''}"


def _study_columns() -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    return {
        "study": text("Study", pinned=True, width=145),
        "state": text("State", width=115, help="Stalled: a controller lives, and gave no sign of life for a minute."),
        "ended": text("Trials ended", width=100, help="And how many the strategy paused at a rung."),
        "spent": text("Budget spent", width=90, help="In trials of full length; empty: the study bounds their number."),
        "best": number("Best reward", format="%.3f", width=85, help="Eval reward of the best trial in the KL budget."),
        "kl": number("Its KL (nats)", format="%.2f", width=85, help=METRICS["eval/kl"].doc),
        "budget": number("KL budget", format="%g", width=75, help=f"In {METRICS['eval/kl'].unit}."),
        "hours": number("Hours", format="%.2f", width=60, help="That trials trained; several at once each count."),
        "seconds": number("s a trial", format="%.0f", width=65, help="Mean over the trials that have ended."),
        "pruned": number("On pruned", format="%.0f%%", width=75, help="Share of the time that pruned trials took."),
        "sign": text("Last sign of life", width=105),
    }


# A study's head: its state, how far it is, the best it has found, what it cost, and what to do next.

_BADGES: dict[Shown, tuple[str, str, Literal["green", "blue", "orange", "red"]]] = {
    "running": ("running", ":material/play_arrow:", "green"),
    "paused": ("paused", ":material/pause:", "orange"),
    "finished": ("finished", ":material/check:", "blue"),
    "unfinished": ("not running", ":material/stop_circle:", "orange"),
    "stalled": ("stalled", ":material/hourglass_disabled:", "red"),
}


def draw_summary(snapshot: Snapshot, baseline: float | None) -> None:
    """Draw the state line and the cards; where there is nothing to see yet, what to do."""
    _state_line(snapshot.view)
    if snapshot.view.trials:
        _summary_cards(snapshot, baseline)
    else:
        text = "The study is recorded, and its first trial has not begun: loading the task takes some seconds."
        common.not_begun(snapshot, "No trials yet", text)


def next_steps(snapshot: Snapshot, cards: Sequence[Card]) -> None:
    """Draw what to do next."""
    boxes = {"error": st.error, "warning": st.warning, "info": st.info}
    for one in diagnosis.next_steps(snapshot, cards):
        boxes[one.level](one.text)
        if one.command:
            st.code(data.command(one.command), language=None)
    by_beta.link(snapshot)


def _state_line(view: StudyView) -> None:
    label, icon, color = _BADGES[data.shown_state(view)]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.badge(label, icon=icon, color=color)
        if view.row.archived_at is not None:
            st.badge("archived", icon=":material/inventory_2:", color="gray")
        last = f", last sign of life {common.ago(data.last_sign(view))}" if view.trials else ""
        st.text(f"Task {safe_text.one_line(view.spec.task)}, begun {common.ago(view.row.created_at)}{last}")


def _summary_cards(snapshot: Snapshot, baseline: float | None) -> None:
    cards = (*_progress(snapshot), *_best(snapshot, baseline), _cost(snapshot.view))
    with st.grid(min(len(cards), 5) if len(cards) % 3 else 3, min_column_width=170):
        for label, value, note, help_text in cards:
            st.metric(
                label, value, note, delta_color="off", delta_arrow="off", border=True, height="stretch", help=help_text
            )


_Card = tuple[str, str, str | None, str]


def _progress(snapshot: Snapshot) -> tuple[_Card, ...]:
    view = snapshot.view
    shown = [row.shown_status for row in view.trials if not row.is_done]
    under_way = ", ".join(f"{shown.count(status)} {status}" for status in dict.fromkeys(shown))
    failed = sum(row.status is Status.FAILED for row in view.trials)
    others = sum(row.status is Status.PRUNED for row in view.trials) - len(snapshot.kl_pruned)
    notes = [f"{count} {what}" for count, what in ((others, "pruned otherwise"), (failed, "failed")) if count]
    return (
        (
            "Trials ended",
            _ended(snapshot.ended, snapshot.total, 0),
            under_way or None,
            "Ended in any way: completed, pruned, failed or stopped.",
        ),
        *_at_rungs(view),
        (
            "Pruned for KL",
            f"{len(snapshot.kl_pruned)}",
            ", ".join(notes) or None,
            "Trials that the guard ended because their KL went over its limit. Below: those that it ended for another "
            "reason, such as learning nothing, and those that failed.",
        ),
    )


def _at_rungs(view: StudyView) -> tuple[_Card, ...]:
    """Return the card of a strategy that pauses trials; none of another one."""
    if view.spec.strategy not in fidelity.SHARES:
        return ()
    promoted = sum(row.rung > 0 for row in view.trials) + len(finished_by(view.trials))
    help_text = (
        "Trials that the strategy paused. One that is promoted goes on, or is run from the start at another β. Below: "
        "how many were promoted."
    )
    return (("Paused at a rung", f"{view.extent.resting}", f"{promoted} promoted", help_text),)


def _best(snapshot: Snapshot, baseline: float | None) -> tuple[_Card, ...]:
    view, best = snapshot.view, snapshot.view.best()
    is_best = view.spec.objective == "best"
    gained, budget = "no trial within it yet", f"budget {view.spec.kl_budget:g} nats"
    if best is not None and best.value is not None:
        gained = f"trial {best.number}{f' at step {best.value_step}' if is_best else ''}"
        if baseline is not None:
            gained += f", {best.value - baseline:+.2f} on SFT"
        if is_best and best.end_kl is not None and best.status is Status.COMPLETED:
            budget += f", the trial ends at {best.end_kl:.1f}"
    return (
        (
            "Best in the budget",
            "–" if best is None or best.value is None else f"{best.value:.2f}",
            gained,
            f"{RULE[view.spec.objective]} Beside it: how far its reward is above the SFT policy's, before training.",
        ),
        (
            "Its KL",
            "–" if best is None or best.kl is None else f"{best.kl:.1f} nats",
            budget,
            f"Eval KL of the best trial in {METRICS['eval/kl'].unit}, of the same evaluation{'' if is_best else 's'} "
            "as its reward.",
        ),
    )


def _cost(view: StudyView) -> _Card:
    spent = data.cost(view)
    notes = []
    if spent.seconds_a_trial is not None:
        notes.append(f"{spent.seconds_a_trial:,.0f} s each")
    if spent.pruned_share is not None:
        notes.append(f"{spent.pruned_share:.0%} pruned")
    help_text = (
        "Time that trials trained, over all attempts; where several ran at once, each counts. Below: the mean of those "
        "that ended, and the share of the time that pruned ones took."
    )
    return "Cost so far", hours(spent.hours), ", ".join(notes) or None, help_text


def hours(value: float) -> str:
    """Return a duration in hours, with digits as it needs them."""
    return f"{value:.1f} h" if value >= 1 else f"{60 * value:.0f} min"


# The table of trials: status and reason, value and KL, and what was searched.

PREFIX = "params_"
MOST_ROWS = 20
"""Rows shown without scrolling."""
MOST_LIVE = 250
"""Trials up to which the table is drawn at each refresh, and coloured: a larger one is too much to send each time."""


def draw_table(snapshot: Snapshot, chosen: tuple[int, ...]) -> None:
    """Draw the chosen trials, or all."""
    trials = snapshot.trials[snapshot.trials["number"].isin(chosen)] if chosen else snapshot.trials
    if trials.empty:
        st.info("None of the chosen trials has begun yet.")
        return
    shown = rows(trials, notes(snapshot.view), _optional(snapshot))
    styled: Any = shown
    if len(shown) <= MOST_LIVE:
        styled = shown.style.apply(_coloured, axis=None, numbers=trials["number"].tolist())
    height: Literal["content", "auto"] = "content" if len(shown) <= MOST_ROWS else "auto"
    st.dataframe(
        styled, key="trials", height=height, hide_index=True, placeholder="",
        column_config=_trial_columns(trials, snapshot.view.spec.objective),
    )  # fmt: skip
    st.caption(
        f"{_CAPTIONS[snapshot.view.spec.objective]} Searched values follow; an empty cell was not searched in that "
        "trial. Click a column's head to sort."
    )


_CAPTIONS: Mapping[Objective, str] = {
    "best": "Value and KL are of a trial's best checkpoint within the KL budget, at the step beside them; the end KL "
    "is that of its last evaluation.",
    "end": "Value and KL are means of a trial's last two evaluations.",
}


def _optional(snapshot: Snapshot) -> list[str]:
    """Return the columns that say something in this study alone."""
    spec = snapshot.view.spec
    of_best = ["value_step", "end_kl"] if spec.objective == "best" else []
    return of_best + (["rung_score"] if spec.strategy in fidelity.SHARES else [])


def notes(view: StudyView) -> dict[int, str]:
    """Return what there is to say of trials besides their status, by number: the best, over the budget, a fork."""
    best, is_best = view.best(), view.spec.objective == "best"
    told = {}
    for row in view.trials:
        kl = row.end_kl if is_best else row.kl
        is_over = row.status is Status.COMPLETED and kl is not None and kl > view.spec.kl_budget
        over = "ends over budget" if is_best else "over budget"
        parts = ["best" if best is not None and row.number == best.number else "", over if is_over else ""]
        parts.append("" if row.parent is None else f"fork of {row.parent}")
        told[row.number] = ", ".join(part for part in parts if part)
    return told


def rows(trials: pd.DataFrame, notes: Mapping[int, str] | None = None, optional: Sequence[str] = ()) -> pd.DataFrame:
    """Return the table's cells by column, safe to show and to export; `notes` by number, `optional` columns by name."""
    shown = pd.DataFrame(
        {
            "number": trials["number"],
            "line": [style.dash(number).glyph for number in trials["number"]],
            "status": [
                f"{style.mark(kind).glyph} {shown}"
                for kind, shown in zip(trials["kind"], trials["shown_status"], strict=True)
            ],
            "note": [(notes or {}).get(number, "") for number in trials["number"]],
            "value": trials["value"],
            "value_se": trials["value_se"],
            "kl": trials["kl"],
            **{name: trials[name] for name in optional},
        },
        index=trials.index,
    )
    reasons = pd.Series(
        [safe_text.cell(message or rule) for rule, message in zip(trials["rule"], trials["reason"], strict=True)],
        index=trials.index,
        name="reason",
    )
    progress = (100 * trials["episodes"] / trials["total_episodes"]).rename("progress")
    searched = trials[_searched(trials)].map(_safe)
    # Beside more columns the reason would push all that was searched out of sight.
    parts = (
        [searched, progress, trials["seconds"], reasons]
        if optional
        else [reasons, searched, progress, trials["seconds"]]
    )
    return pd.concat([shown, *parts], axis=1)


def _safe(value: Any) -> Any:
    """Return a searched value; an imported study may have any text in its place."""
    return safe_text.cell(value) if isinstance(value, str) else value


def _searched(trials: pd.DataFrame) -> list[str]:
    present = [column for column in trials.columns if column.startswith(PREFIX)]
    order = [PREFIX + name for name in HYPERPARAMETERS]
    return sorted(present, key=lambda column: order.index(column) if column in order else len(order))


def _coloured(shown: pd.DataFrame, numbers: list[int]) -> pd.DataFrame:
    styles = pd.DataFrame("", index=shown.index, columns=shown.columns)
    styles["line"] = [f"color: {style.colour(number)}" for number in numbers]
    return styles


def _trial_columns(trials: pd.DataFrame, objective: Objective) -> dict[str, Any]:
    number, text = st.column_config.NumberColumn, st.column_config.TextColumn
    statuses = "; ".join(f"{style.kind_label(kind)}: {style.MEANINGS[kind]}" for kind in style.KINDS)
    columns: dict[str, Any] = {
        "number": number("Trial", width=60, pinned=True),
        "line": text("Line", width=55, help="The trial's colour and line style on every chart."),
        "status": text("Status", width=110 if trials["kind"].ne(style.RESTING).all() else 130, help=statuses),
        "note": text(
            "Note",
            width=115 if objective == "end" else 150,
            help="The best trial within the KL budget, completed trials over it, forks.",
        ),
        "value": number("Value", format="%.3f", width=70, help=f"Eval reward: {OBJECTIVES[objective]}."),
        "value_se": number("± SE", format="%.3f", width=65, help=METRICS["eval/reward_se"].doc),
        "kl": number("KL (nats)", format="%.2f", width=85, help=METRICS["eval/kl"].doc),
        "value_step": number("At step", format="%d", width=65, help="The step of the checkpoint that the value is of."),
        "end_kl": number("End KL", format="%.2f", width=70, help="Eval KL of the trial's last evaluation."),
        "rung_score": number("Rung score", format="%.3f", width=85, help="What the strategy ranks it by at its rung."),
        "reason": text("Reason", width=170, help="Why the trial ended early: what its rule read. Click for all."),
        "progress": st.column_config.ProgressColumn(
            "Episodes", format="%.0f%%", max_value=100, width=150, color="gray", help="Share of the trial's episodes."
        ),
        "seconds": number("Time (s)", format="%.0f", width=80, help="Seconds of training, over all attempts."),
    }
    return columns | {
        column: _searched_column(column.removeprefix(PREFIX), trials[column]) for column in _searched(trials)
    }


def _searched_column(name: str, values: pd.Series) -> Any:
    declared = HYPERPARAMETERS.get(name)
    label, doc = (declared.title, declared.doc) if declared else (safe_text.one_line(name), None)
    if not pd.api.types.is_numeric_dtype(values):
        return st.column_config.TextColumn(label, help=doc)
    small = values.abs().max() < 0.01
    whole = (values.dropna() % 1 == 0).all()
    return st.column_config.NumberColumn(label, help=doc, format="%.2e" if small else "%d" if whole else "%.3f")


# Live: a card for each trial under way, with a verdict, what needs a look first.

MOST_CARDS = 12


def draw_live(cards: Sequence[Card], limit: float) -> None:
    """Draw the live cards; nothing where no trial is under way."""
    if not cards:
        return
    st.subheader("Under way", anchor=False)
    with st.grid(min(4, max(2, len(cards))), min_column_width=220):
        for card in cards[:MOST_CARDS]:
            with st.container(border=True):
                _card(card, limit)
    more = len(cards) - MOST_CARDS
    st.caption(
        f"{f'{more} more are under way. ' if more > 0 else ''}Near the limit: KL from {NEAR:.0%} of the guard's "
        f"{limit:g} nats on. Stalled: silent for {TIMES_USUAL:g} usual steps and at least {LEAST_SECONDS:g} s. "
        "Interrupted: no controller lives; the next run takes it up."
    )


def _card(card: Card, limit: float) -> None:
    glyph, colour = MARKS[card.health]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.html(style.heading(card.number), width="content")
        st.badge(f"{glyph} {card.health}", color=colour)
    st.progress(card.progress, text=f"{card.progress:.0%} of its episodes")
    st.text("\n".join(lines(card, limit)))


def lines(card: Card, limit: float) -> list[str]:
    """Return what a card says, line by line."""
    kl = "no KL yet" if card.kl is None else f"KL {card.kl:.1f} of {limit:g} {METRICS['eval/kl'].unit}"
    reward = "" if card.reward is None else f"eval reward {card.reward:.2f}"
    score = "" if card.score is None else f"score {card.score:.2f}"
    since = (
        f"last report {duration(card.silent)} ago" if card.step is not None else f"begun {duration(card.silent)} ago"
    )
    usual = "" if card.usual is None else f", usually {card.usual:.1f} s a step"
    step = "" if card.step is None else f"step {card.step}, "
    return [line for line in (kl, ", ".join(part for part in (reward, score) if part), f"{step}{since}{usual}") if line]


# The first page: all studies, then the chosen one. How it stands, what runs, what ended why, what to do next.

BASELINE_FROM = 8
"""Trials whose first evaluation is the SFT policy's: it is the same in all of them."""


def page() -> None:
    """Draw the page."""
    with common.problems_told():
        store = common.open_store()
        section(store)
        name = common.choose_study(store)
        if name is not None:
            _study(store, data.snapshot(store, name))


def _study(store: Store, snapshot: Snapshot) -> None:
    head, below = st.container(), st.container()
    chosen = _chosen(snapshot) if snapshot.view.trials else ()
    live, latest = st.fragment(_live, run_every=common.refresh_every(snapshot.view)), Latest()
    # The fragment's first run draws what the page has read just now; its later ones read anew.
    live(snapshot, [snapshot], head, chosen, latest)
    with below:
        common.save_live(latest)
    if _is_large(snapshot):
        draw_table(snapshot, chosen)


def _is_large(snapshot: Snapshot) -> bool:
    return len(snapshot.view.trials) > MOST_LIVE


def _chosen(snapshot: Snapshot) -> tuple[int, ...]:
    st.subheader("Trials", anchor=False)
    help_text = "The table shows these, and other pages, too. Nothing chosen: the table shows all."
    return common.choose_trials(snapshot, help_text)


def _live(
    drawn: Snapshot, fresh: list[Snapshot], head: DeltaGenerator, chosen: tuple[int, ...], latest: Latest
) -> None:
    """Draw what changes while the study runs; `drawn` is what the rest shows, `head` the place above the controls."""
    with common.problems_told():
        store = common.open_store()
        snapshot = fresh.pop() if fresh else data.snapshot(store, drawn.view.row.name)
        begun = bool(snapshot.view.trials)
        if snapshot.view.state != drawn.view.state or begun != bool(drawn.view.trials):
            st.rerun()  # the whole page: with or without its timer, controls and sections
        baseline = _baseline(store, snapshot)
        with head:
            draw_summary(snapshot, baseline)
            st.text(common.freshness(snapshot.view))
            if begun:
                under_way = _live_cards(store, snapshot)
                draw_live(under_way, snapshot.view.spec.kl_limit)
                _recommendation(store, snapshot.view)
                st.subheader("What to do next", anchor=False)
                next_steps(snapshot, under_way)
                search.draw(store, snapshot, baseline, latest)
        if begun and not _is_large(drawn):
            draw_table(snapshot, chosen)
        elif (more := snapshot.ended - drawn.ended) > 0 and st.button(
            f"{more} more ended: draw the table again", icon=":material/refresh:"
        ):
            st.rerun()


def _recommendation(store: Store, view: StudyView) -> None:
    """Say what the study recommends and how sure that is, once its search has ended."""
    told = recommendation(store, view) if view.state == "finished" or view.confirming else None
    if told is None:
        return
    st.subheader("What to launch", anchor=False)
    st.markdown(told)
    if not view.confirming:
        st.code(data.command(["confirm", view.row.name]), language=None)


def _live_cards(store: Store, snapshot: Snapshot) -> list[Card]:
    row = snapshot.view.row
    going = [trial.number for trial in snapshot.view.trials if not trial.status.is_final]
    steps = data.curves(store, snapshot, health.READ, numbers=going)
    return health.cards(
        snapshot.view.trials, steps, limit=snapshot.view.spec.kl_limit, now=row.read_at or row.created_at
    )


def _baseline(store: Store, snapshot: Snapshot) -> float | None:
    first = [row.number for row in snapshot.view.trials[:BASELINE_FROM]]
    steps = data.curves(store, snapshot, ("eval/reward",), numbers=first, evaluations_only=True)
    return data.baseline(steps)

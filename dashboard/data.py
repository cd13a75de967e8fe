"""Read the store for the pages, as pandas frames.

Trials are named by number everywhere. A refresh reads only steps that are new (`StepCache`).
Caches are keyed by strings and integers: the store's identity, the study, the metrics.
"""

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import streamlit as st
from sqlalchemy import URL

from dashboard import safe_text, style
from ppo_core.errors import PPOTunerError, StoreError
from ppo_core.output import without_secrets
from ppo_core.report import TokenReadings
from tuner.confirm.answer import decided
from tuner.confirm.headline import Headline, on_fresh_seeds
from tuner.confirm.result import Confirmation, confirmations
from tuner.environment import to_copy
from tuner.judge.results import State, StudyView, as_view, kl_prunings, read_study
from tuner.judge.results import under_budget as judged_under
from tuner.store import DEFAULT_STORAGE, LEASE_SECONDS, STEP_KEYS, Store, StudyRow, TrialRow, schema
from tuner.study.status import Origin, Status

MAX_COMMAND_CHARS = 1_000
"""Most characters of a command that is shown."""
PARAMS = "params_"
"""Prefix of searched hyperparameters in a snapshot's columns."""
_NUMBERS = ("value", "value_se", "kl", "value_step", "end_reward", "end_kl", "fork_step")
"""Columns of trials that may lack a number."""
_COLUMNS = (
    *("number", "status", "episodes", "seconds", *_NUMBERS),
    *("shown_status", "rule", "reason", "stop_step", "total_episodes"),
)
_SAMPLE_COLUMNS = ["trial", "step", "prompt_index", "prompt", "response", "reward", "kl", "length", "parts"]


class StepCache:
    """Cached step rows of one study for one set of metrics, so that a refresh reads only new ones.

    Thread-safe. A new attempt replaces the rows after its checkpoint, so a trial with a new attempt is read again from
    the start. Other trials are read from their newest row on, which may have got its evaluation since, and only if they
    have progressed.
    """

    def __init__(self, metrics: Sequence[str], *, evaluations_only: bool = False) -> None:
        self._metrics, self._evaluations_only = tuple(metrics), evaluations_only
        self._lock = threading.Lock()
        self._progress: dict[int, tuple[int, int, float]] = {}
        """Each trial's attempts, episodes and seconds when last read; every new or changed row changes one of them."""
        self._frame = self._steps([], {})

    def read(self, store: Store, rows: Sequence[TrialRow]) -> pd.DataFrame:
        """Return `trial` (its number), `step`, `episode`, `at` and the metrics of the trials `rows`, in order."""
        with self._lock:
            self._update(store, rows)
            return self._frame[self._frame["trial"].isin([row.number for row in rows])].reset_index(drop=True)

    def _update(self, store: Store, rows: Sequence[TrialRow]) -> None:
        changed = [row for row in rows if self._progress.get(row.number) != _progress(row)]
        if not changed:
            return
        restarted = [row.number for row in changed if self._is_restarted(row)]
        kept = self._frame[~self._frame["trial"].isin(restarted)] if restarted else self._frame
        newest = kept.groupby("trial")["step"].max()
        by_newest: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for row in changed:
            by_newest[int(newest.get(row.number, 0))][row.id] = row.number
        is_changed = kept["trial"].isin([row.number for row in changed])
        kept = kept[~(is_changed & (kept["step"] == kept["trial"].map(newest)))]
        new = [
            self._steps(
                store.steps(numbers, self._metrics, after_step=step - 1, evaluations_only=self._evaluations_only),
                numbers,
            )
            for step, numbers in by_newest.items()
        ]
        parts = [frame for frame in (kept, *new) if len(frame)] or [kept]
        self._frame = pd.concat(parts).sort_values(["trial", "step"], kind="stable", ignore_index=True)
        self._progress |= {row.number: _progress(row) for row in changed}

    def _is_restarted(self, row: TrialRow) -> bool:
        attempts, episodes, _ = self._progress.get(row.number, _progress(row))
        return attempts != row.attempts or row.episodes < episodes

    def _steps(self, rows: list[dict[str, Any]], numbers: Mapping[int, int]) -> pd.DataFrame:
        """Return stored step rows as a frame; `numbers` are the trials' numbers by id."""
        frame = pd.DataFrame.from_records(rows, columns=[*STEP_KEYS, *self._metrics])
        frame["trial_id"] = frame["trial_id"].map(numbers)
        whole = dict.fromkeys(("trial_id", "step", "episode"), int)
        return frame.astype(whole | dict.fromkeys(("at", *self._metrics), float)).rename(columns={"trial_id": "trial"})


def _progress(row: TrialRow) -> tuple[int, int, float]:
    return row.attempts, row.episodes, row.seconds


def _trial_frame(rows: Sequence[TrialRow]) -> pd.DataFrame:
    values = [
        {name: getattr(row, name) for name in ("number", "status", "episodes", "seconds", *_NUMBERS)}
        | {"shown_status": style.status_text(row), "total_episodes": row.config["total_episodes"]}
        | ({"rule": "", "reason": ""} if (why := row.reason) is None else {"rule": why.rule, "reason": why.message})
        | {"stop_step": row.reason and row.reason.step}
        for row in rows
    ]
    frame = pd.DataFrame(values, columns=_COLUMNS)
    frame = frame.astype(dict.fromkeys((*_NUMBERS, "stop_step"), float))
    searched = pd.DataFrame([row.params for row in rows], index=frame.index).add_prefix(PARAMS)
    return pd.concat([frame, searched], axis=1)


@dataclass(frozen=True)
class Snapshot:
    """A study and its trials as they stood at one moment."""

    view: StudyView
    trials: pd.DataFrame
    """One row per trial by number. `value` is eval reward, `kl` eval KL in nats per response, read at `value_step`;
    `end_reward` and `end_kl` are those of its last evaluation; `shown_status` tells interrupted trials from running
    ones, too; `rule`, `reason` and `stop_step` say why and where it ended early;
    up to `fork_step` a fork's steps are its parent's; `params_*` are the searched values (missing: not searched)."""
    confirmations: tuple[Confirmation, ...] = ()
    """Confirmations under the study's own KL budget, the shortest runs first; empty under another budget."""

    @classmethod
    def of(cls, view: StudyView, confirmations: tuple[Confirmation, ...] = ()) -> "Snapshot":
        """Return the snapshot of a study's trials as they are in `view`."""
        return cls(view, _trial_frame(view.trials), confirmations)

    @property
    def runs(self) -> tuple[TrialRow, ...]:
        """The trials and the confirming runs."""
        return *self.view.trials, *self.view.confirming

    @property
    def kl_pruned(self) -> list[int]:
        """Numbers of the trials that were pruned for their KL."""
        return sorted(number for numbers in kl_prunings(self.view.trials).values() for number in numbers)

    @property
    def defaults(self) -> list[int]:
        """The two trials to look at first: the answer and the reference, or the runner-up if they are one."""
        done, best = decided(list(self.confirmations)), self.view.best()
        chosen = [] if done is None else [one.trial for one in (done.choice, done.rival) if one is not None]
        answer = [best] if best is not None and not chosen else chosen[:1]
        reference = [row for row in self.view.trials if row.origin is Origin.REFERENCE]
        sound = [row for row in self.view.trials if row.status not in (Status.PRUNED, Status.FAILED)]
        others = sorted(sound, key=lambda row: -(row.value if row.value_step and row.value is not None else -math.inf))
        order = [*answer, *reference, *chosen[1:], *others, *self.view.trials]
        return list(dict.fromkeys(row.number for row in order))[:2]

    def headline(self, row: TrialRow) -> Headline:
        """Return a trial's one reward and KL (see `tuner.confirm.headline`)."""
        return Headline(row, on_fresh_seeds(self.confirmations).get(row.number))


def total(view: StudyView) -> int | None:
    """Return the planned number of trials, at least those that exist; None: limited by the budget alone."""
    return None if view.spec.trials is None else max(view.spec.trials, len(view.trials))


def storage() -> str:
    """Return the store's URL: PPO_TUNER_STORAGE, else the default file below the current folder."""
    return os.environ.get("PPO_TUNER_STORAGE") or DEFAULT_STORAGE


def command(words: Sequence[str]) -> str:
    """Return a `ppo-tuner` command on this store to copy, safe to show; a password in the store's URL is left out."""
    url = storage()
    where = () if url == DEFAULT_STORAGE else ("--storage", without_secrets(url))
    return safe_text.one_line(to_copy([*words, *where]), MAX_COMMAND_CHARS)


def open_store(url: str) -> Store:
    """Return the open store at `url`.

    Raises:
        StoreError: it does not exist, cannot be reached, is not ours, or has another schema version.
    """
    return _opened(url, _identity(schema.parse_url(url)))


def is_missing(url: str) -> bool:
    """Return True if `url` names an SQLite file that does not exist."""
    try:
        parsed = schema.parse_url(url)
    except StoreError:
        return False
    return parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists()


def studies(store: Store) -> list[StudyRow]:
    """Return the studies, running ones first, then the newest."""
    return sorted(store.studies(), key=lambda study: (study.has_controller, study.id), reverse=True)


def view(store: Store, study: StudyRow) -> StudyView | None:
    """Return a study with its trials for the list of studies; None if this version cannot read it."""
    try:
        return as_view(study, tuple(store.trials(study)))
    except StoreError:
        raise
    except PPOTunerError:
        return None


def snapshot(store: Store, name: str) -> Snapshot:
    """Return the current state of the study `name`.

    Raises:
        StudyError: there is none.
        ConfigError: its stored spec is of another version.
    """
    study = read_study(store, name)
    return Snapshot.of(study, tuple(confirmations(store, study)) if study.confirming else ())


def under_budget(store: Store, snapshot: Snapshot, kl_budget: float) -> Snapshot:
    """Return a study with its trials valued under another KL budget, from their stored evaluations."""
    if kl_budget == snapshot.view.spec.kl_budget:
        return snapshot
    key = f"{stamp(store, snapshot, {row.number for row in snapshot.view.trials})}|{kl_budget}"
    judged = _judged(key, kl_budget, store, snapshot)
    return Snapshot(replace(judged.view, row=snapshot.view.row, confirming=snapshot.view.confirming), judged.trials)


def curves(
    store: Store,
    snapshot: Snapshot,
    metrics: Sequence[str],
    *,
    numbers: Collection[int] | None = None,
    evaluations_only: bool = False,
) -> pd.DataFrame:
    """Return `trial`, `step`, `episode`, `at` (seconds since the epoch) and the metrics of every step, in order, or of
    those few with an evaluation. NaN: not measured, or not a number.

    `numbers` are the trials and confirming runs to read; None: all trials.
    """
    wanted = set(numbers or ())  # often all of thousands, as a list
    chosen = snapshot.view.trials if numbers is None else [row for row in snapshot.runs if row.number in wanted]
    return _step_cache(_source(store, snapshot.view.row), tuple(metrics), evaluations_only).read(store, chosen)


def stamp(store: Store, snapshot: Snapshot, numbers: Collection[int]) -> str:
    """Return a cache key for figures that changes whenever these trials change."""
    wanted = set(numbers)
    changing = [
        (row.number, *_progress(row), style.status_text(row), row.ended_at)
        for row in snapshot.view.trials
        if row.number in wanted
    ]
    return f"{_source(store, snapshot.view.row)}|{hash(tuple(changing))}"


def samples(store: Store, snapshot: Snapshot, numbers: tuple[int, ...]) -> pd.DataFrame:
    """Return all stored samples of these trials and confirming runs.

    `parts` are the reward's parts by name. Token readings are read by `tokens`.
    """
    number_of = {row.id: row.number for row in snapshot.runs if row.number in numbers}
    rows = [{**row, "trial": number_of[row["trial_id"]]} for row in store.samples(number_of)]
    return pd.DataFrame(rows, columns=_SAMPLE_COLUMNS).astype({"reward": float, "kl": float})


def tokens(store: Store, snapshot: Snapshot, number: int, step: int, prompt_index: int) -> TokenReadings | None:
    """Return the token readings of one sample of the trial or confirming run `number`; None: it has none."""
    trial_id = next((row.id for row in snapshot.runs if row.number == number), None)
    return None if trial_id is None else store.sample_tokens(trial_id, step, prompt_index)


def sft_reward(curves: pd.DataFrame) -> float | None:
    """Return eval reward before training (the SFT policy's), or None where nothing was evaluated yet."""
    before = curves.loc[curves["step"] == 0, "eval/reward"].dropna()
    return None if before.empty else float(before.mean())


@st.cache_resource(max_entries=8, show_spinner=False, on_release=Store.close)
def _opened(url: str, identity: str) -> Store:
    return Store.open(url)


def _identity(url: URL) -> str:
    """Identify a file, also if another one replaces it: an open store keeps its inode from being reused."""
    if url.get_backend_name() != "sqlite" or not Path(url.database or "").exists():
        return ""
    status = Path(url.database or "").stat()
    return f"{status.st_dev}:{status.st_ino}"


def _source(store: Store, study: StudyRow) -> str:
    return f"{store.url}|{_identity(store.url)}|{study.id}|{study.created_at}"


@st.cache_resource(max_entries=12, show_spinner=False)
def _step_cache(source: str, metrics: tuple[str, ...], evaluations_only: bool) -> StepCache:
    return StepCache(metrics, evaluations_only=evaluations_only)


@st.cache_resource(max_entries=8, show_spinner=False)
def _judged(key: str, kl_budget: float, _store: Store, _snapshot: Snapshot) -> Snapshot:
    return Snapshot.of(judged_under(_store, _snapshot.view, kl_budget))


Shown = State | Literal["stopping", "stalled"]

WORDS: Mapping[Shown, str] = {
    "running": "▶ running",
    "stopping": "◼ stopping",
    "paused": "‖ paused",
    "finished": "✓ finished",
    "unfinished": "■ not running",
    "stalled": "◌ not responding",
}


def shown_state(view: StudyView) -> Shown:
    """Return the study's state.

    `stalled`: its controller is alive but has been silent for a while; `stopping`: it ends after each running trial's
    current step.
    """
    if view.state != "running":
        return view.state
    if (silence(view) or 0.0) > LEASE_SECONDS:
        return "stalled"
    return "stopping" if view.row.is_stopping else "running"


def silence(view: StudyView) -> float | None:
    """Return the seconds since its controller's last sign of life, by the store's clock; None if there is none."""
    if view.row.lease_renewed_at is None:
        return None
    now = time.time() if view.row.read_at is None else view.row.read_at
    return max(0.0, now - view.row.lease_renewed_at)


def last_sign(view: StudyView) -> float:
    """Return the time of the study's last activity, in seconds since the epoch."""
    ended = [row.ended_at for row in view.trials if row.ended_at is not None]
    known = [view.row.lease_renewed_at, view.row.finished_at, view.row.paused_at, *ended]
    return max([view.row.created_at, *(at for at in known if at is not None)])

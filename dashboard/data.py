"""What the pages show, read from the store as pandas frames. Nothing else of the dashboard reads it.

Trials are named by number everywhere. A refresh reads only what is new (see `trial_cache` and `step_cache`).
Caches are keyed by strings and integers: the store's identity, the study, the metrics.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import streamlit as st
from sqlalchemy import URL

from dashboard import untrusted
from dashboard.step_cache import StepCache
from dashboard.trial_cache import TrialCache
from ppo_core.errors import PPOTunerError, StoreError
from ppo_core.report import TokenReadings
from tuner.cli.arguments import to_copy
from tuner.results import StudyView, as_view, kl_prunings, read_study
from tuner.store import DEFAULT_STORAGE, Store, StudyRow, schema

CURVES = ("objective/kl_exact", "objective/scores", "eval/reward", "eval/kl")
"""Step metrics that the pages draw."""
RESTING_SECONDS = 15
"""For how long a study that nothing runs is taken to be as it was, in the list of all studies."""

MOST_OF_A_COMMAND = 1_000
"""Characters."""
_SAMPLE_COLUMNS = ["trial", "step", "prompt_index", "prompt", "response", "reward", "kl", "length", "parts"]


@dataclass(frozen=True)
class Snapshot:
    """A study and its trials as they stood at one moment."""

    view: StudyView
    trials: pd.DataFrame
    """One row a trial, by number. `value` is eval reward, `kl` eval KL in nats per response; `shown_status` tells
    interrupted trials from running ones; `rule`, `reason` and `stop_step` say why and where it ended
    early; `params_*` are the searched values (missing: not searched here)."""

    @property
    def total(self) -> int:
        """Trials that the study is to have; more where it once was to have more."""
        return max(self.view.spec.trials, len(self.view.trials))

    @property
    def ended(self) -> int:
        """How many of all its trials have ended, however they did."""
        return sum(row.status.is_final for row in self.view.trials)

    @property
    def kl_pruned(self) -> list[int]:
        """Numbers of the trials that were pruned for their KL."""
        return sorted(number for numbers in kl_prunings(self.view.trials).values() for number in numbers)

    @property
    def telling(self) -> list[int]:
        """Trials worth comparing first: all listed ones; else the reference, the best, the latest pruned for KL."""
        rows, best = self.view.trials, self.view.best()
        if self.view.spec.listed:
            return [row.number for row in rows]
        picked = [row.number for row in rows if row.origin == "reference"][:1]
        picked += [best.number] if best else []
        picked += self.kl_pruned[-1:]
        return list(dict.fromkeys(picked)) or [row.number for row in rows[:3]]


def storage() -> str:
    """Return the store's URL: PPO_TUNER_STORAGE, else the default file below the current folder."""
    return os.environ.get("PPO_TUNER_STORAGE") or DEFAULT_STORAGE


def command(words: Sequence[str]) -> str:
    """Return a `ppo-tuner` command on this store to copy, safe to show; a password in the store's URL is left out."""
    url = storage()
    where = () if url == DEFAULT_STORAGE else ("--storage", schema.without_secrets(url))
    return untrusted.one_line(to_copy([*words, *where]), MOST_OF_A_COMMAND)


def open_store(url: str) -> Store:
    """Return the open store at `url`.

    Raises:
        StoreError: there is none, it cannot be reached, is not ours, or has another schema version.
    """
    return _opened(url, _identity(schema.parse_url(url)))


def is_missing(url: str) -> bool:
    """Whether `url` names an SQLite file that does not exist."""
    try:
        parsed = schema.parse_url(url)
    except StoreError:
        return False
    return parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists()


def stored(name: str, url: str) -> StudyRow | None:
    """Return the study `name` of the store at `url`; None: it has none, or there is no store yet.

    Raises:
        StoreError: the store cannot be opened.
    """
    if is_missing(url):
        return None
    return next((study for study in open_store(url).studies() if study.name == name), None)


def studies(store: Store) -> list[StudyRow]:
    """Return the studies, the one to look at first in front: running ones, then the newest, archived ones last."""
    return sorted(store.studies(), key=lambda study: (study.is_held, study.archived_at is None, study.id), reverse=True)


def view(store: Store, study: StudyRow) -> StudyView | None:
    """Return a study with its trials, for the list of all; None: this program cannot read what is stored of it.

    One that nothing runs is read again after `RESTING_SECONDS`, or at once where its row changed.
    """
    try:
        if study.is_held:
            return as_view(study, _trial_cache(_source(store, study)).read(store, study)[0])
        changes = f"{study.finished_at}|{study.paused_at}|{study.archived_at}"
        return _resting_view(_source(store, study), study.name, changes, store)
    except StoreError:
        raise
    except PPOTunerError:
        return None


def snapshot(store: Store, name: str) -> Snapshot:
    """Return the study `name` as it stands.

    Raises:
        StudyError: there is none.
        ConfigError: its stored spec is of another version.
    """
    row = store.study(name)
    rows, frame = _trial_cache(_source(store, row)).read(store, row)
    return Snapshot(as_view(row, rows), frame)


def curves(
    store: Store,
    snapshot: Snapshot,
    metrics: Sequence[str] = CURVES,
    *,
    numbers: Collection[int] | None = None,
    evaluations_only: bool = False,
) -> pd.DataFrame:
    """Return `trial`, `step`, `episode`, `at` (seconds since the epoch) and the metrics of every step, in order.

    Args:
        store: Where they are.
        snapshot: The study.
        metrics: By their declared names. NaN: not measured, or not a number.
        numbers: Of these trials alone; None: of all.
        evaluations_only: Only the steps that have an evaluation, which are few.
    """
    rows = snapshot.view.trials
    chosen = rows if numbers is None else [row for row in rows if row.number in set(numbers)]
    study = snapshot.view.row
    return _step_cache(_source(store, study), tuple(metrics), evaluations_only).read(store, chosen)


def stamp(store: Store, snapshot: Snapshot, numbers: Collection[int]) -> str:
    """Return a text that changes whenever what is drawn of the trials `numbers` may have: figures are kept by it."""
    drawn = set(numbers)
    rows = [row for row in snapshot.view.trials if row.number in drawn]
    changing = [(row.number, row.attempts, row.episodes, row.seconds, row.shown_status, row.ended_at) for row in rows]
    return f"{_source(store, snapshot.view.row)}|{hash(tuple(changing))}"


def samples(store: Store, snapshot: Snapshot, numbers: tuple[int, ...]) -> pd.DataFrame:
    """Return every kept sample of the trials `numbers`: what it answered to which prompt, at which step.

    `parts` are the reward's by name. Token readings are not read here: see `tokens`.
    """
    number_of = {row.id: row.number for row in snapshot.view.trials if row.number in numbers}
    rows = [{**row, "trial": number_of[row["trial_id"]]} for row in store.samples(number_of)]
    return pd.DataFrame(rows, columns=_SAMPLE_COLUMNS).astype({"reward": float, "kl": float})


def tokens(store: Store, snapshot: Snapshot, number: int, step: int, prompt_index: int) -> TokenReadings | None:
    """Return the token readings of one sample of trial `number`; None: it has none."""
    trial_id = next((row.id for row in snapshot.view.trials if row.number == number), None)
    return None if trial_id is None else store.sample_tokens(trial_id, step, prompt_index)


def baseline(curves: pd.DataFrame) -> float | None:
    """Return eval reward before training (the SFT policy's), or None where nothing was evaluated yet."""
    before = curves.loc[curves["step"] == 0, "eval/reward"].dropna()
    return None if before.empty else float(before.mean())


@st.cache_resource(max_entries=8, show_spinner=False, on_release=Store.close)
def _opened(url: str, identity: str) -> Store:
    return Store.open(url)


def _identity(url: URL) -> str:
    """Tell a file from one that later takes its place: an open store keeps its inode from being used again."""
    if url.get_backend_name() != "sqlite" or not Path(url.database or "").exists():
        return ""
    status = Path(url.database or "").stat()
    return f"{status.st_dev}:{status.st_ino}"


def _source(store: Store, study: StudyRow) -> str:
    return f"{store.url}|{_identity(store.url)}|{study.id}|{study.created_at}"


@st.cache_resource(max_entries=8, show_spinner=False)
def _trial_cache(source: str) -> TrialCache:
    return TrialCache()


@st.cache_resource(max_entries=12, show_spinner=False)
def _step_cache(source: str, metrics: tuple[str, ...], evaluations_only: bool) -> StepCache:
    return StepCache(metrics, evaluations_only=evaluations_only)


@st.cache_resource(max_entries=100, ttl=RESTING_SECONDS, show_spinner=False)
def _resting_view(source: str, name: str, changes: str, _store: Store) -> StudyView:
    return read_study(_store, name)

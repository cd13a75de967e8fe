"""Decide which trial of a study runs next, and when the study is finished, from its spec and its trials alone.

Every trial runs whole: trials that keep their own pace stand at about the same KL, and nothing early in a run tells
which will be the best. A trial starts while the budget has room for one of full length, or is not spent if it is a
time; one that ended earlier is charged what it used. A search ends before its budget is spent where another trial is
not worth its cost (`tuner.search.worth`), and where its space has no other point.

The same trials, in order of their numbers, give the same choice, so a killed study continues as it would have.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from ppo_core.config.declare import HyperValue
from tuner.judge.scoring import charged, charged_seconds, seconds_of_whole
from tuner.search.worth import LEAST_GAIN, ends_early
from tuner.store import TrialRow
from tuner.study.space import points
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Status

Rows = Sequence[TrialRow]

MOST_MERGED = 8  # most points of a search that are the same configuration: mini-batches are at most their batch


@dataclass(frozen=True)
class New:
    """Start a new trial."""

    params: Mapping[str, HyperValue] | None
    """Its searched values; None: proposed by the sampler."""
    origin: Origin
    label: str = ""


def choose(spec: StudySpec, rows: Rows, busy: Container[int]) -> int | New | None:
    """Return what runs next, or None: the number of an interrupted trial, else of a waiting one, else a new one.

    `busy` are the trials that a worker has, to train them or to read them.
    """
    if due := [row for row in runnable(spec, rows) if row.number not in busy]:
        return min(due, key=lambda row: (row.status is Status.WAITING, row.number)).number
    return _new(spec, rows) if _may_start(spec, rows) else None


def is_finished(spec: StudySpec, rows: Rows) -> bool:
    """Return True if all trials have ended, and none is to start."""
    return not unended(spec, rows) and not _may_start(spec, rows)


def as_stored(params: Mapping[str, HyperValue], config: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
    """Return a trial's searched values as its configuration has them (a mini-batch is at most its batch)."""
    return {name: config.get(name, value) for name, value in params.items()}


def counting_trials(rows: Rows) -> list[TrialRow]:
    """Return the trials that count towards the study's total."""
    return [row for row in rows if row.counts_toward_total]


def left_out(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    """Return the unended trials beyond a total that was lowered."""
    beyond = [] if spec.trials is None else counting_trials(rows)[spec.trials :]
    return [row for row in beyond if not row.status.is_final]


def unended(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    """Return the trials that keep a study unfinished."""
    beyond = {row.number for row in left_out(spec, rows)}
    return [row for row in rows if not row.status.is_final and row.number not in beyond]


def runnable(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    """Return the unended trials but for paused ones: waiting, interrupted, and those that a worker has."""
    return [row for row in unended(spec, rows) if row.status is not Status.PAUSED]


def paused(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    return [row for row in unended(spec, rows) if row.status is Status.PAUSED]


def _may_start(spec: StudySpec, rows: Rows) -> bool:
    return _has_room(spec, rows) and not ends_early(spec, rows) and not is_exhausted(spec, rows)


def why_early(spec: StudySpec, rows: Rows) -> str:
    """Return why a finished study has ended with room for another trial, as a sentence; empty: it has none."""
    if not _has_room(spec, rows):
        return ""
    if ends_early(spec, rows):
        most = f"{LEAST_GAIN:.1%} of what the best trial has gained"
        return f"The search ended early: another trial promises less than {most}."
    return "The search ended early: every point of its space has been tried." if is_exhausted(spec, rows) else ""


def _has_room(spec: StudySpec, rows: Rows) -> bool:
    """Return True if total and budget allow another trial, whole unless the budget is a time, as unended ones are."""
    counting, whole = counting_trials(rows), spec.total_episodes
    if spec.trials is not None and len(counting) >= spec.trials:
        return False
    if spec.budget_time is not None:
        usual = seconds_of_whole(counting, whole)
        seconds = (charged_seconds(row) if row.status.is_final else max(row.seconds, usual) for row in counting)
        return sum(seconds) < spec.budget_time.seconds
    committed = sum(charged(row, whole) if row.status.is_final else whole for row in counting)
    return committed + whole <= (spec.budget * whole if isinstance(spec.budget, float) else math.inf)


def point(spec: StudySpec, params: Mapping[str, HyperValue]) -> tuple[HyperValue, ...]:
    """Return a trial's searched values as its configuration has them, by which trials are told apart."""
    config = spec.config(params).to_dict()
    return tuple(config.get(name) for name in spec.search)


def tried(spec: StudySpec, rows: Rows) -> set[tuple[HyperValue, ...]]:
    """Return the points of the trials that count; a baseline is none of the search's if it states more than a point."""
    own = [row for row in counting_trials(rows) if row.informs_sampler or row.params.keys() <= spec.search.keys()]
    return {tuple(row.config.get(name) for name in spec.search) for row in own}


def is_exhausted(spec: StudySpec, rows: Rows) -> bool:
    """Return True if a search of few points has had each of them."""
    if spec.listed or len(counting_trials(rows)) < len(spec.starts) + 1 + bool(spec.baseline):
        return False
    every = points(spec.search)
    if every is None or len(every) > MOST_MERGED * len(counting_trials(rows)):
        return False
    known = tried(spec, rows)
    return all(point(spec, params) in known for params in every)


def _new(spec: StudySpec, rows: Rows) -> New:
    count = len(counting_trials(rows))
    if spec.listed:
        return New(spec.listed[count].params, Origin.LISTED, spec.listed[count].label)
    if count == 0:
        return New(spec.reference_params(), Origin.REFERENCE)
    if spec.baseline and not any(row.origin is Origin.BASELINE for row in rows):
        return New(spec.baseline_params(), Origin.BASELINE)
    started = sum(row.origin is Origin.LISTED for row in counting_trials(rows))
    if started < len(spec.starts):
        start = spec.starts[started]
        return New(spec.params_with(start.params), Origin.LISTED, start.title)
    return New(None, Origin.SAMPLED)

"""Decide which trial of a study runs next, and when the study is finished, from its spec and its trials alone.

| strategy  | a new trial runs                                   | and continues past its rung                        |
|-----------|----------------------------------------------------|----------------------------------------------------|
| full      | to its end                                         |                                                    |
| early_cut | to its rung, 1/10 of its episodes                  | if it is the best that is paused there, 1 in 6     |

With early_cut a free worker finishes the best trial at the rung when one is due, else starts another. Trials that
people ask for (forks, enqueued ones) run to their ends. Schedules (learning rate, β) span the whole length from the
first step on, so a promoted trial continues as if it had never been paused. A constant cut is hard to beat
(arXiv 2404.04111); docs/benchmarks.md has our measurements.

No state is kept between calls: the same trials give the same choice, so a killed study continues as it would have. A
study's trials are in order of their numbers, which start at 0 and have no gaps.
"""

import functools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from tuner.judge.scoring import charged
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Status

SHARE = 0.1
"""Position of the rung, as a share of a trial's episodes."""
LEAST_AT_RUNG = 2
"""Fewest iterations before the rung: the rollouts of the first one are of the policy as it was."""
ONE_IN = 6
"""One in this many trials that reach the rung is finished."""
FINISH_SHARE = 0.2
"""Share of the budget reserved for finishing trials; no trial starts once only this is left."""

Rows = Sequence[TrialRow]


@dataclass(frozen=True)
class Resume:
    """Run a waiting or interrupted trial."""

    number: int


@dataclass(frozen=True)
class Promote:
    """Finish a trial that is paused at its rung."""

    number: int


@dataclass(frozen=True)
class New:
    """Start a new trial."""

    params: Mapping[str, HyperValue] | None
    """Its searched values; None: proposed by the sampler."""
    origin: Origin
    label: str = ""


def choose(spec: StudySpec, rows: Rows, busy: Container[int]) -> Resume | Promote | New | None:
    """Return the next trial to run, or None if there is none now.

    Interrupted trials come first, then waiting ones, then a trial to promote or a new one, as far as the budget
    allows. `busy` are the trials that a worker has, to train them or to read them on the test prompts.
    """
    if due := [row for row in runnable(spec, rows) if row.number not in busy]:
        return Resume(min(due, key=lambda row: (row.status is Status.WAITING, row.number)).number)
    promoted = _promoted(spec, rows, busy)
    if promoted is not None:
        return Promote(promoted.number)
    return _new(spec, rows) if _may_start(spec, rows) else None


def is_finished(spec: StudySpec, rows: Rows) -> bool:
    """Return True if all trials have ended or are at their rung, and none is to start or be promoted."""
    return not unended(spec, rows) and _promoted(spec, rows) is None and not _may_start(spec, rows)


def as_stored(params: Mapping[str, HyperValue], config: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
    """Return a trial's searched values as its configuration has them (a mini-batch is at most its batch)."""
    return {name: config.get(name, value) for name, value in params.items()}


def lengths(config: Mapping[str, HyperValue]) -> tuple[int, int | None]:
    """Return a trial's total episodes, and those at its rung; None: it ends before it.

    The rung is the end of the first iteration at or after SHARE of all, and at least the second.
    """
    return _lengths(tuple((name, value) for name in _LENGTH if (value := config.get(name)) is not None))


_LENGTH = ("total_episodes", "batch_size", "mini_batch_size", "num_mini_batches", "per_device_train_batch_size",
           "gradient_accumulation_steps")  # fmt: skip


@functools.lru_cache(maxsize=1024)  # reading a configuration dominates the time of a choice, and few differ in these
def _lengths(values: tuple[tuple[str, HyperValue], ...]) -> tuple[int, int | None]:
    config = PPOConfig.from_dict(dict(values))
    batch = config.batch_sizes(world_size=1).batch_size
    iterations = max(LEAST_AT_RUNG, math.ceil(SHARE * config.total_episodes / batch - 1e-9))
    return config.whole_episodes(), iterations * batch if iterations < config.num_iterations() else None


def own_rung(spec: StudySpec, row: TrialRow) -> int | None:
    """Return the episodes at which the strategy pauses a trial, or None if it runs to its end."""
    is_whole = not row.counts or row.is_promoted
    return None if is_whole or not spec.pauses_trials else lengths(row.config)[1]


def counting_trials(rows: Rows) -> list[TrialRow]:
    """Return the trials that count towards the study's total."""
    return [row for row in rows if row.counts]


def left_out(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    """Return the unended trials beyond a total that was lowered."""
    beyond = [] if spec.trials is None else counting_trials(rows)[spec.trials :]
    return [row for row in beyond if not row.is_done]


def unended(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    """Return the trials that keep a study unfinished: neither ended nor at their rung."""
    beyond = {row.number for row in left_out(spec, rows)}
    return [row for row in rows if not row.is_done and row.number not in beyond]


def runnable(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    """Return the unended trials that wait or were interrupted."""
    return [row for row in unended(spec, rows) if row.status is not Status.PAUSED]


def paused(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    """Return the unended trials that a person paused."""
    return [row for row in unended(spec, rows) if row.status is Status.PAUSED]


def _left(spec: StudySpec, rows: Rows) -> float:
    """Return the budget's uncommitted episodes; a running trial is committed up to its rung or its end."""
    if spec.budget is None:
        return math.inf
    whole = spec.total_episodes
    committed = sum(
        charged(row, whole) if row.is_done else own_rung(spec, row) or whole for row in counting_trials(rows)
    )
    return spec.budget * whole - committed


def _missing(spec: StudySpec, row: TrialRow) -> int:
    """Return the episodes that the budget is charged for a paused trial from here to its end."""
    return spec.total_episodes - row.episodes


def _may_start(spec: StudySpec, rows: Rows) -> bool:
    """Return True if the budget, less the reserve for finishing trials, allows a new trial."""
    if spec.trials is not None and len(counting_trials(rows)) >= spec.trials:
        return False
    whole, left = spec.total_episodes, _left(spec, rows)
    if not spec.pauses_trials:
        return left >= whole
    if spec.budget is None or not counting_trials(rows):
        return True
    rungs = [lengths(config.to_dict())[1] for config in spec.extreme_configs().values()]
    if not any(rungs):  # they are so short that none is paused
        return left >= whole
    finish = whole - SHARE * whole  # the most that a trial needs from its rung to its end
    finishes = max(1, math.floor(FINISH_SHARE * spec.budget * whole / finish))
    longest = max(rung or whole for rung in rungs)  # the new trial's batch is not known yet
    return left - longest >= finishes * finish - 1e-9


def promotable(spec: StudySpec, rows: Rows) -> list[TrialRow]:
    """Return the trials paused at screening, best first: by screening score, then value so far, then number."""
    return sorted((row for row in counting_trials(rows) if row.is_at_rung), key=screening_rank)


def promotions(spec: StudySpec, rows: Rows) -> int:
    """Return the number of trials paused at screening that the rest of the budget can finish.

    Without a budget: the number still to be promoted, of the trials that the study is to have.
    """
    if not spec.pauses_trials:
        return 0
    if spec.budget is None:
        return max(1, (spec.trials or 0) // ONE_IN) - sum(row.is_promoted for row in counting_trials(rows))
    least = min((_missing(spec, row) for row in promotable(spec, rows)), default=math.inf)
    return max(0, int(_left(spec, rows) // least))


def screening_rank(row: TrialRow) -> tuple[float, float, int]:
    """Return the sort key of a trial at screening, best first; its value is the one it had there."""
    score = math.inf if row.rung_score is None else -row.rung_score
    return score, math.inf if row.value is None else -row.value, row.number


def _promoted(spec: StudySpec, rows: Rows, busy: Container[int] = ()) -> TrialRow | None:
    """Return the trial to promote now: the best at screening, if one is due or nothing else will start."""
    if not spec.pauses_trials:
        return None
    ranked, left = [row for row in promotable(spec, rows) if row.number not in busy], _left(spec, rows)
    if ranked and _is_due(spec, rows) and _missing(spec, ranked[0]) <= left:
        return ranked[0]
    # Budget that is left over finishes more than one in ONE_IN.
    is_open = spec.budget is not None or not any(row.is_promoted for row in counting_trials(rows))
    if not is_open or _may_start(spec, rows):
        return None
    return next((row for row in ranked if _missing(spec, row) <= left), None)


def _is_due(spec: StudySpec, rows: Rows) -> bool:
    """Return True if another of the trials that were screened is to be finished.

    Without a budget trials that ended before their rung count as well, since one in ONE_IN of all is finished.
    """
    counts_ended = spec.budget is None
    passed = sum(
        row.rung_episode is not None or (counts_ended and row.status.is_final) for row in counting_trials(rows)
    )
    return passed // ONE_IN > sum(row.is_promoted for row in counting_trials(rows))


def _new(spec: StudySpec, rows: Rows) -> New:
    """Return the next new trial: listed, the reference, a start, or one to be proposed."""
    count = len(counting_trials(rows))
    if spec.listed:
        return New(spec.listed[count].params, Origin.LISTED, spec.listed[count].label)
    if count == 0:
        return New(spec.reference_params(), Origin.REFERENCE)
    started = sum(row.origin is Origin.LISTED for row in counting_trials(rows))
    if started < len(spec.starts):
        start = spec.starts[started]
        return New(spec.params_with(start.params), Origin.LISTED, start.title)
    return New(None, Origin.SAMPLED)

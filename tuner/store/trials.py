"""Trials, recorded step by step, each write in one transaction; their curves and samples."""

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from sys import intern
from typing import Any

from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    update,
)

from ppo_core.config.declare import HyperValue
from ppo_core.errors import StudyError
from ppo_core.metrics import METRICS
from ppo_core.report import SplitReading, StepReport, TokenReadings
from tuner.store import schema
from tuner.store.connect import Database
from tuner.store.rows import (
    Lease,
    OnTest,
    Outcome,
    StudyRow,
    TrialRow,
    finite,
    reading_columns,
    to_row,
    token_readings,
)
from tuner.study.status import Origin, PausedBy, Reason, Role, Status, Wanted

STEP_KEYS = ("trial_id", "step", "episode", "at")
"""Columns that identify and date a row of steps."""


class Curves(Database):
    """Reads the store's steps and samples."""

    def steps(
        self, trial_ids: Iterable[int], metrics: Sequence[str], *, after_step: int = -1, evaluations_only: bool = False
    ) -> list[dict[str, Any]]:
        """Return rows of `trial_id`, `step`, `episode`, `at` and the named metrics, ordered by trial and step.

        A metric is None where not measured or not finite.
        """
        found = self.step_values(trial_ids, metrics, after_step=after_step, evaluations_only=evaluations_only)
        names = (*STEP_KEYS, *metrics)
        return [dict(zip(names, row, strict=True)) for row in found]

    def step_values(
        self, trial_ids: Iterable[int], metrics: Sequence[str], *, after_step: int = -1, evaluations_only: bool = False
    ) -> list[tuple[Any, ...]]:
        """Return `steps` as bare values in the order `STEP_KEYS`, then `metrics`; three times as fast for many rows."""
        table = schema.steps
        columns: list[ColumnElement[Any]] = [table.c[name] for name in STEP_KEYS]
        columns += [table.c[METRICS[name].column].label(name) for name in metrics]
        query = select(*columns).where(and_(table.c.trial_id.in_(list(trial_ids)), table.c.step > after_step))
        if evaluations_only:
            query = query.where(table.c.eval_reward.is_not(None))
        query = query.order_by(table.c.trial_id, table.c.step)
        return self._read(lambda connection: [tuple(row) for row in connection.execute(query)])

    def own_metrics(self, trial_id: int) -> dict[int, dict[str, float]]:
        """Return the metrics that a task reported beyond the declared ones, by step and name."""
        table = schema.steps
        query = select(table.c.step, table.c.extra).where(table.c.trial_id == trial_id).order_by(table.c.step)
        found = [(row["step"], row["extra"] or {}) for row in self._rows(query)]
        return {step: {name: value for name, value in extra.items() if name not in METRICS} for step, extra in found}

    def last_step(self, trial_id: int) -> int | None:
        """Return a trial's newest recorded step, or None."""
        query = select(func.max(schema.steps.c.step)).where(schema.steps.c.trial_id == trial_id)
        last: int | None = self._read(lambda connection: connection.scalar(query))
        return last

    def samples(
        self, trial_ids: Iterable[int], step: int | None = None, *, with_tokens: bool = False
    ) -> list[dict[str, Any]]:
        """Return sample rows by prompt, trial and step, optionally of one step.

        `tokens`, by far the largest part of a row, are included only on request.
        """
        table = schema.samples
        query = select(*(column for column in table.c if with_tokens or column is not table.c.tokens))
        query = query.where(table.c.trial_id.in_(list(trial_ids)))
        if step is not None:
            query = query.where(table.c.step == step)
        order = (table.c.prompt_index, table.c.trial_id, table.c.step)
        return self._rows(query.order_by(*order))

    def sample_tokens(self, trial_id: int, step: int, prompt_index: int) -> TokenReadings | None:
        """Return one sample's readings per token, or None."""
        table = schema.samples
        one = and_(table.c.trial_id == trial_id, table.c.step == step, table.c.prompt_index == prompt_index)
        stored = self._read(lambda connection: connection.scalar(select(table.c.tokens).where(one)))
        return None if stored is None else token_readings(stored)

    def readings(self, trial_ids: Iterable[int], step: int | None = None) -> list[dict[str, Any]]:
        """Return rows of `trial_id`, `step` and the evaluation's readings, in order, optionally of one step.

        `rewards`, `kls` (nats) and `lengths` (tokens) have one number an eval prompt, in the prompts' order; None for
        one that was not finite.
        """
        table = schema.readings
        query = select(table).where(table.c.trial_id.in_(list(trial_ids)))
        if step is not None:
            query = query.where(table.c.step == step)
        return self._rows(query.order_by(table.c.trial_id, table.c.step))

    def on_test(self, trial_id: int, step: int) -> OnTest | None:
        """Return a checkpoint's result on the test prompts, or None if not read."""
        return self.test_readings([trial_id]).get((trial_id, step))

    def test_readings(self, trial_ids: Collection[int]) -> dict[tuple[int, int], OnTest]:
        """Return the results of trials' checkpoints on the test prompts, by trial id and step."""
        table = schema.test_readings
        rows = self._rows(select(table).where(table.c.trial_id.in_(trial_ids)))
        return {(row.pop("trial_id"), row["step"]): OnTest(**row) for row in rows}

    def _rows(self, query: Select[Any]) -> list[dict[str, Any]]:
        return self._read(lambda connection: [dict(row._mapping) for row in connection.execute(query)])


def to_reason(stored: Mapping[str, Any]) -> Reason:
    """Decode a stored reason, in which numbers that are not finite are text."""
    numbers = {name: _number(stored.get(name)) for name in ("value", "limit")}
    evidence = tuple({name: _number(value) for name, value in reading.items()} for reading in stored["evidence"])
    return Reason(**{**stored, **numbers, "evidence": evidence})


def _number(stored: Any) -> Any:
    return float(stored) if isinstance(stored, str) else stored


def step_values(report: StepReport) -> dict[str, Any]:
    """Return a row of the steps table without its trial; values that fit no float column are put in `extra`."""
    extra: dict[str, float | str] = {}
    columns: dict[str, Any] = {"step": report.step, "episode": report.episode, "at": time.time()}
    for name, value in report.metrics.items():
        if not math.isfinite(value):
            extra[name] = str(value)
        elif name in METRICS:
            columns[METRICS[name].column] = value
        else:
            extra[name] = value
    return columns | {"extra": extra or None}


JUDGEMENT = ("value", "value_se", "kl", "violation", "value_step", "end_reward", "end_kl", "end_kl_se")
"""Columns derived from a trial's evaluations, recomputed when the KL budget changes."""

_CONSTANT = ("config", "params")
"""Columns of a trial that never change."""


_MOST_NAMED = 500
"""Above this many changed trials, read all of the study instead of naming each."""


class KnownTrials:
    """Cache of a study's trials as last read."""

    def __init__(self) -> None:
        self.rows: dict[int, TrialRow] = {}
        """Trials by id, in order of number."""
        self.stored: dict[int, tuple[object, ...]] = {}
        """The columns that may change, as stored, by id."""


@dataclass(frozen=True)
class NewTrial:
    """A trial to be recorded."""

    number: int
    origin: Origin
    config: Mapping[str, HyperValue]
    params: Mapping[str, HyperValue]
    threads: int
    status: Status = Status.RUNNING
    label: str = ""
    parent: int | None = None
    fork_step: int | None = None
    role: Role = Role.SEARCH

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed")
        return int(seed) if isinstance(seed, int) else None


# Built once: each step of a trial executes them, and building a statement takes longer than executing it.
_ONE_STEP = and_(schema.steps.c.trial_id == bindparam("trial"), schema.steps.c.step == bindparam("of_step"))
_FIND_STEP = select(schema.steps.c.step, schema.steps.c.eval_reward, schema.steps.c.extra).where(_ONE_STEP)
_COUNT_STEP = (
    update(schema.trials)
    .where(schema.trials.c.id == bindparam("trial"))
    .values(episodes=bindparam("reached"), seconds=schema.trials.c.seconds + bindparam("more"))
    .returning(schema.trials.c.wanted)
)
_THIS_TRIAL = schema.trials.c.id == bindparam("trial")
_READ_AGAIN = select(*(column for column in schema.trials.c if column.name not in _CONSTANT)).where(_THIS_TRIAL)
_DROP_STEPS_AFTER = tuple(
    delete(rows).where(and_(rows.c.trial_id == bindparam("trial"), rows.c.step > bindparam("last_kept")))
    for rows in schema.OF_TRIALS.values()
)
_KEPT_EPISODES = select(func.coalesce(func.max(schema.steps.c.episode), 0)).where(
    schema.steps.c.trial_id == bindparam("trial")
)
_BEGIN = (
    update(schema.trials)
    .where(_THIS_TRIAL)
    .values(
        attempts=bindparam("attempt"), status=Status.RUNNING, reason=None, episodes=_KEPT_EPISODES.scalar_subquery()
    )
)


class Trials(Database):
    """The store's trials."""

    def trials(self, study: StudyRow, known: "KnownTrials | None" = None) -> list[TrialRow]:
        """Return the study's trials by number.

        `known`, from an earlier call, is updated; only its changed trials are read in full.
        """
        table, is_held = schema.trials, study.is_held
        known = KnownTrials() if known is None else known
        of_study = table.c.study_id == study.id
        changing = [column for column in table.c if column.name not in _CONSTANT]
        # As text: to decode JSON takes longer than to compare it.
        as_stored = [cast(one, Text) if isinstance(one.type, JSON) else one for one in changing]

        def read(connection: Connection) -> list[TrialRow]:
            found = connection.execute(select(*as_stored).where(of_study).order_by(table.c.number))
            stored = {row.id: tuple(row) for row in found}
            changed = [one for one, row in stored.items() if known.stored.get(one) != row]
            which = table.c.id.in_(changed) if len(changed) <= _MOST_NAMED else of_study
            rows = [dict(row._mapping) for row in connection.execute(select(*changing).where(which))] if changed else []
            constant = {one: {"config": row.config, "params": row.params} for one, row in known.rows.items()}
            if new := [row["number"] for row in rows if row["id"] not in constant]:
                fixed = select(table.c.id, *(table.c[name] for name in _CONSTANT)).where(of_study)
                later = connection.execute(fixed.where(table.c.number >= min(new))).all()
                constant.update({row.id: {"config": _lean(row.config), "params": row.params} for row in later})
            fresh = {row["id"]: _to_trial(row | constant[row["id"]], is_held) for row in rows if row["id"] in constant}
            known.rows = {
                one: fresh[one] if one in fresh else _held(known.rows[one], is_held)
                for one in stored
                if one in fresh or one in known.rows
            }
            known.stored = stored
            return list(known.rows.values())

        return self._read(read)

    def trial(self, study: StudyRow, number: int) -> TrialRow:
        """Return one trial, or raise StudyError saying which numbers there are."""
        table = schema.trials

        def find(connection: Connection) -> Row[Any]:
            one = and_(table.c.study_id == study.id, table.c.number == number)
            row = connection.execute(select(table).where(one)).first()
            if row is None:
                last = connection.scalar(select(func.max(table.c.number)).where(table.c.study_id == study.id))
                there_are = "it has no trials yet" if last is None else f"it has trials 0 to {last}"
                raise StudyError(f'study "{study.name}" has no trial {number}; {there_are}')
            return row

        return trial_row(self._read(find), study.is_held)

    def read_again(self, known: TrialRow) -> TrialRow:
        """Return a trial's current state, reading only what may change; this process must hold its study."""
        return self._read(lambda connection: _read_again(connection, known))

    def add_trial(self, lease: Lease, trial: NewTrial) -> TrialRow:
        """Record a trial, or return the existing one of that number."""
        return self._write(lease, lambda connection: insert_trial(connection, lease, trial))

    def begin_attempt(self, lease: Lease, trial: TrialRow, resumed_step: int | None) -> TrialRow:
        """Count an attempt and delete the rows after the checkpoint it starts from (all, if there is none)."""
        last_kept = -1 if resumed_step is None else resumed_step

        def begin(connection: Connection) -> TrialRow:
            for statement in _DROP_STEPS_AFTER:
                connection.execute(statement, {"trial": trial.id, "last_kept": last_kept})
            connection.execute(_BEGIN, {"trial": trial.id, "attempt": trial.attempts + 1})
            return _read_again(connection, trial)

        return self._write(lease, begin)

    def add_step(self, lease: Lease, trial_id: int, report: StepReport, seconds: float) -> Wanted | None:
        """Record one step with its samples, and return the trial's pending order, if any.

        `seconds` is the trial's cost since the last report. A step already recorded is left unchanged, except to add
        its evaluation.
        """
        key = {"trial_id": trial_id, "step": report.step}

        def add(connection: Connection) -> Wanted | None:
            found = connection.execute(_FIND_STEP, {"trial": trial_id, "of_step": report.step}).first()
            if found is None:
                connection.execute(insert(schema.steps), {"trial_id": trial_id, **step_values(report)})
            elif report.is_evaluation and not _is_evaluated(found):
                connection.execute(
                    update(schema.steps).where(_ONE_STEP).values(**step_values(report)),
                    {"trial": trial_id, "of_step": report.step},
                )
            else:
                wanted = connection.scalar(select(schema.trials.c.wanted).where(schema.trials.c.id == trial_id))
                return None if wanted is None else Wanted(wanted)
            if report.samples:
                connection.execute(insert(schema.samples), [key | to_row(sample) for sample in report.samples])
            if report.readings is not None:
                connection.execute(insert(schema.readings).values(**key, **reading_columns(report.readings)))
            values = {"trial": trial_id, "reached": report.episode, "more": seconds}
            wanted = connection.scalar(_COUNT_STEP, values)
            return None if wanted is None else Wanted(wanted)

        return self._write(lease, add)

    def add_test_reading(
        self, lease: Lease, trial_id: int, step: int, reading: SplitReading | None, why_not: str | None
    ) -> None:
        """Record a checkpoint's result on the test prompts, or why there is none; the first record stays."""
        table = schema.test_readings
        key = {"trial_id": trial_id, "step": step}
        values: dict[str, Any] = {"prompts": 0}
        if reading is not None:
            values = {name: finite(value) for name, value in asdict(reading).items()} | {"prompts": reading.prompts}

        def add(connection: Connection) -> None:
            same = and_(table.c.trial_id == trial_id, table.c.step == step)
            if connection.scalar(select(table.c.step).where(same)) is None:
                connection.execute(insert(table).values(**key, **values, why_not=why_not, at=time.time()))

        self._write(lease, add)

    def pause_at_rung(self, lease: Lease, trial: TrialRow, so_far: Outcome, rung_score: float | None) -> None:
        """Record that the strategy paused a trial at its rung, its standing, and its screening score."""
        values = asdict(so_far) | {"status": Status.PAUSED, "wanted": None, "paused_by": PausedBy.STRATEGY}
        rung = {"rung_episode": trial.episodes, "rung_score": rung_score}
        mine = update(schema.trials).where(schema.trials.c.id == trial.id).values(**values, **rung)
        self._write(lease, lambda connection: connection.execute(mine))

    def promote(self, lease: Lease, trial_id: int) -> None:
        """Queue a trial that is paused at its rung; its standing is kept until it is judged again."""
        table = schema.trials
        values = {"status": Status.WAITING, "reason": None, "paused_by": None, "is_promoted": True}
        self._write(lease, lambda c: c.execute(update(table).where(table.c.id == trial_id).values(**values)))

    def set_retries(self, lease: Lease, trial_id: int, retries: int) -> None:
        """Record the number of times a trial was resumed after a failure."""
        mine = update(schema.trials).where(schema.trials.c.id == trial_id).values(retries=retries)
        self._write(lease, lambda connection: connection.execute(mine))

    def set_aside(self, lease: Lease, trial_id: int, so_far: Outcome, reason: Reason | None = None) -> bool:
        """Record that a trial has no worker: PAUSED if an order asks for that, else WAITING.

        Returns False and changes nothing if an order asks to stop it: the caller ends it. `so_far` is its standing if
        paused; `reason`, why it waits, if for more than a worker.
        """
        mine = schema.trials.c.id == trial_id

        def leave(connection: Connection) -> bool:
            row = connection.execute(select(schema.trials.c.status, schema.trials.c.wanted).where(mine)).one()
            if row.wanted == Wanted.STOP:
                return False
            if row.wanted == Wanted.PAUSE:
                write_pause(connection, trial_id, so_far)
            elif row.status == Status.RUNNING:
                values = {"status": Status.WAITING, "reason": None if reason is None else asdict(reason)}
                connection.execute(update(schema.trials).where(mine).values(**values))
            return True

        return self._write(lease, leave)

    def finish_trial(self, lease: Lease, trial_id: int, outcome: Outcome) -> None:
        """Record a trial's result."""
        self._write(lease, lambda connection: write_outcome(connection, trial_id, outcome))

    def set_judgements(self, lease: Lease, judged: Iterable[TrialRow]) -> None:
        """Replace the trials' judgements and screening scores by those of these rows."""
        self._write(lease, lambda connection: write_judgements(connection, judged))


def write_outcome(connection: Connection, trial_id: int, outcome: Outcome) -> None:
    """Record a trial's result, in a transaction that is under way."""
    values = asdict(outcome) | {"ended_at": time.time(), "wanted": None, "paused_by": None}
    connection.execute(update(schema.trials).where(schema.trials.c.id == trial_id).values(**values))


def write_pause(connection: Connection, trial_id: int, so_far: Outcome) -> None:
    """Record that a person paused a trial, and its standing, in a transaction that is under way."""
    values = asdict(so_far) | {"status": Status.PAUSED, "wanted": None, "paused_by": PausedBy.PERSON}
    connection.execute(update(schema.trials).where(schema.trials.c.id == trial_id).values(**values))


def write_resumption(connection: Connection, trial: TrialRow) -> None:
    """Queue a paused trial and clear its judgement, in a transaction that is under way.

    This promotes one that was paused at its rung.
    """
    judgement = dict.fromkeys((*JUDGEMENT, "reason", "wanted", "paused_by"))
    values = judgement | {"status": Status.WAITING, "is_promoted": trial.is_promoted or trial.is_at_rung}
    connection.execute(update(schema.trials).where(schema.trials.c.id == trial.id).values(**values))


def write_judgements(connection: Connection, judged: Iterable[TrialRow]) -> None:
    """Replace the trials' judgements and screening scores, in a transaction that is under way."""
    for row in judged:
        values = {name: getattr(row, name) for name in (*JUDGEMENT, "rung_score")}
        connection.execute(update(schema.trials).where(schema.trials.c.id == row.id).values(**values))


def copy_steps(connection: Connection, trial_id: int, fork: TrialRow, last: int) -> None:
    """Copy the parent's steps up to `last` to a fork, in a transaction that is under way."""
    table = schema.steps
    copied = [literal(fork.id) if column.name == "trial_id" else column for column in table.c]
    theirs = select(*copied).where(and_(table.c.trial_id == trial_id, table.c.step <= last))
    connection.execute(insert(table).from_select([column.name for column in table.c], theirs))
    episodes = select(func.max(table.c.episode)).where(table.c.trial_id == fork.id).scalar_subquery()
    connection.execute(update(schema.trials).where(schema.trials.c.id == fork.id).values(episodes=episodes))


def insert_trial(connection: Connection, lease: Lease, trial: NewTrial) -> TrialRow:
    """Record a trial in a transaction that is under way; see `Trials.add_trial`."""
    table = schema.trials
    one = and_(table.c.study_id == lease.study_id, table.c.number == trial.number)
    found = connection.execute(select(table).where(one)).first()
    if found is None:
        values = asdict(trial) | {"config": dict(trial.config), "params": dict(trial.params), "seed": trial.seed}
        counts = {"episodes": 0, "seconds": 0.0, "attempts": 0, "started_at": time.time()}
        connection.execute(insert(table).values(study_id=lease.study_id, **values, **counts))
        found = connection.execute(select(table).where(one)).one()
    return trial_row(found)


def _is_evaluated(found: Row[Any, Any, Any]) -> bool:
    """Return True if a step has its evaluation, counting a reward that is not finite, which is in `extra`."""
    return found.eval_reward is not None or "eval/reward" in (found.extra or {})


def _read_again(connection: Connection, known: TrialRow) -> TrialRow:
    changed = connection.execute(_READ_AGAIN, {"trial": known.id}).one()
    return _to_trial({**changed._mapping, "config": known.config, "params": known.params}, is_held=True)


def trial_row(row: Row[Any], is_held: bool = True) -> TrialRow:
    """Convert a row of the trials table; `is_held`: a controller runs its study."""
    return _to_trial({**row._mapping, "config": _lean(row.config)}, is_held)


def _lean(config: Mapping[str, HyperValue]) -> dict[str, HyperValue]:
    """Return a configuration that shares its key names with all others in memory: half the size."""
    return {intern(name): value for name, value in config.items()}


def _held(row: TrialRow, is_held: bool) -> TrialRow:
    """Return the trial with `is_interrupted` set for whether its study is held."""
    is_interrupted = not is_held and row.status is Status.RUNNING
    return row if row.is_interrupted == is_interrupted else replace(row, is_interrupted=is_interrupted)


def _to_trial(values: dict[str, Any], is_held: bool) -> TrialRow:
    status = Status(values["status"])
    typed = {
        "status": status,
        "origin": Origin(values["origin"]),
        "role": Role(values["role"]),
        "paused_by": None if values["paused_by"] is None else PausedBy(values["paused_by"]),
        "reason": None if values["reason"] is None else to_reason(values["reason"]),
        "wanted": None if values["wanted"] is None else Wanted(values["wanted"]),
        "is_interrupted": not is_held and status is Status.RUNNING,
    }
    return TrialRow(**{**values, **typed})

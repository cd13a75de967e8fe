"""Trials, recorded step by step, each write in one transaction, and reads of their steps, samples and readings."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, Table, and_, delete, func, insert, literal, select, update

from ppo_core.config.declare import HyperValue
from ppo_core.errors import StudyError
from ppo_core.metrics import METRICS
from ppo_core.report import SplitReading, StepReport, TokenReadings
from tuner.store import schema
from tuner.store.connect import Database
from tuner.store.rows import Lease, OnTest, Outcome, StudyRow, TrialRow, finite, reading_columns, to_row, token_readings
from tuner.study.status import Origin, Reason, Role, Status, Wanted

JUDGEMENT = ("value", "value_se", "kl", "violation", "value_step", "end_reward", "end_kl", "end_kl_se", "sft_reward")
"""Columns derived from a trial's evaluations, recomputed when the KL budget changes."""
STEP_KEYS = ("trial_id", "step", "episode", "at")
"""Columns that identify and date a row of steps."""


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


class Trials(Database):
    """The store's trials."""

    def trials(self, study: StudyRow) -> list[TrialRow]:
        table, has_controller = schema.trials, study.has_controller
        query = select(table).where(table.c.study_id == study.id).order_by(table.c.number)
        return self._read(lambda connection: [_trial_row(row, has_controller) for row in connection.execute(query)])

    def trial(self, study: StudyRow, number: int) -> TrialRow:
        """Return one trial, or raise StudyError saying which numbers there are."""
        table = schema.trials

        def find(connection: Connection) -> Row[Any]:
            this_trial = and_(table.c.study_id == study.id, table.c.number == number)
            row = connection.execute(select(table).where(this_trial)).first()
            if row is None:
                last = connection.scalar(select(func.max(table.c.number)).where(table.c.study_id == study.id))
                there_are = "it has no trials yet" if last is None else f"it has trials 0 to {last}"
                raise StudyError(f'study "{study.name}" has no trial {number}; {there_are}')
            return row

        return _trial_row(self._read(find), study.has_controller)

    def add_trial(self, lease: Lease, trial: NewTrial) -> TrialRow:
        """Record a trial, or return the existing one of that number."""
        return self._write(lease, lambda connection: insert_trial(connection, lease, trial))

    def begin_attempt(self, lease: Lease, trial: TrialRow, resumed_step: int | None) -> TrialRow:
        """Count an attempt and delete the rows after its checkpoint, or all; a test reading of step 0 stays."""
        last_kept = -1 if resumed_step is None else resumed_step
        steps, trials = schema.steps, schema.trials

        def begin(connection: Connection) -> TrialRow:
            for table in schema.OF_TRIALS.values():
                last = max(last_kept, 0) if table is schema.test_readings else last_kept
                connection.execute(delete(table).where(table.c.trial_id == trial.id, table.c.step > last))
            episodes = select(func.coalesce(func.max(steps.c.episode), 0)).where(steps.c.trial_id == trial.id)
            values = {"attempts": trial.attempts + 1, "status": Status.RUNNING, "reason": None, "reread_step": None}
            if not trial.attempts:
                values["started_at"] = time.time()
            _update(connection, trial.id, episodes=episodes.scalar_subquery(), **values)
            return _trial_row(connection.execute(select(trials).where(trials.c.id == trial.id)).one())

        return self._write(lease, begin)

    def add_step(self, lease: Lease, trial_id: int, report: StepReport, seconds: float) -> Wanted | None:
        """Record a step with its samples and cost in seconds, or add its evaluation; return a pending order."""
        steps, trials = schema.steps, schema.trials
        key = {"trial_id": trial_id, "step": report.step}
        same = and_(steps.c.trial_id == trial_id, steps.c.step == report.step)

        def add(connection: Connection) -> Wanted | None:
            stored = connection.execute(select(steps.c.eval_reward, steps.c.extra).where(same)).first()
            if stored is None:
                connection.execute(insert(steps).values(trial_id=trial_id, **step_columns(report)))
            elif report.is_evaluation and stored.eval_reward is None and "eval/reward" not in (stored.extra or {}):
                connection.execute(update(steps).where(same).values(**step_columns(report)))
            else:
                return pending_order(connection)
            if report.samples:
                connection.execute(insert(schema.samples), [key | to_row(sample) for sample in report.samples])
            if report.readings is not None:
                connection.execute(insert(schema.readings).values(**key, **reading_columns(report.readings)))
            _update(connection, trial_id, episodes=report.episode, seconds=trials.c.seconds + seconds)
            return pending_order(connection)

        def pending_order(connection: Connection) -> Wanted | None:
            wanted = connection.scalar(select(trials.c.wanted).where(trials.c.id == trial_id))
            return None if wanted is None else Wanted(wanted)

        return self._write(lease, add)

    def add_test_reading(
        self, lease: Lease, trial_id: int, step: int, reading: SplitReading | None, why_not: str | None
    ) -> None:
        """Record a checkpoint's result on the test prompts, or why there is none; the first record stays."""
        table = schema.test_readings
        same = and_(table.c.trial_id == trial_id, table.c.step == step)
        values: dict[str, Any] = {"prompts": 0}
        if reading is not None:
            values = {name: finite(value) for name, value in asdict(reading).items()} | {"prompts": reading.prompts}
        values |= {"trial_id": trial_id, "step": step, "why_not": why_not, "at": time.time()}

        def add(connection: Connection) -> None:
            if connection.scalar(select(table.c.step).where(same)) is None:
                connection.execute(insert(table).values(**values))

        self._write(lease, add)

    def add_rereading(
        self, lease: Lease, trial_id: int, step: int, reading: SplitReading | None, seconds: float
    ) -> None:
        """Record the second reading of a trial's checkpoint on the eval prompts; None: there can be none."""
        names = ("reward", "kl", "kl_se")
        values = {f"reread_{name}": None if reading is None else finite(getattr(reading, name)) for name in names}
        spent = schema.trials.c.seconds + seconds
        values |= {"reread_step": step, "reread_seconds": seconds}
        self._write(lease, lambda connection: _update(connection, trial_id, seconds=spent, **values))

    def set_retries(self, lease: Lease, trial_id: int, retries: int) -> None:
        self._write(lease, lambda connection: _update(connection, trial_id, retries=retries))

    def set_aside(self, lease: Lease, trial_id: int, so_far: Outcome, reason: Reason | None = None) -> bool:
        """Record that a trial has no worker: PAUSED, as it stands `so_far`, if an order asks for that, else WAITING.

        Returns False and changes nothing if an order asks to stop it: the caller ends it. `reason`: why it waits.
        """
        table = schema.trials

        def leave(connection: Connection) -> bool:
            row = connection.execute(select(table.c.status, table.c.wanted).where(table.c.id == trial_id)).one()
            if row.wanted == Wanted.STOP:
                return False
            if row.wanted == Wanted.PAUSE:
                write_pause(connection, trial_id, so_far)
            elif row.status == Status.RUNNING:
                stored = None if reason is None else asdict(reason)
                _update(connection, trial_id, status=Status.WAITING, reason=stored)
            return True

        return self._write(lease, leave)

    def finish_trial(self, lease: Lease, trial_id: int, outcome: Outcome) -> None:
        self._write(lease, lambda connection: write_outcome(connection, trial_id, outcome))

    def steps(
        self, trial_ids: Iterable[int], metrics: Sequence[str], *, after_step: int = -1, evaluations_only: bool = False
    ) -> list[dict[str, Any]]:
        """Return rows of STEP_KEYS and the named metrics, by trial and step; None where not measured or not finite."""
        table = schema.steps
        named = (table.c[METRICS[metric].column].label(metric) for metric in metrics)
        columns = [*(table.c[name] for name in STEP_KEYS), *named]
        query = select(*columns).where(table.c.trial_id.in_(list(trial_ids)), table.c.step > after_step)
        if evaluations_only:
            query = query.where(table.c.eval_reward.is_not(None))
        return self._rows(query.order_by(table.c.trial_id, table.c.step))

    def highest(self, trial_ids: Iterable[int], metric: str) -> dict[int, float]:
        """Return the highest finite reading of a metric by trial id; a trial without one is left out."""
        column, trial = schema.steps.c[METRICS[metric].column], schema.steps.c.trial_id
        query = select(trial, func.max(column)).where(trial.in_(list(trial_ids)), column.is_not(None)).group_by(trial)
        return self._read(lambda connection: {number: float(top) for number, top in connection.execute(query)})

    def own_metrics(self, trial_id: int) -> dict[int, dict[str, float]]:
        """Return the metrics that a task reported beyond the declared ones, by step and name."""
        table = schema.steps
        query = select(table.c.step, table.c.extra).where(table.c.trial_id == trial_id).order_by(table.c.step)
        return {
            row["step"]: {name: value for name, value in (row["extra"] or {}).items() if name not in METRICS}
            for row in self._rows(query)
        }

    def last_step(self, trial_id: int) -> int | None:
        steps = schema.steps
        last: int | None = self._scalar(select(func.max(steps.c.step)).where(steps.c.trial_id == trial_id))
        return last

    def samples(
        self, trial_ids: Iterable[int], step: int | None = None, *, with_tokens: bool = False
    ) -> list[dict[str, Any]]:
        """Return sample rows by prompt, trial and step, optionally of one step; `tokens`, the most, on request."""
        table = schema.samples
        query = select(*(column for column in table.c if with_tokens or column is not table.c.tokens))
        query = query.order_by(table.c.prompt_index, table.c.trial_id, table.c.step)
        return self._rows(_of_trials(query, table, trial_ids, step))

    def sample_tokens(self, trial_id: int, step: int, prompt_index: int) -> TokenReadings | None:
        """Return one sample's readings per token, or None."""
        table = schema.samples
        query = _of_trials(select(table.c.tokens), table, [trial_id], step).where(table.c.prompt_index == prompt_index)
        stored = self._scalar(query)
        return None if stored is None else token_readings(stored)

    def readings(self, trial_ids: Iterable[int], step: int | None = None) -> list[dict[str, Any]]:
        """Return rows of `trial_id`, `step`, `rewards`, `kls` (nats), `lengths` (tokens) by prompt; None: no number."""
        table = schema.readings
        query = select(table).order_by(table.c.trial_id, table.c.step)
        return self._rows(_of_trials(query, table, trial_ids, step))

    def on_test(self, trial_id: int, step: int) -> OnTest | None:
        """Return a checkpoint's result on the test prompts, or None if not read."""
        return self.test_readings([trial_id]).get((trial_id, step))

    def test_readings(self, trial_ids: Iterable[int]) -> dict[tuple[int, int], OnTest]:
        """Return the results of trials' checkpoints on the test prompts, by trial id and step."""
        table = schema.test_readings
        rows = self._rows(_of_trials(select(table), table, trial_ids))
        return {(row.pop("trial_id"), row["step"]): OnTest(**row) for row in rows}


def _of_trials(query: Select[Any], table: Table, trial_ids: Iterable[int], step: int | None = None) -> Select[Any]:
    query = query.where(table.c.trial_id.in_(list(trial_ids)))
    return query if step is None else query.where(table.c.step == step)


def _update(connection: Connection, trial_id: int, **values: Any) -> None:
    connection.execute(update(schema.trials).where(schema.trials.c.id == trial_id).values(**values))


def write_outcome(connection: Connection, trial_id: int, outcome: Outcome) -> None:
    """Record a trial's result, in a transaction that is under way."""
    _update(connection, trial_id, **asdict(outcome), ended_at=time.time(), wanted=None)


def write_pause(connection: Connection, trial_id: int, so_far: Outcome) -> None:
    """Record that a person paused a trial, and its standing, in a transaction that is under way."""
    _update(connection, trial_id, **asdict(so_far) | {"status": Status.PAUSED}, wanted=None)


def write_resumption(connection: Connection, trial_id: int) -> None:
    """Queue a paused trial and clear its judgement, in a transaction that is under way."""
    _update(connection, trial_id, **dict.fromkeys((*JUDGEMENT, "reason", "wanted")), status=Status.WAITING)


def write_judgements(connection: Connection, judged: Iterable[TrialRow]) -> None:
    """Replace the trials' judgements, in a transaction that is under way."""
    for row in judged:
        _update(connection, row.id, **{name: getattr(row, name) for name in JUDGEMENT})


def copy_steps(connection: Connection, parent_id: int, fork: TrialRow, last: int) -> None:
    """Copy the parent's steps up to `last` to a fork, in a transaction that is under way."""
    table = schema.steps
    columns = [literal(fork.id) if column.name == "trial_id" else column for column in table.c]
    of_parent = select(*columns).where(table.c.trial_id == parent_id, table.c.step <= last)
    connection.execute(insert(table).from_select([column.name for column in table.c], of_parent))
    episodes = select(func.max(table.c.episode)).where(table.c.trial_id == fork.id).scalar_subquery()
    _update(connection, fork.id, episodes=episodes)


def insert_trial(connection: Connection, lease: Lease, trial: NewTrial) -> TrialRow:
    """Record a trial in a transaction that is under way; see `Trials.add_trial`."""
    table = schema.trials
    query = select(table).where(table.c.study_id == lease.study_id, table.c.number == trial.number)
    row = connection.execute(query).first()
    if row is None:
        values = asdict(trial) | {"config": dict(trial.config), "params": dict(trial.params), "seed": trial.seed}
        counts = {"episodes": 0, "seconds": 0.0, "attempts": 0, "started_at": time.time()}
        connection.execute(insert(table).values(study_id=lease.study_id, **values, **counts))
        row = connection.execute(query).one()
    return _trial_row(row)


def step_columns(report: StepReport) -> dict[str, Any]:
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


def _trial_row(row: Row[Any], has_controller: bool = True) -> TrialRow:
    values = row._mapping
    typed = {name: None if values[name] is None else convert(values[name]) for name, convert in _TYPES.items()}
    return TrialRow(**{**values, **typed}, is_interrupted=not has_controller and typed["status"] is Status.RUNNING)


def _to_reason(stored: Mapping[str, Any]) -> Reason:
    numbers = {name: _number(stored.get(name)) for name in ("value", "limit")}
    evidence = tuple({name: _number(value) for name, value in reading.items()} for reading in stored["evidence"])
    return Reason(**{**stored, **numbers, "evidence": evidence})


def _number(stored: Any) -> Any:
    return float(stored) if isinstance(stored, str) else stored


_TYPES: Mapping[str, Callable[[Any], Any]] = {
    "status": Status,
    "origin": Origin,
    "role": Role,
    "wanted": Wanted,
    "reason": _to_reason,
}
"""Types of a trial's columns that are not stored as they are."""

"""The truth of every study: studies, trials, steps and samples in a database.

The controller that holds a study's lease writes; everyone else reads. Each write is one
transaction that first checks the lease's token, so a controller that lost its lease can write nothing.
"""

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import URL, ColumnElement, Connection, Engine, Row, and_, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from ppo_core.declaration import HyperValue
from ppo_core.errors import StoreError, StudyError, nearest
from ppo_core.metrics import METRICS
from ppo_core.report import StepReport, TokenReadings
from tuner.status import Reason, Status
from tuner.store import schema
from tuner.store.sample_rows import to_row, token_readings

DEFAULT_STORAGE = "sqlite:///runs/ppo-tuner.db"
LEASE_SECONDS = 60.0
"""A lease not renewed for this long may be taken over from another host."""
INTERRUPTED = "interrupted"
"""How a trial is told that has not ended and that nobody runs: the next run of its study takes it up."""
_CLOCK_SECONDS = 2.0
"""How far two readings of when one process began may lie apart: the system's clock is set now and then."""


@dataclass(frozen=True)
class Lease:
    """The right to write to one study, as long as no later token was given out."""

    study_id: int
    token: int


@dataclass(frozen=True)
class StudyRow:
    """One study as stored."""

    id: int
    name: str
    spec: dict[str, Any]
    created_at: float
    finished_at: float | None
    lease_host: str | None
    lease_pid: int | None
    lease_pid_started: float | None
    lease_renewed_at: float | None

    @property
    def is_held(self) -> bool:
        """Whether a controller is alive: its process exists (same host), or its lease is fresh (another host)."""
        if self.lease_pid is None or self.lease_renewed_at is None:
            return False
        if self.lease_host == socket.gethostname():
            return _is_alive(self.lease_pid, self.lease_pid_started)
        return time.time() - self.lease_renewed_at < LEASE_SECONDS


@dataclass(frozen=True)
class TrialRow:
    """One trial as stored. `value` is eval reward, `kl` eval KL in nats per response."""

    id: int
    study_id: int
    number: int
    origin: str
    """`reference` (trial 0), `sampled`, or `listed` in the study file."""
    status: Status
    reason: Reason | None
    config: dict[str, HyperValue]
    params: dict[str, HyperValue]
    """The searched values alone, as the sampler proposed them."""
    value: float | None
    value_se: float | None
    kl: float | None
    violation: float | None
    """log(eval KL / KL budget), at most 0 within the budget; None while running."""
    episodes: int
    seconds: float
    attempts: int
    threads: int
    started_at: float
    ended_at: float | None
    is_interrupted: bool = False
    """Whether it has not ended and no controller lives that would end it. Not stored: the study's lease says so."""

    @property
    def shown_status(self) -> str:
        """The status as people and scripts are told it: `interrupted`, or the stored one."""
        return INTERRUPTED if self.is_interrupted else self.status.value


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: what `Store.finish_trial` records."""

    status: Status
    reason: Reason | None = None
    value: float | None = None
    value_se: float | None = None
    kl: float | None = None
    violation: float | None = None


class Store:
    """A database of studies. Open it with `Store.open`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, storage: str = DEFAULT_STORAGE, *, create: bool = False) -> "Store":
        """Open the store at a URL or path, making it first if asked.

        Raises:
            StoreError: there is none, it cannot be reached, is not ours, or has another schema version.
        """
        url = schema.parse_url(storage)
        if url.get_backend_name() == "sqlite" and url.database:
            path = Path(url.database)
            if not path.exists() and not create:
                raise StoreError(f"there is no store at {path} yet; `ppo-tuner demo` makes one")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"cannot make the store's folder {path.parent}: {error.strerror}") from error
        return cls(schema.connect(url, create=create))

    @property
    def url(self) -> URL:
        """Where the store is."""
        return self._engine.url

    def close(self) -> None:
        """Give back the connections."""
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise _store_error(self.url, error) from error

    @contextmanager
    def _writing(self, lease: Lease) -> Iterator[Connection]:
        """Yield a transaction in which the lease is known to hold and is renewed."""
        with self._changing() as connection:
            _renew(connection, lease)
            yield connection

    @contextmanager
    def _changing(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise _store_error(self.url, error) from error

    # Studies

    def studies(self) -> list[StudyRow]:
        """Return all studies, oldest first."""
        with self._reading() as connection:
            return [_study(row) for row in connection.execute(select(schema.studies).order_by(schema.studies.c.id))]

    def study(self, name: str) -> StudyRow:
        """Return the study `name`, or raise StudyError with the nearest name."""
        with self._reading() as connection:
            row = connection.execute(select(schema.studies).where(schema.studies.c.name == name)).first()
        if row is None:
            names = [study.name for study in self.studies()]
            there_are = f"there are: {', '.join(names)}" if names else "the store holds none yet"
            raise StudyError(f'no study "{name}" in {schema.redacted(self.url)}; {there_are}{nearest(name, names)}')
        return _study(row)

    def create_study(self, name: str, spec: Mapping[str, Any]) -> StudyRow:
        """Record a new study, or return the one of that name where it exists."""
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(schema.studies).values(name=name, spec=dict(spec), created_at=time.time()))
        except IntegrityError:
            pass  # made by someone else a moment ago
        except SQLAlchemyError as error:
            raise _store_error(self.url, error) from error
        return self.study(name)

    def update_spec(self, lease: Lease, spec: Mapping[str, Any]) -> None:
        """Replace the study's spec."""
        with self._writing(lease) as connection:
            connection.execute(
                update(schema.studies).where(schema.studies.c.id == lease.study_id).values(spec=dict(spec))
            )

    def set_finished(self, lease: Lease, finished: bool) -> None:
        """Record that the study reached its total of trials, or goes on."""
        with self._writing(lease) as connection:
            at = time.time() if finished else None
            connection.execute(
                update(schema.studies).where(schema.studies.c.id == lease.study_id).values(finished_at=at)
            )

    # The lease

    def acquire(self, name: str) -> Lease:
        """Take the study's lease for this process.

        A lease whose process is dead (same host) or that was not renewed for `LEASE_SECONDS` (another host) is
        taken over; the token goes up, so that its old holder can write no more.

        Raises:
            StudyError: a living controller holds it; the message says who.
        """
        study = self.study(name)  # tells the nearest name where there is none of this one
        table = schema.studies
        me = {
            "lease_host": socket.gethostname(),
            "lease_pid": os.getpid(),
            "lease_pid_started": psutil.Process().create_time(),
            "lease_renewed_at": time.time(),
        }
        with self._reading() as connection:
            found = connection.execute(select(table).where(table.c.id == study.id)).one()
        holder, token = _study(found), int(found.lease_token)
        if holder.is_held:
            age = time.time() - (holder.lease_renewed_at or 0)
            raise StudyError(
                f'study "{name}" is run by process {holder.lease_pid} on {holder.lease_host} '
                f"(last sign of life {age:.0f} s ago); stop that one first"
            )
        with self._changing() as connection:
            taken = connection.execute(
                update(table)
                .where(and_(table.c.id == study.id, table.c.lease_token == token))
                .values(lease_token=token + 1, **me)
            )
        if taken.rowcount != 1:
            raise StudyError(f'study "{name}" was taken by another controller just now')
        return Lease(study.id, token + 1)

    def renew(self, lease: Lease) -> None:
        """Show a sign of life where nothing else was written for a while."""
        with self._writing(lease):
            pass

    def release(self, lease: Lease) -> None:
        """Give the lease back; nothing happens where it was lost before."""
        table = schema.studies
        with self._changing() as connection:
            connection.execute(
                update(table)
                .where(and_(table.c.id == lease.study_id, table.c.lease_token == lease.token))
                .values(lease_host=None, lease_pid=None, lease_pid_started=None, lease_renewed_at=None)
            )

    # Trials

    def trials(self, study: StudyRow) -> list[TrialRow]:
        """Return the study's trials by number."""
        query = select(schema.trials).where(schema.trials.c.study_id == study.id).order_by(schema.trials.c.number)
        with self._reading() as connection:
            is_held = study.is_held
            return [_trial(row, is_held) for row in connection.execute(query)]

    def trial(self, study: StudyRow, number: int) -> TrialRow:
        """Return one trial, or raise StudyError saying which numbers there are."""
        table = schema.trials
        with self._reading() as connection:
            row = connection.execute(
                select(table).where(and_(table.c.study_id == study.id, table.c.number == number))
            ).first()
            if row is None:
                last = connection.scalar(select(func.max(table.c.number)).where(table.c.study_id == study.id))
                there_are = "it has none yet" if last is None else f"it has trials 0 to {last}"
                raise StudyError(f'study "{study.name}" has no trial {number}; {there_are}')
        return _trial(row, study.is_held)

    def add_trial(
        self,
        lease: Lease,
        number: int,
        *,
        origin: str,
        config: Mapping[str, HyperValue],
        params: Mapping[str, HyperValue],
        threads: int,
    ) -> TrialRow:
        """Record a trial that is about to run."""
        with self._writing(lease) as connection:
            result = connection.execute(
                insert(schema.trials).values(
                    study_id=lease.study_id,
                    number=number,
                    origin=origin,
                    status=Status.RUNNING,
                    config=dict(config),
                    params=dict(params),
                    threads=threads,
                    episodes=0,
                    seconds=0.0,
                    attempts=0,
                    started_at=time.time(),
                )
            )
            assert result.inserted_primary_key is not None
            made = select(schema.trials).where(schema.trials.c.id == result.inserted_primary_key[0])
            return _trial(connection.execute(made).one())

    def begin_attempt(self, lease: Lease, trial_id: int, resumed_step: int | None) -> None:
        """Count an attempt and drop the rows after the checkpoint it starts from (all, where there is none)."""
        last_kept = -1 if resumed_step is None else resumed_step
        with self._writing(lease) as connection:
            for table in (schema.steps, schema.samples):
                connection.execute(delete(table).where(and_(table.c.trial_id == trial_id, table.c.step > last_kept)))
            kept = select(func.coalesce(func.max(schema.steps.c.episode), 0)).where(schema.steps.c.trial_id == trial_id)
            connection.execute(
                update(schema.trials)
                .where(schema.trials.c.id == trial_id)
                .values(attempts=schema.trials.c.attempts + 1, episodes=kept.scalar_subquery())
            )

    def add_step(self, lease: Lease, trial_id: int, report: StepReport, seconds: float) -> None:
        """Record one step with its samples; `seconds` is what the trial cost since the last one."""
        with self._writing(lease) as connection:
            connection.execute(insert(schema.steps).values(trial_id=trial_id, **_step_values(report)))
            if report.samples:
                key = {"trial_id": trial_id, "step": report.step}
                connection.execute(insert(schema.samples), [key | to_row(sample) for sample in report.samples])
            connection.execute(
                update(schema.trials)
                .where(schema.trials.c.id == trial_id)
                .values(episodes=report.episode, seconds=schema.trials.c.seconds + seconds)
            )

    def finish_trial(self, lease: Lease, trial_id: int, outcome: Outcome) -> None:
        """Record how a trial ended."""
        values = asdict(outcome) | {"ended_at": time.time()}
        with self._writing(lease) as connection:
            connection.execute(update(schema.trials).where(schema.trials.c.id == trial_id).values(**values))

    # Steps and samples

    def steps(
        self, trial_ids: Iterable[int], metrics: Sequence[str], *, after_step: int = -1, evaluations_only: bool = False
    ) -> list[dict[str, Any]]:
        """Return rows of `trial_id`, `step`, `episode`, `at` and the named metrics, in order of trial and step.

        A metric is None where it was not measured or was no finite number.
        """
        table = schema.steps
        columns: list[ColumnElement[Any]] = [table.c.trial_id, table.c.step, table.c.episode, table.c.at]
        columns += [table.c[METRICS[name].column].label(name) for name in metrics]
        query = select(*columns).where(and_(table.c.trial_id.in_(list(trial_ids)), table.c.step > after_step))
        if evaluations_only:
            query = query.where(table.c.eval_reward.is_not(None))
        with self._reading() as connection:
            return [dict(row._mapping) for row in connection.execute(query.order_by(table.c.trial_id, table.c.step))]

    def own_metrics(self, trial_id: int) -> dict[int, dict[str, float]]:
        """Return what a task reported beyond the declared metrics, by step and name."""
        table = schema.steps
        query = select(table.c.step, table.c.extra).where(table.c.trial_id == trial_id).order_by(table.c.step)
        with self._reading() as connection:
            found = [(row.step, row.extra or {}) for row in connection.execute(query)]
        return {step: {name: value for name, value in extra.items() if name not in METRICS} for step, extra in found}

    def last_step(self, trial_id: int) -> int | None:
        """Return the newest recorded step of a trial, or None where it has none."""
        with self._reading() as connection:
            last: int | None = connection.scalar(
                select(func.max(schema.steps.c.step)).where(schema.steps.c.trial_id == trial_id)
            )
        return last

    def samples(
        self, trial_ids: Iterable[int], step: int | None = None, *, with_tokens: bool = False
    ) -> list[dict[str, Any]]:
        """Return sample rows by prompt, trial and step (`step`: of that step alone).

        `tokens` are by far the largest part of a row, and there only where asked for.
        """
        table = schema.samples
        query = select(*(column for column in table.c if with_tokens or column is not table.c.tokens))
        query = query.where(table.c.trial_id.in_(list(trial_ids)))
        if step is not None:
            query = query.where(table.c.step == step)
        order = (table.c.prompt_index, table.c.trial_id, table.c.step)
        with self._reading() as connection:
            return [dict(row._mapping) for row in connection.execute(query.order_by(*order))]

    def sample_tokens(self, trial_id: int, step: int, prompt_index: int) -> TokenReadings | None:
        """Return one sample's readings token by token; None: there is no such sample, or it has none."""
        table = schema.samples
        one = and_(table.c.trial_id == trial_id, table.c.step == step, table.c.prompt_index == prompt_index)
        with self._reading() as connection:
            stored = connection.scalar(select(table.c.tokens).where(one))
        return None if stored is None else token_readings(stored)


def _is_alive(pid: int, started: float | None) -> bool:
    """Return whether the process that began at `started` lives, and not a later one that was given its id."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return started is None or abs(process.create_time() - started) < _CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return False


def _renew(connection: Connection, lease: Lease) -> None:
    table = schema.studies
    held = connection.execute(
        update(table)
        .where(and_(table.c.id == lease.study_id, table.c.lease_token == lease.token))
        .values(lease_renewed_at=time.time())
    )
    if held.rowcount != 1:
        raise StudyError("this controller lost the study's lease to another one, and stops")


def _store_error(url: URL, error: SQLAlchemyError) -> StoreError:
    first_line = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    return StoreError(f"the store {schema.redacted(url)} failed: {first_line}")


def _study(row: Row[Any]) -> StudyRow:
    return StudyRow(**{key: value for key, value in row._mapping.items() if key != "lease_token"})


def _trial(row: Row[Any], is_held: bool = True) -> TrialRow:
    values = dict(row._mapping)
    status = Status(values["status"])
    reason = values["reason"]
    if reason is not None:
        reason = Reason(**{**reason, "evidence": tuple(reason["evidence"])})
    is_interrupted = not is_held and not status.is_final
    return TrialRow(**{**values, "status": status, "reason": reason, "is_interrupted": is_interrupted})


def _step_values(report: StepReport) -> dict[str, Any]:
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

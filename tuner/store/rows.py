"""Rows of the store's tables as plain values."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from ppo_core.config.declare import HyperValue
from ppo_core.report import EvalReadings, Sample, TokenReadings
from tuner.store.processes import ProcessKey, is_alive
from tuner.study.status import Origin, Reason, Role, Status, Wanted

TOKEN_DIGITS = 4  # significant digits of a token's readings, which are only looked at
READING_DIGITS = 7  # significant digits of an evaluation's readings per prompt: single precision

_TOKEN_NUMBERS = tuple(field.name for field in fields(TokenReadings) if field.name != "texts")


def to_row(sample: Sample) -> dict[str, Any]:
    """Return a sample's columns; None for a number that is not finite."""
    columns = {field.name: getattr(sample, field.name) for field in fields(sample)}
    columns |= {"reward": finite(sample.reward), "kl": finite(sample.kl)}
    columns["parts"] = {name: finite(value) for name, value in sample.parts.items()}
    if sample.tokens is not None:
        numbers = {name: _rounded(getattr(sample.tokens, name), TOKEN_DIGITS) for name in _TOKEN_NUMBERS}
        columns["tokens"] = {"texts": list(sample.tokens.texts), **numbers}
    return columns


def reading_columns(readings: EvalReadings) -> dict[str, list[Any]]:
    """Return the columns of an evaluation's readings; None for a number that is not finite."""
    numbers = {"rewards": readings.rewards, "kls": readings.kls}
    columns: dict[str, list[Any]] = {name: _rounded(values, READING_DIGITS) for name, values in numbers.items()}
    return columns | {"lengths": list(readings.lengths)}


def token_readings(stored: Mapping[str, Sequence[Any]]) -> TokenReadings:
    """Return a row's token readings; NaN for a number that was not finite."""
    numbers = {name: tuple(math.nan if value is None else value for value in stored[name]) for name in _TOKEN_NUMBERS}
    return TokenReadings(texts=tuple(stored["texts"]), **numbers)


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _rounded(values: Sequence[float], digits: int) -> list[float | None]:
    return [finite(float(f"{value:.{digits}g}")) for value in values]


LEASE_SECONDS = 60.0
"""A lease not renewed for this long may be taken over even if its process might still be alive elsewhere."""
INTERRUPTED = "interrupted"
"""Status shown for a trial that has not ended and has no controller: the study's next run resumes it."""


@dataclass(frozen=True)
class Lease:
    """The right to write to one study, until a later token is issued."""

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
    """Host of its current or last controller."""
    lease_pid: int | None
    lease_pid_started: float | None
    lease_renewed_at: float | None
    lease_token: int = 0
    """Number of controllers that have held it."""
    lease_pid_space: str | None = None
    """Namespace of `lease_pid` and `lease_pid_started`; see `pid_space`."""
    stopping_at: float | None = None
    """Time since which the controller starts no trial and stops running ones after their steps; None: it continues."""
    paused_at: float | None = None
    """Time at which an order paused the study; None: it is not paused."""
    folder: str | None = None
    """Last known folder of its trials, as an absolute path on the controller's host."""
    workers: int | None = None
    """Number of trials run at a time."""
    overrides: dict[str, dict[str, float | None]] | None = None
    """Values last read from the study file, and those that orders changed since (see `tuner.control.session`)."""
    digests: dict[str, str] | None = None
    """Of the parts of its task, as its trials have found them (`ppo_core.loading.digest`); None: not prepared yet."""
    read_at: float | None = None
    """Time of this reading, by the leases' clock (see `tuner.store.connect`). Not stored."""

    @property
    def has_controller(self) -> bool:
        """True if a controller is alive: its process, or if that cannot be seen from here, its lease is fresh."""
        if self.lease_pid is None or self.lease_renewed_at is None:
            return False
        alive = self.lease_process_is_alive
        return self.lease_age < LEASE_SECONDS if alive is None else alive

    @property
    def is_stopping(self) -> bool:
        """True if a live controller is stopping: it ends once each running trial has finished its step."""
        return self.has_controller and self.stopping_at is not None

    @property
    def lease_process_is_alive(self) -> bool | None:
        """True if the lease's process lives; None if there is none, or it cannot be seen from here."""
        started, space = self.lease_pid_started, self.lease_pid_space
        if self.lease_host is None or self.lease_pid is None or started is None or space is None:
            return None
        return is_alive(ProcessKey(self.lease_host, self.lease_pid, started, space))

    @property
    def lease_age(self) -> float:
        """Seconds since the lease was renewed; infinity if there is none."""
        if self.lease_renewed_at is None:
            return math.inf
        return (time.time() if self.read_at is None else self.read_at) - self.lease_renewed_at


@dataclass(frozen=True)
class TrialRow:
    """One trial as stored; the reference documents these fields. Times are seconds since the epoch."""

    id: int
    study_id: int
    number: int
    origin: Origin
    status: Status
    reason: Reason | None
    config: dict[str, HyperValue]
    """All hyperparameters by name."""
    params: dict[str, HyperValue]
    """Values given to this trial: searched, listed, enqueued, or changed in a fork."""
    value: float | None
    """Eval reward of its best checkpoint within the KL budget; None: it has none yet."""
    value_se: float | None
    """Its standard error over the eval prompts."""
    kl: float | None
    """Eval KL of that checkpoint, in nats per response."""
    violation: float | None
    """log(eval KL / KL budget) of its value, -5 to 0; 0: it has none, 1: the run broke, None: not judged."""
    episodes: int
    seconds: float
    """Device time of all attempts."""
    attempts: int
    """Starts and resumptions."""
    threads: int
    """CPU threads of its trainer."""
    started_at: float
    """Start of its first attempt; before that, when it was recorded."""
    ended_at: float | None
    label: str = ""
    """Name given by the study file or an order, or empty."""
    parent: int | None = None
    """Number of the trial that it was forked from, or confirms."""
    fork_step: int | None = None
    """The parent's step whose checkpoint it starts from; rows up to there are copies of the parent's."""
    wanted: Wanted | None = None
    """A pending order on it."""
    role: Role = Role.SEARCH
    seed: int | None = None
    """Its trainer's seed; None if its configuration has none."""
    value_step: int | None = None
    """Step of the evaluation that gave `value`."""
    end_reward: float | None = None
    """Eval reward of its last evaluation, at any KL."""
    end_kl: float | None = None
    """Eval KL of its last evaluation, in nats per response: tells if the configuration itself ends within a budget."""
    end_kl_se: float | None = None
    sft_reward: float | None = None
    """The SFT policy's eval reward, from step 0."""
    reread_step: int | None = None
    """Step of its checkpoint that was read once more when the search had ended."""
    reread_reward: float | None = None
    """Eval reward of that reading; None: it gave none."""
    reread_kl: float | None = None
    """Its eval KL, in nats per response."""
    reread_kl_se: float | None = None
    reread_seconds: float | None = None
    """What it cost; `seconds` include it."""
    retries: int = 0
    """Resumptions after a lost worker or an error, since the last new checkpoint."""
    is_interrupted: bool = False
    """True if it has not ended and its study has no live controller. Derived from the lease, not stored."""

    @property
    def informs_sampler(self) -> bool:
        """True if the study's sampler learns from it."""
        return self.role is Role.SEARCH and self.origin is not Origin.BASELINE

    @property
    def counts_toward_total(self) -> bool:
        """True if it counts towards the study's total; trials that people add do not."""
        return self.role is Role.SEARCH and self.origin is not Origin.ENQUEUED

    @property
    def has_failed(self) -> bool:
        """True if an error ended it, or a rule before its first update, for which its values are not to blame."""
        return self.status is Status.FAILED or (self.status is Status.PRUNED and not self.episodes)

    @property
    def shown_status(self) -> str:
        """The status as people and scripts see it: `interrupted`, or the stored one."""
        return INTERRUPTED if self.is_interrupted else self.status.value


@dataclass(frozen=True)
class OnTest:
    """A checkpoint's result on the test prompts; None for a number that is not finite."""

    step: int
    prompts: int
    """Number of prompts read; 0: none."""
    reward: float | None
    reward_se: float | None
    kl: float | None
    """In nats per response."""
    kl_se: float | None
    why_not: str | None
    """Reason that none were read."""
    at: float
    """Time of the reading."""


@dataclass(frozen=True)
class Outcome:
    """Result of a finished trial, as `Store.finish_trial` records it."""

    status: Status
    reason: Reason | None = None
    value: float | None = None
    value_se: float | None = None
    kl: float | None = None
    violation: float | None = None
    value_step: int | None = None
    end_reward: float | None = None
    end_kl: float | None = None
    end_kl_se: float | None = None
    sft_reward: float | None = None


class OrderState(StrEnum):
    """State of an order."""

    WAITING = "waiting"
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True)
class Order:
    """One order as stored."""

    id: int
    study_id: int
    key: str
    """Chosen by whoever placed it."""
    kind: str
    """The command, a name of ORDER_KINDS."""
    trial: int | None
    """Number of the trial concerned; None: the study."""
    arguments: dict[str, Any]
    placed_by: str
    placed_at: float
    state: OrderState
    outcome: str | None
    """One line on the result."""
    decided_at: float | None

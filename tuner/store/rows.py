"""What the store's tables hold, as plain values."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ppo_core.declare import HyperValue
from ppo_core.report import EvalReadings, Sample, TokenReadings
from tuner.status import Origin, PausedBy, Reason, Role, Status, Wanted
from tuner.store.processes import ProcessKey, is_alive

# Samples as rows of the store: what a column cannot hold is left out, and token readings are made small.

DIGITS = 4
"""Significant digits of a token's readings: they are looked at, not computed with."""
READING_DIGITS = 7
"""Significant digits of what an evaluation read of each prompt: those of single precision."""

_FIELDS = tuple(field.name for field in fields(TokenReadings))


def to_row(sample: Sample) -> dict[str, Any]:
    """Return the columns of a sample. A number that is not finite is None."""
    return {
        "prompt_index": sample.prompt_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": finite(sample.reward),
        "kl": finite(sample.kl),
        "length": sample.length,
        "parts": {name: finite(value) for name, value in sample.parts.items()},
        "tokens": None if sample.tokens is None else _token_columns(sample.tokens),
    }


def reading_columns(readings: EvalReadings) -> dict[str, list[Any]]:
    """Return the columns of an evaluation's readings. A number that is not finite is None."""
    rewards, kls = ([_short(v, READING_DIGITS) for v in values] for values in (readings.rewards, readings.kls))
    return {"rewards": rewards, "kls": kls, "lengths": list(readings.lengths)}


def token_readings(stored: Mapping[str, Sequence[Any]]) -> TokenReadings:
    """Return the token readings of a row; NaN stands for what was not a finite number."""
    numbers = {name: tuple(math.nan if v is None else v for v in stored[name]) for name in _FIELDS if name != "texts"}
    return TokenReadings(texts=tuple(stored["texts"]), **numbers)


def _token_columns(tokens: TokenReadings) -> dict[str, list[Any]]:
    numbers = {name: [_short(value) for value in getattr(tokens, name)] for name in _FIELDS if name != "texts"}
    return {"texts": list(tokens.texts), **numbers}


def finite(value: float) -> float | None:
    """Return a number as a column holds it: None where it is not finite."""
    return float(value) if math.isfinite(value) else None


def _short(value: float, digits: int = DIGITS) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


LEASE_SECONDS = 60.0
"""A lease not renewed for this long may be taken over even if its process might still be alive elsewhere."""
INTERRUPTED = "interrupted"
"""The status shown of a trial that has not ended and that nobody runs: the next run of its study resumes it."""


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
    """Host of its controller, or of its last one."""
    lease_pid: int | None
    lease_pid_started: float | None
    lease_renewed_at: float | None
    lease_token: int = 0
    """How many controllers have held it."""
    lease_pid_space: str | None = None
    """Where `lease_pid` counts, and `lease_pid_started` is read; see `tuner.store.processes`."""
    stopping_at: float | None = None
    """Since when its controller starts no trial and leaves the running ones after their steps; None: it does not."""
    paused_at: float | None = None
    """Since when no trial of it is to run, by an order; None: it is not paused."""
    folder: str | None = None
    """Where its trials' folders were last, as an absolute path on the controller's host."""
    workers: int | None = None
    """How many trials its controller runs at a time."""
    overrides: dict[str, dict[str, float]] | None = None
    """What its study file said last, and what orders changed since (see `tuner.held_study`)."""
    read_at: float | None = None
    """When this was read, by the clock that leases are kept by (see `tuner.store.connect`). Not stored."""

    @property
    def is_held(self) -> bool:
        """Whether a controller is alive: its process, or where that cannot be seen from here, its lease is fresh."""
        if self.lease_pid is None or self.lease_renewed_at is None:
            return False
        alive = self.lease_process_is_alive
        return self.lease_age < LEASE_SECONDS if alive is None else alive

    @property
    def is_stopping(self) -> bool:
        """Whether a controller is alive that ends its run once each running trial has finished its step."""
        return self.is_held and self.stopping_at is not None

    @property
    def lease_process_is_alive(self) -> bool | None:
        """Whether the lease's process lives; None if there is none, or it cannot be seen from here."""
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
    """One trial as stored. `value` is eval reward, `kl` eval KL in nats per response."""

    id: int
    study_id: int
    number: int
    origin: Origin
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
    label: str = ""
    """What the study file or an order calls it; empty where it has no name."""
    parent: int | None = None
    """The trial that it was forked from."""
    fork_step: int | None = None
    """The step of `parent` whose checkpoint it begins at; its own rows up to there are copies of its parent's."""
    wanted: Wanted | None = None
    """What an order wants of it, until it is done."""
    role: Role = Role.SEARCH
    seed: int | None = None
    """Seed of its trainer. None: its configuration states none."""
    paused_by: PausedBy | None = None
    """Who paused it; None: it is not paused."""
    value_step: int | None = None
    """The step whose evaluation `value` is."""
    end_reward: float | None = None
    """Eval reward of its last evaluation, whatever its KL."""
    end_kl: float | None = None
    """Eval KL of its last evaluation, in nats per response: whether the configuration itself ends within a budget."""
    end_kl_se: float | None = None
    rung_episode: int | None = None
    """The episodes after which the strategy paused it at its rung; None: it did not come to one."""
    rung_score: float | None = None
    """What it is ranked by there, from 0 to 1; None: nothing could be read."""
    is_promoted: bool = False
    """Whether it was to run on past its rung, whatever became of it."""
    retries: int = 0
    """How often it was resumed after a lost worker or an error without a new checkpoint in between."""
    is_interrupted: bool = False
    """Whether it has not ended and no controller lives that would end it. Not stored: the study's lease says so."""

    @property
    def teaches(self) -> bool:
        """Whether the study's sampler learns from it."""
        return self.role is Role.SEARCH

    @property
    def counts(self) -> bool:
        """Whether the study's total counts it; what people add comes on top."""
        return self.role is Role.SEARCH and self.origin is not Origin.ENQUEUED

    @property
    def is_resting(self) -> bool:
        """Whether the strategy paused it: it runs again only if it is promoted."""
        return self.status is Status.PAUSED and self.paused_by is PausedBy.STRATEGY

    @property
    def is_done(self) -> bool:
        """Whether it keeps no study unfinished: it has ended, or the strategy paused it."""
        return self.status.is_final or self.is_resting

    @property
    def shown_status(self) -> str:
        """The status as people and scripts see it: `interrupted`, or the stored one."""
        return INTERRUPTED if self.is_interrupted else self.status.value


@dataclass(frozen=True)
class OnTest:
    """How a trial's checkpoint did on the test prompts. A number that is not finite is None."""

    step: int
    """Step of the checkpoint."""
    prompts: int
    """How many there are; 0: none were read."""
    reward: float | None
    reward_se: float | None
    kl: float | None
    """In nats per response."""
    kl_se: float | None
    why_not: str | None
    """Why none were read; None: they were."""
    at: float
    """When it was read."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: what `Store.finish_trial` records."""

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

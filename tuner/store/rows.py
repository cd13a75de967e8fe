"""Rows of the store's tables as plain values, and whether the process that holds a study's lease still lives."""

import functools
import math
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from ppo_core.config.declare import HyperValue
from ppo_core.report import EvalReadings, Sample, TokenReadings
from tuner.study.status import Origin, PausedBy, Reason, Role, Status, Wanted

DIGITS = 4
"""Significant digits of a token's readings, which are only looked at."""
READING_DIGITS = 7
"""Significant digits of an evaluation's readings per prompt: single precision."""

_FIELDS = tuple(field.name for field in fields(TokenReadings))


def to_row(sample: Sample) -> dict[str, Any]:
    """Return a sample's columns; None for a number that is not finite."""
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
    """Return the columns of an evaluation's readings; None for a number that is not finite."""
    rewards, kls = ([_short(v, READING_DIGITS) for v in values] for values in (readings.rewards, readings.kls))
    return {"rewards": rewards, "kls": kls, "lengths": list(readings.lengths)}


def token_readings(stored: Mapping[str, Sequence[Any]]) -> TokenReadings:
    """Return a row's token readings; NaN for a number that was not finite."""
    numbers = {name: tuple(math.nan if v is None else v for v in stored[name]) for name in _FIELDS if name != "texts"}
    return TokenReadings(texts=tuple(stored["texts"]), **numbers)


def _token_columns(tokens: TokenReadings) -> dict[str, list[Any]]:
    numbers = {name: [_short(value) for value in getattr(tokens, name)] for name in _FIELDS if name != "texts"}
    return {"texts": list(tokens.texts), **numbers}


def finite(value: float) -> float | None:
    """Return the number, or None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def _short(value: float, digits: int = DIGITS) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


LEASE_SECONDS = 60.0
"""A lease not renewed for this long may be taken over even if its process might still be alive elsewhere."""
INTERRUPTED = "interrupted"
SCREENED = "screened"
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
    """Time since which the controller starts no trial and stops running ones after their steps; None: it goes on."""
    paused_at: float | None = None
    """Time at which an order paused the study; None: it is not paused."""
    folder: str | None = None
    """Last known folder of its trials, as an absolute path on the controller's host."""
    workers: int | None = None
    """Number of trials run at a time."""
    overrides: dict[str, dict[str, float]] | None = None
    """Values last read from the study file, and those that orders changed since (see `tuner.control.session`)."""
    read_at: float | None = None
    """Time of this reading, by the leases' clock (see `tuner.store.connect`). Not stored."""

    @property
    def is_held(self) -> bool:
        """True if a controller is alive: its process, or if that cannot be seen from here, its lease is fresh."""
        if self.lease_pid is None or self.lease_renewed_at is None:
            return False
        alive = self.lease_process_is_alive
        return self.lease_age < LEASE_SECONDS if alive is None else alive

    @property
    def is_stopping(self) -> bool:
        """True if a live controller is stopping: it ends once each running trial has finished its step."""
        return self.is_held and self.stopping_at is not None

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
    """Name given by the study file or an order, or empty."""
    parent: int | None = None
    """Number of the trial it was forked from."""
    fork_step: int | None = None
    """The parent's step whose checkpoint it starts from; rows up to there are copies of the parent's."""
    wanted: Wanted | None = None
    """A pending order on it."""
    role: Role = Role.SEARCH
    seed: int | None = None
    """Its trainer's seed; None if its configuration has none."""
    paused_by: PausedBy | None = None
    """None: it is not paused."""
    value_step: int | None = None
    """Step of the evaluation that gave `value`."""
    end_reward: float | None = None
    """Eval reward of its last evaluation, at any KL."""
    end_kl: float | None = None
    """Eval KL of its last evaluation, in nats per response: tells if the configuration itself ends within a budget."""
    end_kl_se: float | None = None
    rung_episode: int | None = None
    """Episodes at which the strategy paused it at its rung; None: it did not reach one."""
    rung_score: float | None = None
    """From 0 to 1; None: not at a rung, or no KL could be read."""
    is_promoted: bool = False
    """True once the strategy or a person let it run past its rung."""
    retries: int = 0
    """Resumptions after a lost worker or an error, since the last new checkpoint."""
    is_interrupted: bool = False
    """True if it has not ended and its study has no live controller. Derived from the lease, not stored."""

    @property
    def teaches(self) -> bool:
        """True if the study's sampler learns from it."""
        return self.role is Role.SEARCH

    @property
    def counts(self) -> bool:
        """True if it counts towards the study's total; trials that people add do not."""
        return self.role is Role.SEARCH and self.origin is not Origin.ENQUEUED

    @property
    def is_at_rung(self) -> bool:
        """True if the strategy paused it at its rung: it runs again only if promoted."""
        return self.status is Status.PAUSED and self.paused_by is PausedBy.STRATEGY

    @property
    def is_done(self) -> bool:
        """True if it does not keep the study unfinished: it has ended, or is paused at its rung."""
        return self.status.is_final or self.is_at_rung

    @property
    def shown_status(self) -> str:
        """The status as people and scripts see it: `interrupted`, or the stored one."""
        return INTERRUPTED if self.is_interrupted else self.status.value

    @property
    def status_word(self) -> str:
        """The status in texts: `screened` where the strategy paused it at its rung; people pause trials, too."""
        return SCREENED if self.is_at_rung else self.shown_status


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


# A lease's process is identified by its id, its start in ticks since the boot, and the boot and namespace of that id.
# On another host, boot or container the same id is another process, so processes are looked up only here.

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19
"""Positions of fields 3 and 22 of `/proc/<pid>/stat` after the command's name; see proc(5)."""


@dataclass(frozen=True)
class ProcessKey:
    """Identity of a process, independent of any clock."""

    host: str
    pid: int
    started: float
    """Clock ticks since the boot; on a system without `/proc`, seconds since the epoch as the kernel noted once."""
    space: str
    """Boot and pid namespace of its id; see `pid_space`."""


def this_process() -> ProcessKey:
    pid = os.getpid()
    state = _state_and_start(pid)
    return ProcessKey(socket.gethostname(), pid, 0.0 if state is None else state[1], pid_space())


@functools.cache
def pid_space() -> str:
    """Return the name of this boot and pid namespace, within which process ids are comparable.

    Unique to this call if it cannot be determined.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        # Without /proc (macOS) there are no pid namespaces, and a process that started before a boot is dead.
        return f"unknown {uuid.uuid4()}" if (_PROC / "self").exists() else f"machine {uuid.getnode():x}"


def is_alive(key: ProcessKey) -> bool | None:
    """Return True if this very process lives, not a later one with its id; None if it cannot be seen from here."""
    if key.host != socket.gethostname() or key.space != pid_space():
        return None
    try:
        os.kill(key.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is someone else's, and there
    found = _state_and_start(key.pid)
    if found is None:
        return None
    is_zombie, started = found
    return not is_zombie and started == key.started


def _state_and_start(pid: int) -> tuple[bool, float] | None:
    """Return (is a zombie, start time) of a process, or None if it may not be inspected."""
    if not (_PROC / "self").exists():
        try:
            process = psutil.Process(pid)
            return process.status() == psutil.STATUS_ZOMBIE, process.create_time()
        except psutil.Error:
            return None
    try:
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[_STATE] in ("Z", "X"), float(fields[_STARTED])

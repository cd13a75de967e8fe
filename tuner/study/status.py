"""Statuses, origins and roles of trials, reasons of early ends, and the kinds of orders. Never imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Status(StrEnum):
    """State of a trial. WAITING, RUNNING and PAUSED are not final."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    PRUNED = "pruned"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        """True if the trial has ended for good."""
        return self not in (Status.WAITING, Status.RUNNING, Status.PAUSED)

    @property
    def meaning(self) -> str:
        """One sentence for tooltips and docs."""
        return _MEANINGS[self]


_MEANINGS = {
    Status.WAITING: "To be started, or resumed, as soon as a worker is free.",
    Status.RUNNING: "Training, or to be resumed from its last checkpoint by the next run of the study.",
    Status.PAUSED: "Paused at a checkpoint until it is resumed.",
    Status.COMPLETED: "Ran to its end.",
    Status.PRUNED: "Ended early by a rule; the reason says which, with its evidence.",
    Status.FAILED: "Ended by an error, which the reason contains.",
    Status.STOPPED: "Ended by a person.",
}


class Origin(StrEnum):
    """Source of a trial's configuration."""

    REFERENCE = "reference"
    """Trial 0: the task's own values, TRL's where it states none."""
    BASELINE = "baseline"
    """Trial 1, where the study file has a `[baseline]` table: the user's present configuration."""
    SAMPLED = "sampled"
    """The sampler proposed it."""
    LISTED = "listed"
    """Listed in the study file, as a trial or as a start of the search."""
    ENQUEUED = "enqueued"
    """A person asked for it."""
    FORKED = "forked"
    """A checkpoint of another trial, with changed values."""


class Role(StrEnum):
    """Purpose of a trial. Only trials of the search inform the sampler."""

    SEARCH = "search"
    """A trial of the search, or one that a person enqueued."""
    CONFIRM = "confirm"
    """A recommended configuration with a fresh seed, whose checkpoint is evaluated on the test prompts."""
    FORK = "fork"
    """Started from another trial's checkpoint, so its result says little about its configuration alone."""


class Wanted(StrEnum):
    """An order's demand on a running trial."""

    STOP = "stop"
    PAUSE = "pause"


@dataclass(frozen=True)
class Reason:
    """Reason of an early end: `rule` read `metric` = `value` against `limit` for `steps_over` steps up to `step`."""

    rule: str
    """A guard's rule, `pruner`, `person`, `error`, `out_of_memory` or `worker_lost`; `outage`: it waits."""
    message: str
    """One line for people."""
    metric: str | None = None
    value: float | None = None
    limit: float | None = None
    steps_over: int | None = None
    step: int | None = None
    evidence: tuple[dict[str, float], ...] = ()
    """The last steps' readings: `step`, `episode` and the metrics that were watched."""
    log: str = ""
    """The end of the trial's log, where an error or a lost worker ended it."""
    cause: str = ""
    """Equal for trials that fail for the same cause: an error's type, file and line, or how a worker was lost."""


WORKER_LOST = "worker_lost"
"""Rule of a failed trial that is not to blame: its worker died, again and again."""
OUTAGE = "outage"
"""The rule of a trial that waits for an external service to recover."""
PERSON = "person"
"""The rule of a trial that a person ended."""
PRUNER = "pruner"
"""The rule of a trial that the study's pruner ended."""
STOPPED_BY_PERSON = Reason(PERSON, "stopped by a person")


@dataclass(frozen=True)
class OrderKind:
    """One kind of order."""

    name: str
    trial: Literal["needed", "allowed", "none"]
    """If "allowed", an order without a trial concerns the whole study."""
    doc: str


ORDER_KINDS: Mapping[str, OrderKind] = {
    kind.name: kind
    for kind in (
        OrderKind("stop", "allowed",
            "end a trial after its step and keep what it reached; without a trial: end this run of the study cleanly"),
        OrderKind("pause", "allowed", "save a trial and pause it; without a trial: the whole study"),
        OrderKind("resume", "allowed", "resume a paused trial; without a trial: the whole study"),
        OrderKind("retry", "allowed", "run a failed trial again; without a trial: all failed ones"),
        OrderKind("enqueue", "none", "run a configuration of your own next"),
        OrderKind("fork", "needed", "start a new trial from a trial's checkpoint, with changed values"),
        OrderKind("set", "none", "change the study's trials, budget, workers or KL budget"),
    )
}  # fmt: skip

CHANGEABLE_SETTINGS: Mapping[str, str] = {
    "trials": "the study's total number of trials",
    "budget": "what the search may spend: trials of full length such as 8, or time such as 90s, 3m or 2h",
    "workers": "trials at the same time",
    "kl_budget": "nats per response",
}
"""Settings that the order `set` changes."""

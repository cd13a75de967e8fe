"""A trial's statuses, declared once: what each means and how it is told. Never imports torch."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Where a trial stands. Everything but RUNNING and PAUSED is final."""

    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    PRUNED = "pruned"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        """Whether the trial has ended for good."""
        return self not in (Status.RUNNING, Status.PAUSED)

    @property
    def meaning(self) -> str:
        """One sentence for tooltips and docs."""
        return _MEANINGS[self]


_MEANINGS = {
    Status.RUNNING: "Training, or to be taken up again from its last checkpoint by the next run of the study.",
    Status.PAUSED: "Set aside at a checkpoint; may go on.",
    Status.COMPLETED: "Ran to its end.",
    Status.PRUNED: "Ended early by a rule; the reason names it, with the evidence.",
    Status.FAILED: "Ended by an error; the reason holds it.",
    Status.STOPPED: "Ended by a person.",
}


@dataclass(frozen=True)
class Reason:
    """Why a trial ended early: `rule` read `metric` = `value` against `limit` for `steps_over` steps up to `step`."""

    rule: str
    message: str
    """One line for people."""
    metric: str | None = None
    value: float | None = None
    limit: float | None = None
    steps_over: int | None = None
    step: int | None = None
    evidence: tuple[dict[str, float], ...] = ()
    """The last steps' readings: `step`, `episode` and the metrics that were watched."""

"""How a run of a study is bounded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a run of a study is given."""

    threads: int
    """CPU threads of a new trial."""
    most_workers: int | None
    """One a GPU, where they were named; None: any number."""
    checkpoint_url: str | None
    """Where checkpoints are kept beside the runs folder, if anywhere."""
    deadline: float | None
    """On the monotonic clock."""
    timeout: float | None
    """The seconds that led to the deadline."""

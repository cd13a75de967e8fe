"""Kinds of orders, declared once for the command line, the dashboard and the controller."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OrderKind:
    """One kind of order."""

    name: str
    trial: Literal["needed", "allowed", "none"]
    """If "allowed", an order without a trial concerns the whole study."""
    doc: str
    arguments: tuple[str, ...] = ()
    """Keys of its arguments."""


KINDS: Mapping[str, OrderKind] = {
    kind.name: kind
    for kind in (
        OrderKind(
            "stop",
            "allowed",
            "end a trial now and keep what it reached; without a trial: end this run of the study cleanly",
        ),
        OrderKind("pause", "allowed", "save a trial and pause it; without a trial: the whole study"),
        OrderKind("resume", "allowed", "resume a paused trial; without a trial: the whole study"),
        OrderKind("retry", "allowed", "run a failed trial again; without a trial: all failed ones"),
        OrderKind("enqueue", "none", "run a configuration of your own next", ("values", "label")),
        OrderKind(
            "fork",
            "needed",
            "start a new trial from a trial's checkpoint, with changed values",
            ("values", "episode", "label"),
        ),
        OrderKind("set", "none", "change the study's trials, budget, workers or KL budget", ("changes",)),
    )
}

SETTINGS: Mapping[str, str] = {
    "trials": "the study's total number of trials",
    "budget": "what the study may spend, in trials of full length",
    "workers": "trials at the same time",
    "kl_budget": "nats per response",
}
"""Settings that the order `set` changes."""

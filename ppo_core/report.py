"""A trainer's reports on its steps, and the answers to them. Plain data between processes; never imports torch.

A report shows in two ways that sampler and trainer disagree: a token's log-probability when sampled differs from the
one in training; and sampled and exact KL differ, though k1 estimates the exact KL without bias for tokens drawn from
the trained distribution.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from ppo_core.errors import ConfigError
from ppo_core.metrics import CORE, METRICS


@dataclass(frozen=True)
class Sample:
    """One eval prompt and the policy's response at one step."""

    prompt_index: int
    """Index among the task's eval prompts, the same in every trial."""
    prompt: str
    response: str
    reward: float
    kl: float
    """Exact KL from the reference, in nats per response."""
    length: int
    """Response tokens, the end-of-sequence token included."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's parts by name, unweighted."""
    tokens: "TokenReadings | None" = None
    """Readings of the response's tokens."""


@dataclass(frozen=True)
class TokenReadings:
    """Readings of a response's T tokens: log-probability, KL from the reference, and the critic's values. All [T]."""

    texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    """Log-probability under the policy, in nats."""
    log_ratios: tuple[float, ...]
    """log π - log π_ref of the token, in nats."""
    kls: tuple[float, ...]
    """Exact KL at the token's position, in nats."""
    advantages: tuple[float, ...] = ()
    """GAE from the evaluation's own rewards, before whitening; empty without a critic."""
    values: tuple[float, ...] = ()
    """The critic's predictions; empty without a critic."""


@dataclass(frozen=True)
class EvalReadings:
    """An evaluation's readings of each eval prompt, in order, to compare trials prompt by prompt."""

    rewards: tuple[float, ...]
    """In total, as `eval/reward` averages them."""
    kls: tuple[float, ...]
    """Exact KL from the reference, in nats per response."""
    lengths: tuple[int, ...]
    """Response tokens, the end-of-sequence token included."""


@dataclass(frozen=True)
class SplitReading:
    """A policy's results on a whole set of prompts: means, with standard errors over the prompts."""

    prompts: int
    reward: float
    reward_se: float
    kl: float
    """Exact KL from the reference, in nats per response."""
    kl_se: float


@dataclass(frozen=True)
class StepReport:
    """One step of a run. Step 0 is the SFT policy's evaluation; step n is PPO iteration n."""

    step: int
    episode: int
    """Episodes collected since the start of the run."""
    metrics: dict[str, float]
    """Declared metrics by name (see `ppo_core.metrics`), and a task's own; eval/* only if evaluated."""
    samples: tuple[Sample, ...] = field(default=())
    """Responses to a few fixed eval prompts, if evaluated."""
    readings: EvalReadings | None = None
    """Readings of every eval prompt, if evaluated."""

    @property
    def is_evaluation(self) -> bool:
        """True if this step evaluated on the eval prompts."""
        return "eval/reward" in self.metrics


def first_not_finite(report: StepReport) -> str | None:
    """Return the first metric that must be finite and is not, or None."""
    return next((name for name in CORE if not math.isfinite(report.metrics.get(name, 0.0))), None)


def not_finite(report: StepReport, metric: str) -> str:
    """Say which metric was not finite, at which step."""
    what = "not a number" if math.isnan(report.metrics[metric]) else "infinite"
    return f"{METRICS[metric].label} ({metric}) was {what} at step {report.step}"


class NextMove(Enum):
    """A run's next move after a step, or after a lack of room for a checkpoint."""

    GO_ON = "go on"
    EVALUATE = "evaluate"
    """Evaluate the current policy, and report the same step again."""
    SAVE = "save"
    """Save a checkpoint and keep running."""
    LEAVE = "leave"
    """Save a checkpoint and leave the run, to be resumed later or never."""
    STOP = "stop"


DEVICES = ("auto", "cpu")
"""Devices of a trainer: accelerate's choice, or the CPU. CUDA_VISIBLE_DEVICES selects the GPU."""


def require_device(device: object, where: str) -> str:
    """Return `device` if it is one of DEVICES, else raise ConfigError; `where` names the setting."""
    if isinstance(device, str) and device in DEVICES:
        return device
    raise ConfigError(
        f"{where} = {device!r} is not allowed; expected {' or '.join(DEVICES)} (CUDA_VISIBLE_DEVICES picks GPUs)"
    )


def iteration_seconds(report: StepReport) -> float:
    """Return an iteration's seconds without its evaluation; NaN if not reported."""
    return sum(report.metrics.get(f"time/{phase}", math.nan) for phase in ("generate", "score", "update"))


class Trainer(Protocol):
    """The trainer of a trial: PPO by default, or anything a study names as `module:factory`.

    In a fork `resume_from` is a checkpoint of another config; `config` applies from there on.

    A factory is called as `factory(config, task_name, device=..., resume_from=...)`. If the trainer has a method
    `checkpoint_bytes() -> int`, the approximate size of a checkpoint, the room for its checkpoints is checked before
    its first step. A method `tested() -> SplitReading | None` evaluates the current policy on the task's test prompts,
    or returns None if there are none: the best checkpoint of a study is evaluated this way, once. A method
    `evaluated_again() -> SplitReading` evaluates it on the eval prompts with other random numbers than `evaluated`: the
    best few checkpoints of a search are read this way before one is chosen.

    If a trial has several processes, each makes a trainer, and all get the same calls in the same order. One process
    alone then writes files, and our own errors, such as NoRoomError, are raised in all (`ppo_core.distributed.world`).
    """

    def __iter__(self) -> Iterator[StepReport]:
        """Yield one report per step. Between two reports the caller may stop, save or evaluate."""

    def evaluated(self, report: StepReport) -> StepReport:
        """Return the step's `report` with an evaluation of the current policy."""

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint of everything that the next step depends on, and the driver's JSON `extra`."""

    def save_model(self, folder: Path) -> None:
        """Save the trained model as a folder for its users."""


MISMATCH = "sampler/mismatch"
MISMATCH_LIMIT = 1.0
"""In nats. Low precision causes tenths of a nat; a wrong mask or temperature, several."""

KL_GAP, KL_GAP_NOISE = "sampler/kl_gap", "sampler/kl_gap_noise"
KL_GAP_LIMIT = 4.0
"""In multiples of the noise."""
KL_GAP_STEPS = 3
"""Consecutive steps over the limit before a warning: a single one may be chance."""


class AgreementWatch:
    """Warns, once per sign, that a run's sampler and trainer disagree."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._gaps = 0

    def warnings(self, report: StepReport) -> list[str]:
        """Return the new warnings after a step, one line each."""
        found = {}
        mismatch = report.metrics.get(MISMATCH, 0.0)
        if mismatch > MISMATCH_LIMIT:
            found[MISMATCH] = (
                f"sampler mismatch of {mismatch:.3g} nats at step {report.step}, over {MISMATCH_LIMIT:g}: sampler and "
                f"trainer disagree ({MISMATCH}), so this run's KL cannot be trusted"
            )
        self._gaps = self._gaps + 1 if is_apart(report.metrics) else 0
        if self._gaps >= KL_GAP_STEPS:
            found[KL_GAP] = (
                f"sampled and exact KL were {abs(report.metrics[KL_GAP]):.3g} nats per response apart at step "
                f"{report.step}, for {self._gaps} steps over {KL_GAP_LIMIT:g} times their noise: sampler and trainer "
                f"disagree ({KL_GAP}), so this run's KL cannot be trusted"
            )
        new = [line for sign, line in found.items() if sign not in self._warned]
        self._warned |= found.keys()
        return new


def is_apart(metrics: Mapping[str, float]) -> bool:
    """Return True if sampled and exact KL differ by more than chance explains."""
    if KL_GAP not in metrics or KL_GAP_NOISE not in metrics:
        return False
    return abs(metrics[KL_GAP]) > KL_GAP_LIMIT * metrics[KL_GAP_NOISE]

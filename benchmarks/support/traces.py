"""Recorded runs as the product would have reported them, and what each part of them cost.

What a worker says of a step before anyone asks for more does not depend on the strategy: the guard and the watch on the
KL budget see the step as it was first reported, with a regular evaluation or none. So both are folded over a run once.
What else a strategy asks for is the same step again, with the evaluation that was recorded there.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_core.declare import HyperValue
from ppo_core.hyperparameters import PPOConfig
from tuner.budget_watch import WatchState, watch
from tuner.guard import GuardState, observe
from tuner.protocol import Stepped
from tuner.scoring import EVALUATION_METRICS, is_finite
from tuner.spec import StudySpec

from .recorded import Cause, RecordedRun, RecordedStep, Recording

REGULAR: tuple[Cause, ...] = ("regular",)
"""Why a trainer evaluates by itself."""


@dataclass(frozen=True, eq=False)
class Readings:
    """One evaluation of the whole eval set."""

    row: Mapping[str, Any]
    """As the store has it: step, episode and EVALUATION_METRICS."""
    rewards: NDArray[np.float64]
    """Of each eval prompt, in their order."""
    kls: NDArray[np.float64]
    """Exact KL of each response, in nats."""

    def of_first(self, prompts: int) -> dict[str, Any]:
        """Return what an evaluation of the first prompts alone would have read."""
        numbers: dict[str, float] = {}
        for name, values in (("eval/reward", self.rewards[:prompts]), ("eval/kl", self.kls[:prompts])):
            numbers[name] = float(values.mean())
            numbers[f"{name}_se"] = float(values.std(ddof=1)) / math.sqrt(len(values))
        return {**self.row, **numbers}


@dataclass(frozen=True, eq=False)
class TraceStep:
    """One step of a recorded run, as a worker reports it."""

    first: Stepped
    """Before it is answered: with a regular evaluation, or without one."""
    again: Stepped
    """After the answer EVALUATE: with the evaluation that was recorded there, if any was."""
    seconds: float
    """CPU-seconds of training."""
    evaluation_seconds: float
    """CPU-seconds of an evaluation here; where none was recorded, and of step 0, the median of the run's."""
    readings: Readings | None


@dataclass(frozen=True, eq=False)
class Trace:
    """One recorded run."""

    name: str
    config: dict[str, HyperValue]
    params: dict[str, HyperValue]
    weight: float
    """How much it counts, so that the pool is representative of the search space."""
    steps: Sequence[TraceStep]
    has_failed: bool = False
    """Whether it did not finish: it raised an error after its last step, or that one was not finite."""
    values: Sequence[float] = ()
    """The best value within the KL budget of this configuration's runs, one a recorded seed."""


def traces_of(recording: Recording) -> list[Trace]:
    """Return the runs of a recording that a random search would draw, so repeats on other seeds are none of them."""
    spec, values = recording.spec, dict[str, list[float]]()
    for run in recording.runs:
        value = run.best_within(spec.kl_budget)
        values.setdefault(run.repeats or run.name, []).extend([] if value is None else [value])
    return [trace_of(run, spec, values[run.name]) for run in recording.runs if run.weight > 0]


def trace_of(run: RecordedRun, spec: StudySpec, values: Sequence[float] = ()) -> Trace:
    """Return a recorded run as a trial of the study would have reported it; `values` as in `Trace`."""
    total = PPOConfig.from_dict(run.config).whole_episodes()
    steps = tuple(_folded(run.steps, spec, total))
    return Trace(run.name, dict(run.config), dict(run.params), run.weight, steps, bool(run.stopped), tuple(values))


def _folded(recorded: Sequence[RecordedStep], spec: StudySpec, total_episodes: int) -> Iterator[TraceStep]:
    """Yield the steps of a run with the guard's word and the budget watch's."""
    made = [step.evaluation.cpu_seconds for step in recorded[1:] if step.evaluation is not None]
    typical = statistics.median(made) if made else 0.0
    guard, watching = GuardState(), WatchState()
    for step in recorded:
        first, readings = step.report(REGULAR), _readings(step)
        guard, reason = observe(spec.guard, guard, first, total_episodes)
        watching, is_near = watch(watching, first, spec.kl_budget)
        asked = first if readings is None else step.report()
        own = step.evaluation if step.step > 0 else None  # the SFT policy's is made once a process
        yield TraceStep(
            first=Stepped(replace(first, readings=None), 0.0, 0.0, reason, is_near),
            again=Stepped(replace(asked, readings=None), 0.0, 0.0, reason, is_near, is_again=True),
            seconds=step.cpu_seconds,
            evaluation_seconds=typical if own is None else own.cpu_seconds,
            readings=readings,
        )


def _readings(step: RecordedStep) -> Readings | None:
    """Return what a step's evaluation read; None if there is none, or no finite number, which no worker reports."""
    found = step.evaluation
    if found is None or not (is_finite(found.metrics["eval/reward"]) and is_finite(found.metrics["eval/kl"])):
        return None
    row: dict[str, Any] = {"step": step.step, "episode": step.episode}
    row |= {name: found.metrics.get(name) for name in EVALUATION_METRICS}
    return Readings(row, np.asarray(found.rewards, float), np.asarray(found.kls, float))

"""Recorded runs as the product would have reported them, and what each part of them cost.

What a worker says of a step before anyone asks for more does not depend on the strategy: the guard and the watch on the
KL budget see the step as it was first reported, with a regular evaluation or none. So both are folded over a run once.
What else a strategy asks for is the same step again, with the evaluation that was recorded there.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import PPOConfig
from tuner.engine.protocol import Stepped
from tuner.judge.guard import GuardState, WatchState, check_step, watch
from tuner.judge.scoring import EVALUATION_METRICS, is_finite
from tuner.study.spec import StudySpec

from .recorded import REGULAR, RecordedRun, RecordedStep, Recording


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
    evaluation: Mapping[str, Any] | None
    """The evaluation that was recorded here, as the store would have it."""


@dataclass(frozen=True, eq=False)
class Trace:
    """One recorded run."""

    name: str
    config: dict[str, HyperValue]
    params: dict[str, HyperValue]
    weight: float
    """How much it counts, so that the pool is representative of the search space."""
    steps: Sequence[TraceStep]
    has_failed: bool
    """Whether it did not finish: it raised an error after its last step, or that one was not finite."""
    values: Sequence[float]
    """The best value within the KL budget of this configuration's runs, one a recorded seed."""


def traces_of(recording: Recording) -> list[Trace]:
    """Return the runs of a recording that a random search would draw, so repeats on other seeds are none of them."""
    spec, values = recording.spec, dict[str, list[float]]()
    for run in recording.runs:
        value = run.best_within(spec.kl_budget)
        values.setdefault(run.repeats or run.name, []).extend([] if value is None else [value])
    return [_trace(run, spec, values[run.name]) for run in recording.runs if run.weight > 0]


def _trace(run: RecordedRun, spec: StudySpec, values: Sequence[float]) -> Trace:
    steps = tuple(_folded(run, spec))
    return Trace(run.name, dict(run.config), dict(run.params), run.weight, steps, bool(run.stopped), values)


def _folded(run: RecordedRun, spec: StudySpec) -> Iterator[TraceStep]:
    """Yield the steps of a run with what the guard and the budget watch say of each."""
    made = [step.evaluation.cpu_seconds for step in run.steps[1:] if step.evaluation is not None]
    typical = statistics.median(made) if made else 0.0
    guard, watching, interval = GuardState(), WatchState(), PPOConfig.from_dict(run.config).eval_interval
    for step in run.steps:
        first, evaluation = step.report(REGULAR), _stored(step)
        guard, reason = check_step(spec.guard, guard, first, run.total_episodes, spec.kl_budget)
        watching, is_near = watch(watching, first, spec.kl_budget, interval)
        asked = first if evaluation is None else step.report()
        own = step.evaluation if step.step > 0 else None  # the SFT policy's is made once a process
        yield TraceStep(
            first=Stepped(first, 0.0, 0.0, reason, is_near),
            again=Stepped(asked, 0.0, 0.0, reason, is_near, is_again=True),
            seconds=step.cpu_seconds,
            evaluation_seconds=typical if own is None else own.cpu_seconds,
            evaluation=evaluation,
        )


def _stored(step: RecordedStep) -> dict[str, Any] | None:
    """Return a step's evaluation; None if there is none, or no finite number, which no worker reports."""
    found = step.evaluation
    if found is None or not (is_finite(found.metrics["eval/reward"]) and is_finite(found.metrics["eval/kl"])):
        return None
    row: dict[str, Any] = {"step": step.step, "episode": step.episode}
    return row | {name: found.metrics.get(name) for name in EVALUATION_METRICS}

"""A small hand-made study in a real store, for the tests of what reads one."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ppo_core.report import EvalReadings, Sample, SplitReading, StepReport, TokenReadings
from tuner.confirm.plan import Plan, missing
from tuner.judge.results import read_study
from tuner.judge.scoring import judged
from tuner.store import Lease, NewTrial, Outcome, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Status

NAME = "made"
SPEC = {
    "name": NAME,
    "task": "reviews",
    "trials": 8,
    "seed": 3,
    "fixed": {"total_episodes": 256, "eval_every_episodes": 128, "entropy_coef": 0.01},
    "search": {
        "learning_rate": {"low": 1e-5, "high": 3e-3, "scale": "log"},
        "kl_coef": {"low": 0.01, "high": 0.3, "scale": "log"},
        "kl_target": {"low": 3.0, "high": 12.0, "scale": "log"},
        "batch_size": {"low": 32, "high": 128, "scale": "log2"},
    },
    "kl": {"budget": 10.0, "limit": 15.0},
}
HOSTILE = "[bold red]wow[/bold red] \x1b[31mred\x07 \u202ertl\nsecond line"
"""Markup, terminal codes, a right-to-left override and a line break: all to be shown, none to be obeyed."""
TOKENS = TokenReadings((" fine", HOSTILE), (-0.123456, -2.0), (0.5, -0.25), (0.75, float("nan")))
"""Of a trial without a critic; one reading is not a number."""
KL_REASON = Reason(
    "kl_limit",
    "KL 21.5 over the limit 15 for 3 steps, at step 3",
    metric="objective/kl_exact",
    value=21.5,
    limit=15.0,
    steps_over=3,
    step=3,
    evidence=tuple({"step": float(n), "episode": 64.0 * n, "objective/kl_exact": 15.5 + 2 * n} for n in (1, 2, 3)),
)
HARD_REASON = Reason("kl_hard", "KL 88 over 60 (4 times the limit) at step 2", "objective/kl_exact", 88.0, 60.0, 1, 2)

PARAMS: tuple[dict[str, Any], ...] = (
    {},  # trial 0: the reference
    {"learning_rate": 1e-3, "kl_coef": 0.05, "batch_size": 64},
    {"learning_rate": 5e-4, "kl_coef": 0.1, "batch_size": 64},
    {"learning_rate": 3e-4, "kl_target": 6.0, "batch_size": 32},
    {"learning_rate": 3e-3, "kl_coef": 0.01, "batch_size": 64},
    {"learning_rate": 2.5e-3, "kl_coef": 0.01, "batch_size": 64},
    {"learning_rate": 1e-5, "kl_coef": 0.3, "batch_size": 128},
    {"learning_rate": 2e-5, "kl_coef": 0.3, "batch_size": 128},
)
OUTCOMES: tuple[Outcome | None, ...] = (
    Outcome(Status.COMPLETED, None, 1.0, kl=4.0),
    Outcome(Status.COMPLETED, None, 3.0, kl=12.5),
    Outcome(Status.COMPLETED, None, 2.0, kl=9.0),
    Outcome(Status.STOPPED, Reason("person", "stopped by a person"), 1.5, kl=6.0),
    Outcome(Status.PRUNED, KL_REASON, 0.9, kl=3.0),
    Outcome(Status.PRUNED, HARD_REASON, 0.2, kl=2.0),
    Outcome(Status.FAILED, Reason("error", f"RuntimeError: {HOSTILE}")),
    None,  # still running
)
"""What each trial reads last, and how it ended; it is judged by its evaluations. Best within 10 nats: trial 2; within 100: trial 1; within 8: trial 3; within 5: trial 0; within 1: none."""


def make(path: Path, spec: StudySpec | None = None, outcomes: Sequence[Outcome | None] = OUTCOMES) -> Store:
    """Write a study, `SPEC` unless another is given, to a new store at `path`; it is finished if all trials are."""
    store = Store.open(str(path), create=True)
    spec = spec or StudySpec.from_dict(SPEC, "made")
    store.create_study(spec.name, spec.to_dict())
    lease = store.acquire(spec.name)
    for number, (params, outcome) in enumerate(zip(PARAMS, outcomes, strict=True)):
        params = params or spec.reference_params()
        trial = store.add_trial(
            lease,
            NewTrial(
                number,
                Origin.SAMPLED if number else Origin.REFERENCE,
                config=spec.config(params).to_dict(),
                params=params,
                threads=1,
            ),
        )
        store.begin_attempt(lease, trial, None)
        add_steps(store, lease, trial, outcome)
        if outcome is not None:
            is_read = outcome.status is not Status.FAILED
            ended = judged(store, trial, spec, outcome.status, outcome.reason) if is_read else outcome
            store.finish_trial(lease, trial.id, ended)
        if number == 2:
            store.add_test_reading(lease, trial.id, 4, SplitReading(2, 1.75, 0.05, 8.5, math.nan), None)
    if None not in outcomes:
        store.set_finished(lease)
    store.release(lease)
    return store


def add_steps(store: Store, lease: Lease, trial: TrialRow, outcome: Outcome | None) -> None:
    """Record step 0, three steps in between, and a last one, evaluated at 0, 2 and 4."""
    value, kl = (outcome and outcome.value) or 0.5, (outcome and outcome.kl) or 1.0
    for step in range(5):
        metrics = {"objective/scores": 0.5 + 0.1 * step, "objective/kl_exact": kl * step / 4, "objective/kl_coef": 0.05}
        samples: tuple[Sample, ...] = ()
        readings = None
        if step % 2 == 0:
            metrics["eval/reward"] = (0.25, value - 0.05, value)[step // 2]
            metrics |= {"eval/reward_se": 0.03, "eval/kl": 0.0 if step == 0 else kl, "eval/kl_se": 0.2}
            parts = {"liked": 0.75, "[b]brief": -0.25}
            first = Sample(0, "the film was", f" fine {step}", 0.5, 1.0, 4, parts, TOKENS)
            samples = (first, Sample(1, "food", HOSTILE, 0.1, 2.0, 9))
            rewards = (metrics["eval/reward"] + 0.01 * step, metrics["eval/reward"] - 0.01 * step)
            readings = EvalReadings(rewards, (1.0, float("inf")), (4, 9))
        metrics["own/tone"] = 0.5 * step
        if step == 3:
            metrics["val/var_explained"] = float("nan")
        store.add_step(lease, trial.id, StepReport(step, 64 * step, metrics, samples, readings), 1.5)


def confirm(store: Store, name: str, plan: Plan, read: int | None = None) -> None:
    """Add the runs of a plan to a study, each as good as the trial that it confirms; `read`: so many are read."""
    view, lease = read_study(store, name), store.acquire(name)
    store.add_test_reading(lease, view.trials[0].id, 0, SplitReading(64, 0.25, 0.03, 0.0, 0.0), None)
    for place, new in enumerate(missing([*view.trials, *view.confirming], view.spec, plan)):
        row = store.add_trial(lease, new)
        if read is not None and place >= read:
            continue
        row = store.begin_attempt(lease, row, None)
        reward = view.trials[new.parent or 0].value or 0.0
        metrics = {"eval/reward": reward, "eval/reward_se": 0.03, "eval/kl": 4.0, "eval/kl_se": 0.1}
        store.add_step(lease, row.id, StepReport(3, 192, metrics), 1.0)
        store.finish_trial(lease, row.id, judged(store, row, view.spec, Status.COMPLETED, None))
        noise = 0.01 * float(np.random.default_rng(row.number).standard_normal())
        store.add_test_reading(lease, row.id, 3, SplitReading(64, reward + noise, 0.03, 4.0 + noise, 0.1), None)
    store.release(lease)

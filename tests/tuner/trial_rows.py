"""Made-up rows of the trials table, and a study that they could belong to."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ppo_core.config.declare import HyperValue
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Status

_ROW = TrialRow(
    id=1, study_id=1, number=0, origin=Origin.SAMPLED, status=Status.COMPLETED, reason=None, config={}, params={},
    value=1.0, value_se=0.1, kl=5.0, violation=None, episodes=100, seconds=10.0, attempts=1, threads=1,
    started_at=1_800_000_000.0, ended_at=1_800_000_010.0,
)  # fmt: skip


def trial_row(number: int = 0, **values: Any) -> TrialRow:
    """Return a completed trial's row, or another one by `values`."""
    return replace(_ROW, id=100 + number, number=number, **values)


def pruned(number: int = 0, rule: str = "kl_limit", reading: float | None = 20.0, **values: Any) -> TrialRow:
    """Return the row of a trial that a rule ended."""
    reason = Reason(rule, f"made up: {rule}", "objective/kl_exact", reading)
    return trial_row(number, status=Status.PRUNED, reason=reason, **values)


def running(number: int, params: Mapping[str, HyperValue]) -> TrialRow:
    """Return the row of a trial that has no outcome yet."""
    return trial_row(number, status=Status.RUNNING, params=dict(params), value=None, kl=None)


def make_spec(sampler: str = "tpe", startup_trials: int = 2, **changes: Any) -> StudySpec:
    """Return a study of the reviews task whose range of vf_coef does not contain trial 0's value."""
    names = ("learning_rate", "batch_size", "num_ppo_epochs", "kl_coef", "kl_target")
    content = {
        "name": "mine",
        "task": "reviews",
        "trials": 20,
        "kl": {"budget": 10.0, "limit": 15.0},
        "search": {**dict.fromkeys(names, "advised"), "vf_coef": {"low": 0.5, "high": 1.0}},
        "sampler": {"name": sampler, "startup_trials": startup_trials},
        **changes,
    }
    return StudySpec.from_dict(content, "spec")

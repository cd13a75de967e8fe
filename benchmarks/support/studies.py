"""The made-up studies of the benchmarks: what they search, and what runs trials that cost nothing. No torch."""

from collections.abc import Mapping
from typing import Any

from tuner.spec import StudySpec

SEARCH: Mapping[str, Mapping[str, Any]] = {
    "learning_rate": {"low": 1e-5, "high": 1e-3, "scale": "log"},
    "kl_coef": {"low": 0.01, "high": 0.3, "scale": "log"},
    "lam": {"low": 0.8, "high": 1.0},
    "cliprange": {"low": 0.1, "high": 0.3},
    "vf_coef": {"low": 0.05, "high": 1.0},
    "num_ppo_epochs": {"low": 1, "high": 8},
}
"""Six hyperparameters, β among them."""
NULL_TRAINER: Mapping[str, Any] = {
    "task": "support.null_trainer:TASK",
    "trainer": "support.null_trainer:factory",
    "threads": 1,
}
"""The keys of a study whose trials do nothing."""


def make_spec(name: str, trials: int, **more: Any) -> StudySpec:
    """Return a study over `SEARCH`; `more` are further keys of a study file."""
    table = {"name": name, "trials": trials, "strategy": "full", "seed": 1, "search": SEARCH}
    return StudySpec.from_dict(table | more, "benchmark")

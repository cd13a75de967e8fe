"""The study behind the chart of KL by β: a high β holds KL down, in a shorter run of its two trials with a fixed β."""

import statistics
from pathlib import Path

import pytest
import torch

from ppo_core.data.task import TaskAssets
from ppo_core.trainer import ppo_trainer
from tuner.study.spec import StudySpec

pytestmark = pytest.mark.slow

STUDY = Path(__file__).parents[1] / "studies" / "kl_by_beta.toml"
SHORTER = {"total_episodes": 1536, "response_length": 16}
"""24 rollout batches, over which KL grows to twelve times as much under the low β."""


def test_a_low_beta_lets_kl_grow_and_a_high_one_restricts_it(assets: TaskAssets) -> None:
    torch.set_num_threads(1)
    content = StudySpec.load(STUDY).to_dict()
    study = StudySpec.from_dict(content | {"fixed": content["fixed"] | SHORTER}, "short")
    low, high = study.listed[:2]
    assert low.params["kl_coef"] < high.params["kl_coef"]
    settled = []
    for trial in (low, high):
        reports = ppo_trainer(study.config(trial.params), "reviews", device="cpu")
        kls = [report.metrics["objective/kl_exact"] for report in reports if report.step]
        settled.append(statistics.fmean(kls[-8:]))
    assert settled[0] > 3 * settled[1]

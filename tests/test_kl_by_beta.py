"""The study behind the chart of KL by β does what the chart says, in a shorter run of the same three trials."""

import pytest
import torch

from docs import kl_by_beta
from docs.kl_by_beta import BETA, KL, Curve
from ppo_core.task import TaskAssets
from ppo_core.trainer import ppo_trainer
from tuner.spec import StudySpec

pytestmark = pytest.mark.slow

SHORTER = {"total_episodes": 1536, "response_length": 16}
"""24 rollout batches: long enough for β to turn and for KL to come back to its target."""


def short_study() -> StudySpec:
    """The committed study, shorter: the adaptive β begins nearer to where it ends and moves by up to 10% a batch."""
    content = StudySpec.load(kl_by_beta.STUDY).to_dict()
    low, high, adaptive = content["trial"]
    adaptive = adaptive | {"kl_coef": 0.3, "kl_target": 3.0, "kl_horizon": 128}
    return StudySpec.from_dict(content | {"fixed": content["fixed"] | SHORTER, "trial": [low, high, adaptive]}, "short")


@pytest.fixture(scope="module")
def curves(assets: TaskAssets) -> list[Curve]:
    torch.set_num_threads(1)
    study = short_study()
    found = []
    for trial in study.listed:
        config = study.config(trial.params)
        steps = [
            (r.episode, r.metrics[KL], r.metrics[BETA]) for r in ppo_trainer(config, "reviews", device="cpu") if r.step
        ]
        found.append(Curve.of(trial.label, config, steps))
    return found


def test_a_low_beta_lets_kl_grow_a_high_one_restricts_it_and_an_adaptive_one_keeps_a_target(
    curves: list[Curve],
) -> None:
    low, high, adaptive = curves
    assert max(low.kls) == pytest.approx(low.kls[-1], rel=0.4), "it is still high at the end"
    assert low.settled > 12 and low.settled > 3 * adaptive.settled
    assert high.settled < 2 and high.settled < 0.7 * adaptive.settled
    assert adaptive.target is not None and 0.7 < adaptive.settled / adaptive.target < 1.4
    assert len(set(low.betas)) == len(set(high.betas)) == 1
    assert min(adaptive.betas) < 0.7 * adaptive.betas[0], "β fell while KL was under the target"
    assert adaptive.betas[-1] > 1.1 * min(adaptive.betas), "and rose when it was over"


def test_the_chart_shows_every_trial_and_the_target(curves: list[Curve]) -> None:
    chart = kl_by_beta.figure(curves)
    assert [line.name.split(":")[0] for line in chart.data] == ["β low, fixed", "β high, fixed", "β adaptive"]
    assert all(list(line.y) == list(curve.kls) for line, curve in zip(chart.data, curves, strict=True))
    (target,) = chart.layout.shapes
    assert target.y0 == target.y1 == 3.0
    assert chart.layout.yaxis.title.text == "KL (nats per response)"


def test_the_committed_study_is_as_the_chart_says() -> None:
    low, high, adaptive = (trial.params for trial in StudySpec.load(kl_by_beta.STUDY).listed)
    assert low["kl_coef"] < adaptive["kl_coef"] < high["kl_coef"]
    assert "kl_target" not in low and "kl_target" not in high and adaptive["kl_target"] == 6.0
    assert kl_by_beta.PICTURE.is_file()

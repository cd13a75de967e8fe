"""How often the claims of a confirmation hold, counted over drawn studies: on made-up runs whose truth is known."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tuner.trial_rows import trial_row
from tuner.status import Origin

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # as for the scripts there

import confirm  # noqa: E402

ROWS = {number: trial_row(number, value=1.0, value_step=3) for number in range(5)}
ROWS[0] = replace(ROWS[0], origin=Origin.REFERENCE)


def made(*means: float, noise: float = 0.1) -> dict[int, dict[int, tuple[float, float]]]:
    """Configurations with these true means, each on 16 seeds, read on eval and on test prompts."""
    random = np.random.default_rng(1)
    return {
        number: {seed: (mean + noise * random.normal(), mean + noise * random.normal()) for seed in range(16)}
        for number, mean in enumerate(means)
    }


def test_a_clear_winner_is_claimed_and_holds() -> None:
    found = confirm.judge(made(0.0, 2.0, 1.0, 0.9, 0.8), ROWS, 100)
    assert (found["over_reference"].claimed, found["over_reference"].held) == (1.0, 1.0)
    assert found["best_of_all"].held == 1.0 and found["best_of_all"].claimed > 0.9
    assert list(found["which"]) == [1]


def test_equals_are_seldom_told_apart() -> None:
    found = confirm.judge(made(1.0, 1.0, 1.0, 1.0, 1.0), ROWS, 300)
    assert found["of_equals"] < 0.1
    assert found["over_reference"].claimed < 0.15 and found["best_of_all"].claimed < 0.1


def test_the_study_lists_the_reference_and_configurations_around_it() -> None:
    spec = confirm.study(640)
    assert len(spec.listed) == confirm.CONFIGURATIONS
    assert dict(spec.listed[0].params)["learning_rate"] == spec.config({}).learning_rate
    assert len({str(sorted(one.params.items())) for one in spec.listed}) == confirm.CONFIGURATIONS

"""The trainer learns three made-up tasks whose answers are known (`tests.ppo_core.probes`)."""

import math

import pytest
import torch

from ppo_core.algorithm import experience
from tests.ppo_core import probes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("task", probes.TASKS)
def test_a_sound_trainer_learns_a_task_with_a_known_answer(task: str) -> None:
    found = probes.self_check(probes.TASKS[task])
    assert found.is_sound, found.text


def test_a_trainer_that_lowers_the_reward_or_learns_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = next(iter(probes.TASKS.values()))
    with monkeypatch.context() as patched:
        honest = probes.Scored
        patched.setattr(probes, "Scored", lambda totals, parts: honest([-one for one in totals], parts))
        assert not probes.self_check(right).is_sound
    monkeypatch.setattr(experience, "masked_whiten", lambda advantages, *_, **__: torch.zeros_like(advantages))
    assert not probes.self_check(right).is_sound, "without advantages nothing moves"


def test_the_most_that_a_policy_can_score_at_its_kl_is_as_by_hand() -> None:
    """With a KL of 4 log 12 nats every token of 12 may be certain; at 0 it is as likely as any."""
    assert probes.most_at(0.0) == pytest.approx(1 / 12, abs=1e-6)
    assert probes.most_at(4 * math.log(12)) == pytest.approx(1.0, abs=1e-6)
    half = 4 * (0.5 * math.log(6) + 0.5 * math.log(6 / 11))
    assert probes.most_at(half) == pytest.approx(0.5, abs=1e-6)

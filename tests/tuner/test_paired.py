"""Differences of rewards on the same eval prompts: paired where the store has each prompt's, told as unpaired elsewhere."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.tuner.trial_rows import trial_row
from tuner.judge.paired import Difference, improvement, reward_difference
from tuner.store import Store, TrialRow


class Readings:
    """Stands for a store: rewards of each eval prompt, by trial id and step."""

    def __init__(
        self, rewards: Mapping[int, Mapping[int, Sequence[float | None]]], without: Sequence[int] = ()
    ) -> None:
        self.rewards, self.without = rewards, without

    def readings(self, trial_ids: Sequence[int]) -> list[dict[str, Any]]:
        (trial,) = trial_ids
        own = {} if trial in self.without else self.rewards[trial]
        return [{"trial_id": trial, "step": step, "rewards": list(rewards)} for step, rewards in own.items()]

    def steps(self, trial_ids: Sequence[int], names: Sequence[str], *, evaluations_only: bool) -> list[dict[str, Any]]:
        (trial,) = trial_ids
        return [
            {"step": step, "eval/reward": statistics.fmean(known), "eval/reward_se": 0.3}
            for step, rewards in self.rewards[trial].items()
            if (known := [reward for reward in rewards if reward is not None])
        ]


FIRST, BETTER, LATER = [0.0, 1.0, 5.0], [1.0, 1.5, 6.0], [2.0, 2.0, 8.0]
STORE = Readings({100: {0: FIRST, 3: BETTER, 6: LATER}, 101: {0: FIRST, 3: LATER}, 102: {0: FIRST}})


def row(number: int, value: float | None, step: int | None) -> TrialRow:
    return trial_row(number, value=value, value_step=step, value_se=0.4)


def store(made: Readings = STORE) -> Store:
    return cast(Store, made)


def test_an_improvement_is_paired_prompt_by_prompt() -> None:
    """The gaps are 1, 0.5, 1: what makes the third prompt easy for both is in none of them."""
    found = improvement(store(), row(0, 8.5 / 3, 3))
    assert found == Difference(pytest.approx(2.5 / 3), pytest.approx(statistics.stdev([1, 0.5, 1]) / math.sqrt(3)), 3)
    assert found.verdict == "more than the noise of the prompts"
    assert found.evidence == "5.0 standard errors, paired on 3 eval prompts; one seed each"


def test_one_trial_over_another_is_paired_at_the_steps_of_their_values() -> None:
    found = reward_difference(store(), row(0, 2.0, 3), row(1, 4.0, 3))
    assert found is not None and (found.mean, found.prompts) == (pytest.approx(3.5 / 3), 3)
    back = reward_difference(store(), row(1, 4.0, 3), row(0, 2.0, 3))
    assert back is not None and back.mean == pytest.approx(-3.5 / 3)
    assert reward_difference(store(), row(0, None, None), row(1, 4.0, 3)) is None
    assert reward_difference(store(), row(1, 4.0, 3), row(0, 2.0, 0)) is None, "a value of step 0 is the SFT policy's"


def test_a_prompt_without_a_finite_reward_is_left_out() -> None:
    made = Readings({100: {0: [0.0, 1.0, 5.0], 3: [1.0, None, 8.0]}})
    found = improvement(store(made), row(0, 4.5, 3))
    assert found is not None and (found.mean, found.prompts) == (2.0, 2)


def test_without_each_prompts_rewards_the_errors_are_added() -> None:
    """As of a trainer of one's own that reports none."""
    made = Readings(STORE.rewards, without=[100])
    found = improvement(store(made), row(0, 3.0, 3))
    assert found == Difference(1.0, pytest.approx(0.5), 0)
    assert "not paired, so rather too large" in found.evidence
    assert Difference(1.1, 0.5, 0).verdict == "more than the noise of the prompts"
    assert Difference(-0.9, 0.5, 4).verdict == "within the noise of the prompts"
    assert Difference(-0.9, 0.5, 4).evidence == "1.8 standard errors, paired on 4 eval prompts; one seed each"
    unknown = reward_difference(store(made), trial_row(0, value=1.0, value_se=None), row(1, 2.0, 3))
    assert unknown is not None and unknown.verdict == "its noise is not known"
    nothing = improvement(store(Readings({100: {3: BETTER}})), row(0, 3.0, 3))
    assert nothing is None, "without the baseline there is no improvement"


def test_a_trial_read_twice_is_compared_by_the_mean_of_both_readings() -> None:
    again = {"reread_step": 3, "reread_reward": 2.0, "reread_kl": 4.0, "reread_kl_se": 0.1}
    first, twice = row(0, 3.0, 3), replace(row(0, 3.0, 3), **again)
    once, gain = improvement(store(), first), improvement(store(), twice)
    assert once is not None and gain is not None
    assert (gain.mean, gain.se) == (pytest.approx(once.mean - 0.5), once.se)
    lead, behind = (
        reward_difference(store(), row(0, 2.0, 3), row(1, 4.0, 3)),
        reward_difference(store(), row(0, 2.0, 3), replace(row(1, 4.0, 3), **again)),
    )
    assert lead is not None and behind is not None and behind.mean == pytest.approx(lead.mean - 1.0)

"""What mattered: what decides the reward stands out, what does not is told as chance, and too few trials are refused."""

import math

import numpy as np
import pytest

from tests.dashboard.fake_store import SPEC
from tests.tuner.trial_rows import trial_row
from tuner.search import importance
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Role, Status


def row(number: int, value: float | None = 1.0, kl: float | None = 5.0, **changes: object) -> TrialRow:
    return trial_row(number, value=value, end_kl=kl, **changes)


def studied(count: int, seed: int = 0) -> list[TrialRow]:
    """Trials whose reward hangs on the learning rate alone, and whose KL on nothing."""
    random, trials = np.random.default_rng(seed), []
    for number in range(count):
        rate = float(10 ** random.uniform(-5, -2.6))
        params = {"learning_rate": rate, "cliprange": float(random.uniform(0.1, 0.3)),
                  "num_ppo_epochs": int(random.integers(2, 9))}  # fmt: skip
        value = -((math.log10(rate) + 3.8) ** 2) + 0.05 * random.normal()
        trials.append(row(number, value, float(random.uniform(4, 6)), params=params))
    return trials


SEARCH = StudySpec.from_dict(
    {**SPEC.to_dict(), "search": {name: SPEC.to_dict()["search"][name]
                                  for name in ("learning_rate", "cliprange", "num_ppo_epochs")}},
    "a test",
)  # fmt: skip


def test_what_decides_the_reward_stands_out_from_chance() -> None:
    trials = studied(40)
    found = importance.importances(trials, SEARCH)["reward"]
    assert found[0].name == "learning_rate"
    assert found[0].share > 0.6 and found[0].is_sure
    assert sum(item.share for item in found) == pytest.approx(1)
    assert all(item.low <= item.share <= item.high for item in found)
    assert importance.certainty(found, 40).startswith(
        "With 40 trials and 3 searched hyperparameters, learning_rate stands out from chance; the rest may be noise. "
    )
    assert importance.certainty(found, 40).endswith("in 1 of 40 such studies.")
    assert "LEARNING_RATE stands out from chance" in importance.certainty(found, 40, str.upper)


def test_of_many_trials_an_even_part_is_read_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = studied(25)
    monkeypatch.setattr(importance, "MOST", 13)
    found = importance.importances(trials, SEARCH, resamples=3)
    assert found == importance.importances(trials[::2], SEARCH, resamples=3)
    said = importance.certainty(found["reward"], 25)
    assert said.startswith("With 13 of 25 trials, spread evenly over the study, and 3 searched hyperparameters,")


def test_the_same_trials_give_the_same_importance_and_kl_has_its_own() -> None:
    trials = studied(12)
    first, again = (importance.importances(trials, SEARCH, resamples=5)["KL"] for _ in range(2))
    assert first == again
    assert not any(item.is_sure for item in importance.importances(trials, SEARCH, resamples=30)["KL"])
    assert "do not rely on this order" in importance.certainty(first, 12)


def test_too_few_trials_are_refused_with_what_is_missing() -> None:
    assert importance.refusal(studied(10), SEARCH) == ""
    assert importance.refusal(studied(7), SEARCH).startswith("7 trials ran to the end or were stopped with a value")
    assert "3 more are needed" in importance.refusal(studied(7), SEARCH)


def test_only_trials_that_can_tell_count() -> None:
    params = studied(1)[0].params
    trials = [
        row(0, params=params),
        row(1, params=params, status=Status.STOPPED),
        row(3, params=params, status=Status.PRUNED),
        row(4, params=params, origin=Origin.FORKED, role=Role.FORK),
        row(5, None, params=params),
        row(6, params={}),
    ]
    assert [trial.number for trial in importance.usable(trials, SEARCH)] == [0, 1]

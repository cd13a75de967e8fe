"""Optuna's pruners decide over stored evaluations as they do where a study runs in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.pruners import BasePruner, ThresholdPruner
from optuna.trial import TrialState

from ppo_core.errors import ConfigError
from tests.tuner.quick_study import outcomes, quick_spec, rows, run
from tests.tuner.trial_rows import make_spec, trial_row
from tuner.search.prune import Replay, require_usable, why_pruned
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Status
from tuner.study.study_file import PRUNERS


def spec_with(pruner: str) -> StudySpec:
    return make_spec(pruner=pruner, trials=20)


def evaluation(number: int, step: int, reward: float, at: float, kl: float = 1.0) -> dict[str, Any]:
    reading = {"eval/reward": reward, "eval/reward_se": 0.1, "eval/kl": kl, "eval/kl_se": 0.1}
    return {"trial_id": 100 + number, "step": step, "episode": 192 * step, "at": at, **reading}


def rising(number: int, best: float, steps: int, begin: float) -> list[dict[str, Any]]:
    """Return evaluations of a trial from the SFT policy's 0 to `best` after ten of them."""
    return [evaluation(number, step, best * step / 10, begin + step) for step in range(steps + 1)]


def a_study(*bests: float, last: int) -> tuple[list[TrialRow], list[dict[str, Any]]]:
    """Return trials one after the other that came to their ends, the last one after so many evaluations."""
    ended = [trial_row(n, value=best, ended_at=100.0 * n + 50) for n, best in enumerate(bests[:-1])]
    found = [one for n, best in enumerate(bests[:-1]) for one in rising(n, best, 10, 100.0 * n)]
    number = len(ended)
    running = trial_row(number, status=Status.RUNNING, value=None, ended_at=None)
    return [*ended, running], found + rising(number, bests[-1], last, 100.0 * number)


def test_the_median_prunes_below_it_and_nothing_before_there_is_one() -> None:
    spec = spec_with("median")
    rows, evaluations = a_study(1.0, 1.1, 1.2, 1.3, 1.4, 0.5, last=3)
    reason = why_pruned(spec, rows, evaluations, 5)
    assert reason is not None and (reason.rule, reason.metric) == ("pruner", "eval/reward")
    assert reason.value == pytest.approx(0.15)
    better, evaluations = a_study(1.0, 1.1, 1.2, 1.3, 1.4, 1.25, last=3)
    assert why_pruned(spec, better, evaluations, 5) is None
    few, evaluations = a_study(1.0, 1.1, 0.5, last=3)
    assert why_pruned(spec, few, evaluations, 2) is None, "five trials must have come to their ends"


def test_what_is_reported_is_the_best_within_the_kl_budget_so_far() -> None:
    """A reward that rose over the budget of 10 nats counts for nothing; one that fell again counts."""
    rows, evaluations = a_study(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, last=0)
    hacked = [evaluation(5, step, 5.0 * step, 500.0 + step, kl=20.0 * step) for step in range(1, 4)]
    assert why_pruned(spec_with("median"), rows, [*evaluations, *hacked], 5) is not None
    fell = [evaluation(5, 1, 2.0, 501.0), evaluation(5, 2, 0.0, 502.0)]
    assert why_pruned(spec_with("median"), rows, [*evaluations, *fell], 5) is None


def test_a_clock_that_went_back_changes_no_decision() -> None:
    """At the second evaluation of the last trial, and at the end of an earlier one."""
    rows, evaluations = a_study(1.0, 1.1, 1.2, 1.3, 1.4, 0.5, last=3)
    expected = why_pruned(spec_with("median"), rows, evaluations, 5)
    rows[4] = replace(rows[4], ended_at=401.0)
    evaluations = [
        {**each, "at": 5.0} if (each["trial_id"], each["step"]) == (105, 2) else each for each in evaluations
    ]
    evaluations[-1] = {**evaluations[-1], "at": 6.0}
    assert expected is not None and why_pruned(spec_with("median"), rows, evaluations, 5) == expected


def test_what_a_person_asked_for_and_the_reference_run_to_their_ends() -> None:
    rows, evaluations = a_study(1.0, 1.1, 1.2, 1.3, 1.4, 0.5, last=3)
    for origin in (Origin.REFERENCE, Origin.ENQUEUED):
        rows[5] = replace(rows[5], origin=origin)
        assert why_pruned(spec_with("median"), rows, evaluations, 5) is None


def test_evaluations_are_told_once_and_all_anew_where_one_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    report = optuna.trial.Trial.report
    monkeypatch.setattr(
        optuna.trial.Trial, "report", lambda self, value, step: told.append(self.number) or report(self, value, step)
    )
    rows, evaluations = a_study(1.0, 1.1, 1.2, 1.3, 1.4, 0.5, last=3)
    spec, replay = spec_with("median"), Replay()
    assert why_pruned(spec, rows, evaluations[:-1], 5, replay) and len(told) == 52
    assert why_pruned(spec, rows, evaluations, 5, replay) and told[52:] == [5]
    resumed = [*evaluations[:-2], evaluation(5, 2, 5.0, 502.5)]  # from step 1, and better than before
    assert why_pruned(spec, rows, resumed, 5, replay) is None and len(told) == 53 + 52
    assert why_pruned(replace(spec, kl_budget=0.5), rows, resumed, 5, replay) is None


@pytest.mark.parametrize(("pruner", "prunes"), [("median", False), ("percentile", False), ("successive_halving", True)])
def test_of_trials_that_run_side_by_side_only_halving_prunes_some(pruner: str, prunes: bool) -> None:
    """As Optuna has it: the others compare with those that have come to their ends."""
    rows = [trial_row(n, status=Status.RUNNING, value=None, ended_at=None) for n in range(8)]
    evaluations = [evaluation(n, step, 1.0 - n / 10, 10.0 * step + n) for step in (1, 2, 3, 4) for n in range(8)]
    assert any(why_pruned(spec_with(pruner), rows, evaluations, n) for n in range(8)) == prunes


@pytest.mark.parametrize("pruner", PRUNERS)
def test_a_replay_decides_as_one_study_that_runs(pruner: str) -> None:
    """Two trials at a time, their evaluations in turns; the state that halving keeps in its study is made again."""
    spec, clock = spec_with(pruner), 0.0
    config = spec.config({})
    made: dict[str, BasePruner] = {
        "median": optuna.pruners.MedianPruner(),
        "percentile": optuna.pruners.PercentilePruner(25.0),
        "hyperband": optuna.pruners.HyperbandPruner(config.eval_interval, config.total_episodes),
        "successive_halving": optuna.pruners.SuccessiveHalvingPruner(config.eval_interval),
    }
    study = optuna.create_study(study_name=spec.name, direction="maximize", pruner=made[pruner])
    rows: list[TrialRow] = []
    evaluations: list[dict[str, Any]] = []
    pruned, replay = 0, Replay()
    for pair in range(10):
        numbers = [2 * pair, 2 * pair + 1]
        live = {n: (study.ask(), 0.3 + 0.7 * (n * 7919 % 20) / 20) for n in numbers}
        rows += [trial_row(n, status=Status.RUNNING, value=None, ended_at=None) for n in numbers]
        for step in range(1, 11):
            for n in list(live):
                clock += 1.0
                trial, best = live[n]
                evaluations.append(evaluation(n, step, best * step / 10, clock))
                trial.report(best * step / 10, 192 * step)
                prunes = trial.should_prune()
                assert (why_pruned(spec, rows, evaluations, n, replay) is not None) == prunes, (n, step)
                if step in (1, 7):  # as in a controller that has just begun
                    assert (why_pruned(spec, rows, evaluations, n) is not None) == prunes, (n, step)
                if prunes or step == 10:
                    pruned += prunes
                    del live[n]
                    clock += 1.0
                    status = Status.PRUNED if prunes else Status.COMPLETED
                    rows[n] = replace(rows[n], status=status, value=best * step / 10, ended_at=clock)
                    study.tell(trial, *((None, TrialState.FAIL) if prunes else (best,)))
    assert pruned > 3


def mine() -> BasePruner:
    """A pruner of one's own: whatever has not come to 1 after 576 episodes ends."""
    return ThresholdPruner(lower=1.0, n_warmup_steps=576)


class Broken(BasePruner):
    """Raises when it is asked."""

    def prune(self, study: object, trial: object) -> bool:
        raise RuntimeError("no idea")


def test_a_pruner_of_ones_own_is_used_and_what_it_raises_is_one_line() -> None:
    rows, evaluations = a_study(2.0, 1.2, last=3)
    assert why_pruned(spec_with("tests.tuner.test_prune:mine"), rows, evaluations, 1) is not None
    with pytest.raises(ConfigError, match=r"test_prune:Broken\" raised RuntimeError: no idea"):
        why_pruned(spec_with("tests.tuner.test_prune:Broken"), rows, evaluations, 1)
    with pytest.raises(ConfigError, match='has no callable "mien"'):
        require_usable(spec_with("tests.tuner.test_prune:mien"))
    with pytest.raises(ConfigError, match="which is not an optuna BasePruner"):
        require_usable(spec_with("tests.tuner.test_prune:trial_row"))


def test_a_study_with_a_pruner_ends_the_same_poor_trials_early_again(tmp_path: Path) -> None:
    spec = quick_spec(trials=12, pruner="successive_halving", kl={"budget": 10.0, "limit": 1000.0})
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, spec, workers=1)[0]
    found = rows(tmp_path / "one")
    pruned = [row for row in found if row.status is Status.PRUNED]
    assert len(pruned) >= 2 and all(row.reason is not None and row.reason.rule == "pruner" for row in pruned)
    assert all(row.episodes < 160 and row.value is not None for row in pruned)
    assert found[0].status is Status.COMPLETED
    best = max(found, key=lambda row: row.value or 0.0)
    assert best.status is Status.COMPLETED
    assert outcomes(tmp_path / "other") == outcomes(tmp_path / "one")

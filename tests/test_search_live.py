"""The live comparison of searches: what is read of a study and when, what is run again, and what an interval says."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tuner.spec import StudySpec

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as for the scripts there

from support import live  # noqa: E402
from support.comparing import RandomSearch, Targets  # noqa: E402
from support.live import Arm, Interval, Ratios, Result, Seen, arms, ratio_lines, run_all, summarise, table  # noqa: E402

STUDY = BENCHMARKS.parent / "studies" / "reviews.toml"
SPEC = StudySpec.load(STUDY).with_budget(3, "test")


def _result(arm: str, seed: int, seen: Sequence[tuple[float, int, float, float]], cpu_seconds: float = 100.0) -> Result:
    """Return a study with evaluations given as CPU-seconds, step, reward and KL."""
    evaluations = tuple(Seen(seconds, 0, step, reward, kl, 0.5) for seconds, step, reward, kl in seen)
    return Result(arm, seed, cpu_seconds, 2 * cpu_seconds, 1920, 3, evaluations)


def test_a_study_is_read_at_its_best_trained_checkpoint_within_the_budget_by_then() -> None:
    seen = [(1.0, 0, 9.0, 0.0), (10.0, 3, 1.0, 5.5), (20.0, 6, 2.0, 5.6), (30.0, 9, 1.5, 4.0)]
    result = _result("a", 0, seen)
    assert math.isnan(result.best(6.0, 9.0))
    assert (result.best(6.0, 29.0), result.best(6.0), result.best(7.0)) == (1.0, 1.5, 2.0)


def test_arms_are_read_after_the_cpu_seconds_of_the_random_search() -> None:
    random = [_result(live.RANDOM, seed, [(50.0, 3, 1.0 + seed, 1.0)], 60.0) for seed in (0, 1)]
    ours = [_result("ours, tpe", seed, [(40.0, 3, 2.0, 1.0), (70.0, 6, 5.0, 1.0)], 80.0) for seed in (0, 1)]
    moment, (first, second) = summarise({live.RANDOM: random, "ours, tpe": ours}, 6.0)
    assert moment == 60.0
    assert (first.value.mean, first.gain.mean) == (1.5, 0.0)
    assert (second.value.mean, second.gain.mean, second.at_end.mean) == (2.0, 0.5, 5.0)
    assert (second.cpu_seconds, second.wall_seconds, second.trials) == (80.0, 160.0, 3)
    # Random search comes to 1.5 in the mean; one of its two studies never does.
    assert (second.speed, first.speed) == (40.0 / 60.0, math.inf)
    assert "after 60 CPU-seconds" in table(moment, [first, second])


def test_ratios_are_of_the_median_study_over_the_recorded_random_search() -> None:
    random = RandomSearch(Targets(ends=1.9, best=2.0, cost=1000.0), to_best=900.0, episode=100.0 / 1920 / 2)
    pace = live.pace([_result(live.RANDOM, 0, []), _result(live.RANDOM, 1, [])], random)
    assert pace == pytest.approx(2.0), "the live machine is half as fast"
    studies = [
        _result("ours", seed, [(2 * cost, 3, 1.9, 1.0), (6 * cost, 6, best, 1.0)])
        for seed, (cost, best) in enumerate([(100.0, 2.0), (200.0, 1.95), (150.0, 2.1)])
    ]
    found = Ratios.of("ours", studies, 6.0, random, 2.0)
    assert (found.total, found.strategy, found.never) == (0.15, 0.5, (0, 1))
    worse = Ratios.of("theirs", [_result("theirs", 0, [(10.0, 3, 1.0, 1.0)])], 6.0, random, 2.0)
    assert (worse.total, worse.strategy, worse.never) == (math.inf, math.inf, (1, 1))
    lines = ratio_lines([found, worse], random, 2.0).splitlines()
    assert lines[2].split() == ["ours", "0.15", "0", "0.50", "1"] and lines[3].split() == [
        "theirs",
        "inf",
        "1",
        "inf",
        "1",
    ]


def test_an_interval_holds_the_means_of_resampled_studies() -> None:
    assert Interval.of([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0)
    found = Interval.of([0.0, 1.0, 2.0, 3.0, 4.0])
    # The standard deviation of such a mean is sqrt(2 / 5) = 0.63.
    assert found.mean == 2.0 and (found.low, found.high) == pytest.approx((2 - 1.96 * 0.63, 2 + 1.96 * 0.63), abs=0.11)


def test_a_finished_study_is_not_run_again(tmp_path: Path) -> None:
    ran: list[int] = []

    def run(spec: StudySpec, study: Path, seed: int, folder: Path) -> Result:
        assert spec.budget == 3 and list(folder.iterdir()) == []
        (folder / "half").write_text("")
        ran.append(seed)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return _result("random search", seed, [(1.0, 3, 1.0, 1.0)])

    side = Arm("random search", run)
    with pytest.raises(KeyboardInterrupt):
        run_all([side], SPEC, STUDY, 2, tmp_path, lambda _: None)
    found = run_all([side], SPEC, STUDY, 2, tmp_path, lambda _: None)
    assert ran == [0, 1, 1]
    assert found["random search"] == [_result("random search", seed, [(1.0, 3, 1.0, 1.0)]) for seed in (0, 1)]


def test_studies_of_ours_differ_in_strategy_and_sampler_alone() -> None:
    random, ours, peer = arms(["tpe"], peer=True)
    assert (random.name, ours.name, peer.name) == ("random search", "ours, tpe", "Optuna alone")
    tables = [side.run.table(SPEC, 7) for side in (random, ours)]  # type: ignore[attr-defined]
    made = [StudySpec.from_dict(content, "test") for content in tables]
    assert [(one.strategy, one.sampler.name) for one in made] == [("full", "random"), ("early_cut", "tpe")]
    assert all((one.budget, one.trials, one.seed, one.threads) == (3, None, 7, 1) for one in made)
    assert made[0].search == made[1].search == SPEC.search

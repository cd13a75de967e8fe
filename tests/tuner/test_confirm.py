"""Confirming: which configurations run again, what their intervals say, and that a kill loses nothing of it."""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from ppo_core.errors import ConfigError, StudyError
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, controller, curves, opened, placed, quick_spec, rows, run, storage
from tests.tuner.trial_rows import make_spec, pruned, trial_row
from tuner.confirm import result as confirmed
from tuner.confirm.intervals import Readings, error_of_look, pooled, share_at_most
from tuner.confirm.plan import Plan, candidates, cost_line, due_step, missing
from tuner.confirm.result import Confirmation, Confirmed, confirmations
from tuner.judge.results import read_study
from tuner.search.optuna_trials import to_optuna
from tuner.store import OnTest, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Role, Status

SPEC = make_spec(seed=7)


def searched(number: int, value: float, **changes: Any) -> TrialRow:
    config = SPEC.config({"learning_rate": 1e-5 * (number + 1)}).to_dict()
    return trial_row(number, **({"value": value, "value_step": 3, "config": config, "seed": 7} | changes))


ROWS = [
    searched(0, 1.0, origin=Origin.REFERENCE),
    searched(1, 1.5),
    searched(2, 1.9),
    searched(3, 1.7),
    searched(4, 1.6, status=Status.STOPPED),
    searched(5, 2.6, role=Role.FORK, parent=1, fork_step=3),
    searched(6, 2.7, value_step=0),
    searched(7, 2.8, status=Status.FAILED),
    searched(8, 1.9, config=searched(2, 1.9).config),
]


# Which configurations


def test_candidates_are_different_configurations_the_best_first() -> None:
    assert [row.number for row in candidates(ROWS, SPEC)] == [2, 3, 4, 1]
    blown = replace(pruned(9, value=1.8, value_step=2), config=searched(9, 0).config)
    broken = replace(pruned(10, rule="nonfinite", value=1.8, value_step=2), config=searched(10, 0).config)
    assert [row.number for row in candidates([*ROWS, blown, broken], SPEC)] == [2, 9, 3, 4, 1]


def test_configurations_and_reference_run_on_seeds_of_their_own() -> None:
    wanted = missing(ROWS, SPEC, Plan(top=2, seeds=2))
    assert [(new.number, new.parent, new.seed) for new in wanted] == [
        (9, 2, 8), (10, 3, 8), (11, 0, 8), (12, 2, 9), (13, 3, 9), (14, 0, 9)
    ]  # fmt: skip
    assert {new.role for new in wanted} == {Role.CONFIRM} and {new.status for new in wanted} == {Status.WAITING}
    assert wanted[0].config == {**ROWS[2].config, "seed": 8}
    assert wanted[2].origin is Origin.REFERENCE


def test_what_ran_already_does_not_run_again_but_at_another_length() -> None:
    first = missing(ROWS, SPEC, Plan(top=1, seeds=1))
    there = [*ROWS, *(trial_row(n.number, config=n.config, role=Role.CONFIRM, parent=n.parent) for n in first)]
    assert missing(there, SPEC, Plan(top=1, seeds=1)) == []
    assert [(n.number, n.parent, n.seed) for n in missing(there, SPEC, Plan(top=1, seeds=2))] == [
        (11, 2, 9),
        (12, 0, 9),
    ]
    longer = missing(there, SPEC, Plan(top=1, seeds=1, total_episodes=9_600))
    assert [(n.parent, n.config["total_episodes"]) for n in longer] == [(2, 9_600), (0, 9_600)]


def test_the_time_is_estimated_without_forks() -> None:
    whole = searched(0, 1.0, origin=Origin.REFERENCE, episodes=1920, seconds=600.0)
    fork = searched(2, 0.5, role=Role.FORK, parent=0, fork_step=3, episodes=1920, seconds=6.0)
    rows = [
        whole,
        searched(1, 1.5, episodes=1920, seconds=600.0),
        fork,
        replace(fork, number=3),
        replace(fork, number=4),
    ]
    wanted = missing(rows, SPEC, Plan(top=1, seeds=3))
    assert f"; about {len(wanted) * 10} min on 1 worker" in cost_line(wanted, rows, 1)


def test_where_there_are_not_so_many_that_is_one_line() -> None:
    assert len(missing(ROWS, SPEC, Plan(seeds=1))) == 4, "up to three where it is not said how many"
    with pytest.raises(
        ConfigError, match=r"^top = 5 is not allowed: the study has 4 trials with a checkpoint within the KL budget"
    ):
        missing(ROWS, SPEC, Plan(top=5))
    with pytest.raises(ConfigError, match="nothing to confirm: no trial has a checkpoint within the KL budget"):
        missing([replace(ROWS[0], value_step=0)], SPEC, Plan())
    assert [new.parent for new in missing(ROWS[:1], SPEC, Plan(seeds=2))] == [0, 0], "the reference is the answer"


def test_a_run_that_broke_or_left_the_budget_leaves_the_untrained_policy() -> None:
    run = searched(9, 1.8, role=Role.CONFIRM, parent=1)
    assert due_step(run, SPEC) == 3
    assert due_step(replace(run, status=Status.PRUNED), SPEC) == 3
    assert due_step(replace(pruned(9, rule="nonfinite", value=1.8, value_step=2), role=Role.CONFIRM), SPEC) == 0
    assert due_step(replace(run, value_step=0), SPEC) == 0
    assert due_step(replace(run, status=Status.FAILED), SPEC) is None
    assert due_step(replace(run, status=Status.RUNNING), SPEC) is None


def test_only_runs_that_were_read_count_as_ending_within_the_budget() -> None:
    ends = {8: 9.0, 9: 12.0, 10: 9.0}
    runs = [
        searched(20 + seed, 1.5, seed=seed, end_kl=kl, end_kl_se=0.1, role=Role.CONFIRM) for seed, kl in ends.items()
    ]
    tests = {(run.id, 3): OnTest(3, 64, 1.5, 0.1, 5.0, 0.1, None, 0.0) for run in runs if run.seed != 10}
    one = confirmed._confirmed(ROWS[2], 1920, runs, tests, None, SPEC)
    assert (one.open, one.ends_within, len(one.rewards)) == ((10,), 1, 2)


def test_a_run_that_failed_by_itself_counts_as_the_sft_policy() -> None:
    reasons = {
        8: Reason("error", "made up"),
        9: Reason("out_of_memory", "made up"),
        10: Reason("worker_lost", "made up"),
    }
    failed = replace(ROWS[2], status=Status.FAILED, value=None, kl=None, value_step=None, role=Role.CONFIRM)
    runs = [replace(failed, id=20 + seed, seed=seed, reason=reason) for seed, reason in reasons.items()]
    baseline = OnTest(0, 64, 0.25, 0.03, 0.0, 0.0, None, 0.0)
    one = confirmed._confirmed(ROWS[2], 1920, runs, {}, baseline, SPEC)
    assert (one.rewards, one.lost, one.failed, one.open) == ({8: 0.25, 9: 0.25}, (8, 9), (10,), ())


def test_a_fork_is_another_configuration_than_its_last_values() -> None:
    fork = searched(9, 2.6, role=Role.FORK, parent=1, fork_step=2, origin=Origin.FORKED)
    again, alone = replace(fork, number=10), replace(searched(11, 2.5), config=fork.config)
    elsewhere = replace(fork, number=12, fork_step=1)
    rows = [*ROWS, fork, again, alone, elsewhere]
    assert [row.number for row in candidates(rows, SPEC)] == [9, 12, 11, 2, 3, 4, 1], (
        "not 5, whose best is its parent's"
    )
    first = missing(rows, SPEC, Plan(top=1, seeds=1))
    assert [(new.parent, new.config["learning_rate"]) for new in first] == [(9, 1e-4), (0, 1e-5)]
    there = [*rows, *(trial_row(n.number, config=n.config, role=Role.CONFIRM, parent=n.parent) for n in first)]
    assert [new.parent for new in missing(there, SPEC, Plan(top=3, seeds=1))] == [12, 11]


def test_runs_that_would_end_before_a_fork_are_refused_in_one_line() -> None:
    parent = SPEC.config({"learning_rate": 2e-5, "batch_size": 64}).to_dict()
    fork = replace(searched(9, 2.6, role=Role.FORK, parent=1, fork_step=30), value_step=32)
    rows = [*ROWS[:1], replace(ROWS[1], config=parent), *ROWS[2:], replace(fork, config=parent | {"kl_coef": 0.1})]
    refused = r"^total_episodes = 1900 is not allowed: trial 9 is a fork at episode 1920; expected more than that$"
    with pytest.raises(ConfigError, match=refused):
        missing(rows, SPEC, Plan(top=1, seeds=1, total_episodes=1_900))
    assert missing(rows, SPEC, Plan(top=1, seeds=1, total_episodes=1_921))


# Intervals


def readings(values: Sequence[float], lost: Sequence[int] = ()) -> Readings:
    return Readings(dict(enumerate(values)), lost)


def test_t_intervals_are_those_of_the_tables() -> None:
    """t(0.975, 4) = 2.7764, t(0.975, 1) = 12.706; sd of 1..5 is sqrt(2.5)."""
    five = readings([1.0, 2.0, 3.0, 4.0, 5.0])
    found = pooled([five]).interval([five], 0.05)
    assert found.low is not None and found.high is not None and (found.mean, found.n) == (3.0, 5)
    assert found.high - found.mean == pytest.approx(2.7764 * math.sqrt(2.5 / 5), abs=1e-4)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    two = readings([0.5, 2.5])
    pair = pooled([two]).interval([two], 0.05, least=0.0)
    assert (pair.mean, pair.low) == (1.5, 0.0), "a KL is never negative"
    assert pair.high == pytest.approx(1.5 + 12.7062, abs=1e-3)
    one = readings([0.4])
    alone = pooled([one]).interval([one], 0.05)
    assert (alone.mean, alone.low, alone.high, alone.n) == (0.4, None, None, 1) and not alone.is_above_0


def test_configurations_share_their_spread() -> None:
    """Variances 1 and 4 pool to 2.5 with 4 degrees of freedom; t(0.975, 4) = 2.7764, t(1 - 0.05 / 4, 4) = 3.4954."""
    one, other = readings([1.0, 2.0, 3.0]), readings([0.0, 2.0, 4.0])
    spread = pooled([one, other, readings([7.0])])
    assert spread.sd**2 == pytest.approx(2.5) and spread.freedom == 4
    mean, lead = spread.interval([one], 0.05), spread.interval([one, other], 0.025)
    assert mean.high == pytest.approx(2.0 + 2.7764 * math.sqrt(2.5 / 3), abs=1e-4)
    assert lead.mean == 0.0 and lead.high == pytest.approx(3.4954 * math.sqrt(2.5 * 2 / 3), abs=1e-3)


@pytest.mark.parametrize(
    ("seeds", "error"), [(3, 0.025), (5, 0.025), (6, 0.0125), (10, 0.0125), (20, 0.00625), (40, 0.003125)]
)
def test_each_doubling_spends_half_of_the_error_that_is_left(seeds: int, error: float) -> None:
    assert error_of_look(seeds) == error


@pytest.mark.parametrize(
    ("count", "runs", "most"), [(0, 5, 0.4507), (1, 5, 0.6574), (0, 3, 0.6316), (1, 3, 0.8646), (3, 3, 1.0)]
)
def test_the_bound_on_a_share_is_that_of_clopper_and_pearson(count: int, runs: int, most: float) -> None:
    """Of none in n it is 1 - 0.05 ** (1 / n)."""
    assert share_at_most(count, runs) == pytest.approx(most, abs=1e-4)


def test_a_broken_run_widens_its_own_mean_and_leaves_the_spread_alone() -> None:
    """p = 1/5, d = 1.65: p (1 - p) d² = 0.4356, over 5 runs 0.08712; at worst 1.9 - 0.6574 · 1.65 = 0.8153."""
    one, other = readings([1.9, 1.92, 1.88, 1.9, 0.25], lost=[4]), readings([1.0, 1.02, 0.98])
    assert pooled([one, other]).sd == pytest.approx(math.sqrt((2 * 0.0004 * 2) / 5))
    assert one.mean == pytest.approx(1.57) and one.variance(0.0) == pytest.approx(0.08712)
    assert one.at_worst == pytest.approx(0.8153, abs=1e-4) and other.at_worst == other.mean


# What it comes to


def confirmation(rewards: Mapping[int, list[float]], lost: Mapping[int, tuple[int, ...]] | None = None) -> Confirmation:
    """Return what configurations with these rewards, by the number of their trial, come to; 0 is the reference."""
    read = [
        Confirmed(ROWS[number], 1_920, by_seed, by_seed, {}, lost=(lost or {}).get(number, ()))
        for number, values in rewards.items()
        if (by_seed := dict(enumerate(values, 8))) or True
    ]
    return confirmed.compared(1_920, read, OnTest(0, 64, 0.25, 0.03, 0.0, 0.0, None, 0.0))


NOISE = (0.0, 0.02, -0.02, 0.01, -0.01)


def around(mean: float, factor: float = 1.0) -> list[float]:
    return [mean + factor * noise for noise in NOISE]


def test_a_clear_winner_is_said_to_be_one() -> None:
    found = confirmation({2: around(1.9), 3: around(1.5, -1.0), 0: around(1.0, 2.0)})
    assert [one.trial.number for one in found.configurations] == [2, 3, 0]
    assert found.choice is found.best is not None and found.best.trial.number == 2
    assert found.not_told_apart == [] and found.is_decided
    assert found.verdict == "Launch trial 2: +0.900 [0.859, 0.941] over the reference, and better than every other."


def test_a_confirmation_under_way_decides_nothing() -> None:
    found = confirmation({2: around(1.9), 0: around(1.0)})
    first, *others = found.configurations
    under_way = replace(found, configurations=(replace(first, open=(20,)), *others))
    assert found.choice is first and under_way.choice is None and not under_way.is_decided
    assert under_way.verdict.startswith("Nothing yet: 1 confirming run ")


def test_it_is_not_better_than_one_that_was_not_read() -> None:
    found = confirmation({2: around(1.9), 3: [], 0: around(1.0)})
    assert found.is_decided and not found.is_best_of_all and found.verdict.endswith("over the reference.")


def test_a_configuration_on_few_seeds_does_not_pass_one_on_many() -> None:
    found = confirmation({2: around(1.5), 3: [2.5, 2.4], 0: around(1.0)})
    assert [one.trial.number for one in found.configurations] == [2, 0, 3]
    assert found.verdict.endswith("; trial 3 may be as good.")
    enough = confirmation({2: around(1.5), 3: [2.5, 2.4, 2.5], 0: around(1.0)})
    assert [one.trial.number for one in enough.configurations] == [3, 2, 0]


def test_a_tie_keeps_the_reference() -> None:
    near = confirmation({2: around(1.52), 3: around(1.5, -1.0), 0: around(1.0)})
    assert near.is_decided and near.verdict.endswith("over the reference; trial 3 may be as good.")
    luck = confirmation({2: around(1.02, 3.0), 0: around(1.0, -3.0)})
    assert luck.best is not None and luck.choice is luck.reference is not luck.best and not luck.is_decided
    assert luck.verdict == "Keep the reference: nothing beat it (trial 2: +0.02 [-0.06, 0.10])."
    worse = confirmation({2: around(0.5), 0: around(1.0)})
    assert worse.choice is worse.reference and worse.is_decided
    broke = confirmation({2: around(1.02, 3.0), 0: [*around(1.0, -3.0)[:4], 0.25]}, lost={0: (12,)})
    assert broke.choice is broke.best is not broke.reference and not broke.is_decided, "a tie with one that broke"
    assert broke.verdict.startswith("Launch trial 2: ") and "over the reference (1 of 5 broke" in broke.verdict
    listed = confirmation({2: around(1.5), 3: around(1.49)})
    assert listed.choice is listed.best and not listed.is_decided, "without a reference there is nothing to keep"


def test_one_that_broke_beats_one_that_never_did_only_at_the_bound() -> None:
    broke = confirmation({2: [*around(1.9)[:4], 0.25], 0: around(0.9)}, lost={2: (12,)})
    assert broke.best is broke.choice is broke.reference and not broke.is_decided
    far = confirmation({2: [*around(1.9)[:4], 0.25], 0: around(0.5)}, lost={2: (12,)})
    assert far.choice is far.best and far.best is not far.reference, "0.815 at the bound"
    seldom = confirmation({2: [*around(1.9) * 7, *around(1.9)[:4], 0.25], 0: around(1.72) * 8}, lost={2: (47,)})
    lead = next(one.over_reference for one in seldom.configurations if one.over_reference is not None)
    assert lead.is_above_0 and seldom.choice is seldom.reference, "better on average, and 1.71 at the bound"
    both = confirmation({2: [*around(1.9)[:4], 0.25], 0: [*around(1.0)[:4], 0.25]}, lost={2: (12,), 0: (12,)})
    assert both.best is not both.reference


def test_the_rate_of_breaking_that_costs_the_lead_is_known() -> None:
    """0.9 over the reference, and 1.65 over the SFT policy."""
    assert confirmation({2: around(1.9), 0: around(1.0)}).may_break == pytest.approx(0.9 / 1.65)
    assert confirmation({2: around(1.0), 0: around(1.0, -1.0)}).may_break is None


def test_seeds_are_advised_where_they_could_show_a_gain() -> None:
    """The SFT policy is at 0.25, so a tenth of what training gains is 0.077 here."""
    tie = confirmation({2: around(1.02, 3.0), 0: around(1.0, -3.0)})
    assert tie.worth == pytest.approx(0.077) and tie.highest_gain > tie.worth
    assert tie.seeds_to_show(tie.worth) == 20 and tie.seeds_to_show(0.01) is None
    assert tie.seeds_to_show(0.055) == 40, "the most, which is no doubling of five"
    close = confirmation({2: around(1.0), 0: around(1.0, -1.0)})
    assert close.highest_gain < close.worth, "no gain worth having is left"


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_give_no_verdict(seeds: int) -> None:
    few = confirmation({2: around(1.5)[:seeds], 0: around(1.0)[:seeds]})
    assert few.seeds == seeds and not few.is_decided and few.choice is None
    assert few.verdict.startswith("Nothing yet: ")


# Whole confirmations, of the quick trainer


PLAN = Plan(top=2, seeds=2)


def spec(trainer: str = "tested", **changes: Any) -> StudySpec:
    return quick_spec(trainer, **({"trials": 4} | changes))


def found(folder: Path) -> list[Confirmation]:
    with opened(folder) as store:
        return confirmations(store, read_study(store, NAME))


def test_a_study_is_confirmed_on_all_workers_and_only_once(tmp_path: Path) -> None:
    run(tmp_path, spec())
    before, best = rows(tmp_path), read_best(tmp_path)
    assert run(tmp_path, spec(), plan=PLAN, from_file=False)[0]
    added = rows(tmp_path)[len(before) :]
    assert [(row.role, row.status, row.seed) for row in added] == [(Role.CONFIRM, Status.COMPLETED, s) for s in (6,) * 3 + (7,) * 3]  # fmt: skip
    with opened(tmp_path) as store:
        view = read_study(store, NAME)
    assert (len(view.trials), len(view.confirming)) == (4, 6)
    assert {to_optuna(row, view.spec).state for row in view.confirming} == {TrialState.FAIL}
    assert view.tally.text == "4 of 4 trials ended, 6 of 6 confirming runs ended"
    (one,) = found(tmp_path)
    assert one.is_whole and one.sft is not None and one.sft.reward == -1.0, "of a trainer that made no step"
    assert {c.trial.number: c.reward.mean for c in one.configurations if c.reward is not None} == {
        row.parent: row.value_step for row in added
    }
    assert (rows(tmp_path)[: len(before)], read_best(tmp_path)) == (before, best), "the search is as it was"
    assert run(tmp_path, spec(), plan=PLAN, from_file=False)[0] and len(rows(tmp_path)) == len(before) + 6
    assert (
        run(tmp_path, spec(), plan=Plan(top=2, seeds=3), from_file=False)[0] and len(rows(tmp_path)) == len(before) + 9
    )
    done, _ = run(tmp_path, spec(trials=5))
    assert done and len(rows(tmp_path)) == len(before) + 10, "and the search may go on"


def read_best(folder: Path) -> int | None:
    with opened(folder) as store:
        best = read_study(store, NAME).best()
    return None if best is None else best.number


@pytest.mark.slow
def test_a_kill_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        run(tmp_path / name, spec())
    run(tmp_path / "whole", spec(), plan=PLAN, from_file=False)
    plan = {"plan": {"top": 2, "seeds": 2}, "from_file": False}
    for wanted in ("TrialStepped 4", "TrialEnded 8", "ReadingOnTest"):
        with controller(tmp_path / "killed", spec(), **plan) as running:
            running.read_until(lambda line, wanted=wanted: line.startswith(wanted))  # type: ignore[misc]
            running.kill()
    run(tmp_path / "killed", spec())  # told `run`, not `confirm`
    assert curves(tmp_path / "killed") == curves(tmp_path / "whole")
    assert found(tmp_path / "killed") == [replace(one, sft=other.sft, configurations=tuple(
        replace(mine, trial=theirs.trial) for mine, theirs in zip(one.configurations, other.configurations, strict=True)
    )) for one, other in zip(found(tmp_path / "whole"), found(tmp_path / "killed"), strict=True)]  # fmt: skip


def test_a_study_that_goes_on_or_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("part", "untested", "memory"):
        (tmp_path / name).mkdir()
    run(tmp_path / "part", spec(), timeout=1e-6)
    with pytest.raises(
        StudyError,
        match=r'^study "quick" is not finished \(0 of 4 trials ended\); first: .*run quick --storage \S+store\.db$',
    ):
        run(tmp_path / "part", spec(), plan=PLAN, from_file=False)
    run(tmp_path / "untested", spec("untested"))
    with pytest.raises(StudyError, match=r'study "quick" cannot be confirmed: the task .* has no test prompts$'):
        run(tmp_path / "untested", spec("untested"), plan=PLAN, from_file=False)
    assert len(rows(tmp_path / "untested")) == 4, "nothing was added"
    run(tmp_path / "memory", spec())
    (tmp_path / "no_memory").touch()
    with pytest.raises(
        StudyError, match="cannot be confirmed: the SFT policy could not be evaluated on the test prompts"
    ):
        run(tmp_path / "memory", spec(), plan=PLAN, from_file=False)


def forked(folder: Path) -> StudySpec:
    """Run a study of the reference alone, a fork of it at step 6, and a fork of that at step 9, which is the best."""
    one = spec(trials=1)
    run(folder, one)
    # KL ends at 4, 9.6 and 9.68 nats.
    for parent, episode, values in (
        (0, 96, {"learning_rate": 2.4e-4, "cliprange": 0.3}),
        (1, 144, {"learning_rate": 2.42e-4, "cliprange": 0.25}),
    ):
        placed(folder, "fork", parent, values=values, episode=episode)
        assert run(folder, one)[0]
    assert [(row.role, row.value_step) for row in rows(folder)] == [
        (Role.SEARCH, 10), (Role.FORK, 10), (Role.FORK, 10)
    ]  # fmt: skip
    assert read_best(folder) == 2
    return one


def test_forks_are_confirmed_from_the_start_by_their_parents_values(tmp_path: Path) -> None:
    one = forked(tmp_path)
    assert run(tmp_path, one, plan=PLAN, from_file=False)[0]
    # Of a trainer that no seed changes; a fork has its parent's steps, but not its samples.
    steps = {number: [row for row in rows if len(row) > 3] for number, rows in curves(tmp_path).items()}
    assert [(row.parent, row.seed) for row in rows(tmp_path)[3:]] == [(2, 6), (1, 6), (0, 6), (2, 7), (1, 7), (0, 7)]
    for row in rows(tmp_path)[3:]:
        assert row.parent is not None and steps[row.number] == steps[row.parent]
    (seen,) = found(tmp_path)
    assert seen.is_whole and {c.trial.number: round(c.kl.mean, 3) for c in seen.configurations if c.kl} == {
        0: 4.0, 1: 9.6, 2: 9.68
    }  # fmt: skip
    assert run(tmp_path, one, plan=PLAN, from_file=False)[0] and len(rows(tmp_path)) == 9, "each once"


# The command


def test_the_command_prints_the_verdict_and_what_launches_it(ppo_tuner: Invoke, own_folder: Path) -> None:
    run(own_folder, spec())
    where = ["--storage", storage(own_folder)]
    status, _, err = ppo_tuner("confirm", NAME, "--show", *where)
    again = shlex.join(["ppo-tuner", "confirm", NAME, *where])
    assert status == 1 and err.endswith(f'nothing of study "{NAME}" is confirmed yet; run: {again}\n')
    status, out, err = ppo_tuner("confirm", NAME, "--top", "1", "--seeds", "3", *where)
    assert status == 0 and err == ""
    assert "160 episodes will confirm trial" in out
    assert re.findall(r"^\[(.*?)\]", out, re.MULTILINE) == [f"confirmed {ended}/6" for ended in range(1, 7)]
    assert "On fresh seeds, 160 episodes each, evaluated on 4 test prompts" in out
    told = " ".join(out.split())
    status, out, _ = ppo_tuner("confirm", NAME, "--top", "1", "--seeds", "3", "--json", *where)
    data = json.loads(out)
    assert status == 0 and data["study"] == NAME and data["is_whole"] is True
    assert data["verdict"] in told and data["answer"]["launch"] in told
    before = rows(own_folder)
    status, shown, _ = ppo_tuner("confirm", NAME, "--show", *where)
    assert status == 0 and data["verdict"] in " ".join(shown.split()) and rows(own_folder) == before
    [again] = json.loads(ppo_tuner("confirm", NAME, "--show", "--json", *where)[1])
    assert again == data
    assert data["verdict"] in " ".join(ppo_tuner("best", NAME, *where)[1].split())
    first, second = (one["trial"] for one in data["configurations"][:2])
    compared = ppo_tuner("compare", NAME, str(first), str(second), *where)[1].splitlines()[-1]
    assert compared.startswith(f"Trial {second} minus trial {first}: ") and compared.endswith(" on 3 fresh seeds.")
    status, out, _ = ppo_tuner("show", NAME, "5", *where)
    assert status == 0 and "confirms trial" in out
    status, _, err = ppo_tuner("confirm", NAME, "--top", "9", *where)
    assert status == 2 and "top = 9 is not allowed: " in err and err.count("\n") == 1

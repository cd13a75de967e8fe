"""Confirming: which configurations run again, what their intervals say, and that a kill loses nothing of it."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Mapping
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
from tuner.confirm.plan import Plan, candidates, cost_line, due_step, missing
from tuner.confirm.result import Confirmation, Confirmed, confirmations
from tuner.control.events import StudyWarned
from tuner.judge.results import read_study
from tuner.search.optuna_trials import to_optuna
from tuner.store import OnTest, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, PausedBy, Role, Status

SPEC = make_spec(seed=7)


def searched(number: int, value: float, **changes: Any) -> TrialRow:
    config = SPEC.config({"learning_rate": 1e-5 * (number + 1)}).to_dict()
    return trial_row(number, **({"value": value, "value_step": 3, "config": config, "seed": 7} | changes))


ROWS = [
    searched(0, 1.0, origin=Origin.REFERENCE),
    searched(1, 1.5),
    searched(2, 1.9),
    searched(3, 1.7),
    searched(4, 1.6, status=Status.PAUSED, paused_by=PausedBy.STRATEGY, rung_score=2.5),
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


def test_every_configuration_and_the_reference_run_on_seeds_that_the_search_did_not_use() -> None:
    wanted = missing(ROWS, SPEC, Plan(top=2, seeds=2))
    assert [(new.number, new.parent, new.seed) for new in wanted] == [
        (9, 2, 8), (10, 3, 8), (11, 0, 8), (12, 2, 9), (13, 3, 9), (14, 0, 9)
    ]  # fmt: skip
    assert {new.role for new in wanted} == {Role.CONFIRM} and {new.status for new in wanted} == {Status.WAITING}
    assert wanted[0].config == {**ROWS[2].config, "seed": 8}
    assert wanted[2].origin is Origin.REFERENCE


def test_what_ran_already_does_not_run_again_and_another_length_is_another_run() -> None:
    first = missing(ROWS, SPEC, Plan(top=1, seeds=1))
    there = [*ROWS, *(trial_row(n.number, config=n.config, role=Role.CONFIRM, parent=n.parent) for n in first)]
    assert missing(there, SPEC, Plan(top=1, seeds=1)) == []
    assert [(n.number, n.parent, n.seed) for n in missing(there, SPEC, Plan(top=1, seeds=2))] == [
        (11, 2, 9),
        (12, 0, 9),
    ]
    longer = missing(there, SPEC, Plan(top=1, seeds=1, total_episodes=9_600))
    assert [(n.parent, n.config["total_episodes"]) for n in longer] == [(2, 9_600), (0, 9_600)]


def test_the_time_is_estimated_without_forks_whose_episodes_are_in_part_their_parents() -> None:
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


def test_a_run_that_broke_or_has_nothing_within_the_budget_leaves_the_untrained_policy() -> None:
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
    one = confirmed._confirmed(ROWS[2], 1920, runs, tests, SPEC)
    assert (one.open, one.ends_within, one.reward is not None and one.reward.n) == ((10,), 1, 2)


def test_a_fork_is_another_configuration_than_its_last_values_from_the_start() -> None:
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


def test_t_intervals_are_those_of_the_tables() -> None:
    """t(0.975, 4) = 2.7764, t(0.975, 1) = 12.706; sd of 1..5 is sqrt(2.5)."""
    found = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None and found.low is not None and found.high is not None
    assert (found.mean, found.n) == (3.0, 5)
    assert found.high - found.mean == pytest.approx(2.7764 * math.sqrt(2.5 / 5), abs=1e-4)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    pair = t_interval([0.0, 2.0])
    assert pair is not None and pair.high == pytest.approx(1 + 12.7062 * math.sqrt(2) / math.sqrt(2), abs=1e-3)
    one = t_interval([0.4])
    assert one is not None and (one.mean, one.low, one.high, one.n) == (0.4, None, None, 1) and not one.is_above_0
    assert t_interval([]) is None
    pair = t_interval([0.5, 2.5], least=0.0)
    assert pair is not None and (pair.mean, pair.low) == (1.5, 0.0), "a KL is never negative"


def test_differences_are_paired_by_seed_and_wider_among_several() -> None:
    """t(1 - 0.05 / 6, 2) = 7.6489."""
    one, other = {1: 2.0, 2: 3.0, 3: 5.0, 9: 0.0}, {1: 1.0, 2: 1.0, 3: 2.0, 8: 9.0}
    alone, among = difference(one, other, 1), difference(one, other, 3)
    assert alone is not None and among is not None and alone.low is not None and among.low is not None
    assert (alone.mean, alone.n) == (2.0, 3)
    assert alone.low == pytest.approx(2.0 - 4.3027 / math.sqrt(3), abs=1e-4)
    assert among.low == pytest.approx(2.0 - 7.6489 / math.sqrt(3), abs=1e-4)
    assert difference({1: 1.0}, {2: 1.0}, 1) is None


# What it comes to


def confirmation(rewards: Mapping[int, list[float]], **changes: Any) -> Confirmation:
    """Return what configurations with these rewards, by the number of their trial, come to; 0 is the reference."""
    read = [
        Confirmed(ROWS[number], 1_920, by_seed, by_seed, {})
        for number, values in rewards.items()
        if (by_seed := dict(enumerate(values, 8))) or True
    ]
    return confirmed.compared(1_920, [replace(one, **changes) for one in read], None)


NOISE = (0.0, 0.02, -0.02, 0.01, -0.01)


def around(mean: float, factor: float = 1.0) -> list[float]:
    return [mean + factor * noise for noise in NOISE]


def test_a_clear_winner_is_said_to_be_one() -> None:
    found = confirmation({2: around(1.9), 3: around(1.5, -1.0), 0: around(1.0, 2.0)})
    assert [one.trial.number for one in found.configurations] == [2, 3, 0]
    assert found.best is not None and found.best.trial.number == 2
    assert found.not_told_apart == [] and found.is_decided
    assert found.verdict == (
        "Trial 2 is better than the reference: +0.900 [0.875, 0.925] reward. It is better than every other one that was "
        "confirmed."
    )


def test_a_configuration_on_few_seeds_does_not_pass_one_on_many() -> None:
    found = confirmation({2: around(1.5), 3: [2.5, 2.4], 0: around(1.0)})
    assert [one.trial.number for one in found.configurations] == [2, 0, 3]
    assert found.verdict.endswith("The data do not distinguish it from trial 3 (ahead by 0.9 [-0.6, 2.5]).")
    enough = confirmation({2: around(1.5), 3: [2.5, 2.4, 2.5], 0: around(1.0)})
    assert [one.trial.number for one in enough.configurations] == [3, 2, 0]


def test_what_the_data_do_not_tell_apart_is_said_to_be_so() -> None:
    near = confirmation({2: around(1.52), 3: around(1.5, -1.0), 0: around(1.0)})
    assert near.verdict.startswith("Trial 2 is better than the reference: +0.52") and near.is_decided
    assert near.verdict.endswith("The data do not distinguish it from trial 3 (behind by 0.020 [-0.029, 0.069]).")
    luck = confirmation({2: around(1.02, 3.0), 0: around(1.0, -3.0)})
    assert luck.best is not None and luck.best is not luck.reference and not luck.is_decided
    assert luck.verdict.startswith(
        "Trial 2 has the highest mean, but the data do not distinguish it from the reference ("
    )
    assert luck.verdict.endswith(" reward). Confirm on more seeds before you rely on it.")
    worse = confirmation({2: around(0.5), 0: around(1.0)})
    assert worse.verdict == "Nothing better was found than the configuration you started from (trial 0, the reference)."
    assert worse.is_decided
    equal = confirmation({2: around(1.0), 0: around(1.01, -1.0)})
    assert equal.verdict == (
        "Nothing better was found than the configuration you started from (trial 0, the reference); trial 2 "
        "(behind by 0.010 [-0.029, 0.049]) is a tie."
    )
    assert not equal.is_decided


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_give_no_verdict(seeds: int) -> None:
    few = confirmation({2: around(1.5)[:seeds], 0: around(1.0)[:seeds]})
    assert few.seeds == seeds and not few.is_decided
    assert few.verdict.startswith("Trial 2 has the highest mean, of ") and few.verdict.endswith("on at least 3.")


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
    assert one.is_whole and one.baseline is not None and one.baseline.reward == -1.0, "of a trainer that made no step"
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
    assert found(tmp_path / "killed") == [replace(one, baseline=other.baseline, configurations=tuple(
        replace(mine, trial=theirs.trial) for mine, theirs in zip(one.configurations, other.configurations, strict=True)
    )) for one, other in zip(found(tmp_path / "whole"), found(tmp_path / "killed"), strict=True)]  # fmt: skip


def test_runs_whose_checkpoints_are_gone_are_named_where_they_cannot_be_read(tmp_path: Path) -> None:
    run(tmp_path, spec())
    run(tmp_path, spec(), plan=PLAN, from_file=False)
    lost = next(row for row in rows(tmp_path) if row.role is Role.CONFIRM)
    with Store.open(storage(tmp_path))._engine.begin() as connection:
        connection.exec_driver_sql(f"DELETE FROM ppo_test_readings WHERE trial_id = {lost.id}")
    shutil.rmtree(tmp_path / "runs" / NAME / str(lost.number))
    for plan in (PLAN, None):
        finished, events = run(tmp_path, spec(), plan=plan, from_file=False)
        told = [event.message for event in events if isinstance(event, StudyWarned)]
        assert finished and len(told) == 1 and told[0].startswith(f"trial {lost.number}: not evaluated")
        assert f"ppo-tuner confirm {NAME} --seeds 3" in told[0]


def test_a_study_that_goes_on_or_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("part", "untested", "memory"):
        (tmp_path / name).mkdir()
    run(tmp_path / "part", spec(), timeout=1e-6)
    with pytest.raises(
        StudyError, match=r'^study "quick" is not finished \(0 of 4 trials ended\); first: .*run quick$'
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


def test_forks_are_confirmed_from_the_start_with_their_parents_values_first(tmp_path: Path) -> None:
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
    assert "nothing is known of other lengths." in out
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
    assert compared.startswith("On fresh seeds, 160 episodes each") and compared.count(" at a KL of ") == 2
    status, out, _ = ppo_tuner("show", NAME, "5", *where)
    assert status == 0 and "confirms trial" in out
    status, _, err = ppo_tuner("confirm", NAME, "--top", "9", *where)
    assert status == 2 and "top = 9 is not allowed: " in err and err.count("\n") == 1

"""The gauntlet of made-up studies: which gate stops each trial, by how much, and who is left."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ppo_core.report import SplitReading, StepReport
from tests.tuner import test_ten_answers as ten
from tests.tuner.test_ten_answers import NAME, STUDIES, around
from tests.tuner.trial_rows import trial_row
from tuner.confirm import gauntlet
from tuner.confirm.answer import study_answer
from tuner.confirm.gauntlet import Gate, Gauntlet, State, Way
from tuner.confirm.plan import Plan, missing
from tuner.judge.results import read_study, under_budget
from tuner.judge.scoring import judged
from tuner.store import Lease, NewTrial, Outcome, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Status

SE = 0.03
"""Standard error of every eval reward; that of an eval KL is 0.1."""


@dataclass(frozen=True)
class Made:
    """A trial: its reward and eval KL at its end, its highest training KL, and how it ended."""

    reward: float
    kl: float = 4.0
    training_kl: float = 5.0
    rule: str = ""
    """The rule that ended it; `error`: it failed."""
    is_running: bool = False


TRIALS = (
    Made(1.0),  # the reference
    Made(2.0, 5.85),  # within two standard errors of the budget of 6
    Made(1.9, training_kl=40.0, rule="kl_limit"),  # ended, and yet among the best
    Made(1.8),
    Made(1.75),  # within two standard errors of 1.8
    Made(1.2),
    Made(3.0, 9.0),
    Made(1.0, training_kl=45.0, rule="kl_limit"),
    Made(1.0, training_kl=6.0, rule="nothing_learned"),
    Made(1.0, training_kl=7.0, rule="error"),
    Made(0.1),  # below the SFT policy
)
FRESH = {0: around(1.0), 1: around(2.0), 2: around(1.5), 3: around(1.01, factor=4)}


def record(store: Store, lease: Lease, trial: TrialRow, spec: StudySpec, made: Made) -> None:
    row = store.begin_attempt(lease, trial, None)
    for step, reward, kl in ((0, 0.25, 0.0), (2, made.reward - 0.001, made.kl + 0.01), (4, made.reward, made.kl)):
        metrics = {"eval/reward": reward, "eval/reward_se": SE, "eval/kl": kl, "eval/kl_se": 0.1, "eval/length": 20.0}
        metrics["objective/kl_exact"] = made.training_kl / (1 if step == 2 else 2)
        store.add_step(lease, row.id, StepReport(step, 64 * step, metrics), 1.0)
    if made.is_running:
        return
    reason = Reason(made.rule, "made up") if made.rule else None
    status = {"": Status.COMPLETED, "error": Status.FAILED}.get(made.rule, Status.PRUNED)
    found = Outcome(status, reason) if status is Status.FAILED else judged(store, row, spec, status, reason)
    store.finish_trial(lease, row.id, found)


def study(
    path: Path, trials: Sequence[Made], fresh: Mapping[int, Sequence[ten.Run]] = {}, budget: float | None = None
) -> Gauntlet:
    """Write a study of these trials, confirmed on these readings by trial, and return its gauntlet."""
    spec = StudySpec.from_dict({**ten.SPEC, "trials": len(trials)}, "made")
    with closing(Store.open(f"sqlite:///{path}", create=True)) as store:
        store.create_study(NAME, spec.to_dict())
        lease = store.acquire(NAME)
        for number, made in enumerate(trials):
            params = {"learning_rate": 1e-4 * (number + 1)} if number else spec.reference_params()
            origin = Origin.SAMPLED if number else Origin.REFERENCE
            row = store.add_trial(lease, NewTrial(number, origin, spec.config(params).to_dict(), params, 1))
            record(store, lease, row, spec, made)
        rows = read_study(store, NAME).trials
        store.add_test_reading(lease, rows[0].id, 0, SplitReading(64, 0.25, SE, 0.0, 0.0), None)
        for new in missing(rows, spec, Plan()) if fresh else ():
            row, run = store.add_trial(lease, new), fresh[new.parent or 0][int(new.config["seed"] or 0) - spec.seed - 1]
            assert run is not None
            record(store, lease, row, spec, Made(*run))
            store.add_test_reading(lease, row.id, 4, SplitReading(64, run[0], SE, run[1], 0.1), None)
        if not any(made.is_running for made in trials):
            store.set_finished(lease)
        store.release(lease)
    return read(path, budget)


def read(path: Path, budget: float | None = None) -> Gauntlet:
    with closing(Store.open(f"sqlite:///{path}")) as store:
        view = read_study(store, NAME)
        view = view if budget is None else under_budget(store, view, budget)
        return gauntlet.study_gauntlet(store, view, study_answer(store, view))


def stops(found: Gauntlet) -> dict[int, tuple[str, str]]:
    """Where each trial stopped, and its last reading."""
    return {row.number: (str(row.stopped_at or row.state), row.readings[-1].text) for row in found.rows}


def close(row: Way) -> list[str]:
    """The gates at which a trial is close to the limit."""
    return [str(gate) for gate, reading in zip(Gate, row.readings, strict=False) if reading.is_close]


def test_each_trial_stops_at_the_first_gate_that_it_fails_and_by_how_much(tmp_path: Path) -> None:
    found = study(tmp_path / "s.db", TRIALS, FRESH)
    assert stops(found) == {
        1: ("passed", "+1.00"),
        2: ("passed", "+0.50"),
        3: ("fresh seeds", "+0.01"),
        0: ("fresh seeds", "beaten"),
        4: ("reward", "1.750"),
        5: ("reward", "1.200"),
        10: ("reward", "0.100"),
        6: ("eval KL", "9.00"),
        7: ("training KL", "45.0"),
        8: ("training KL", "Nothing learned"),
        9: ("training KL", "failed"),
    }
    assert [row.number for row in found.rows] == [1, 2, 3, 0, 4, 5, 10, 6, 7, 8, 9], "by gates passed, then reward"
    assert found.left == [11, 8, 7, 4, 4, 2] and found.line == "11 → 8 → 7 → 4 → 4 → 2"
    assert found.limits == {
        Gate.TRAINING: 15.0, Gate.KL: 6.0, Gate.REWARD: 1.8, Gate.HACKING: 1.0, Gate.FRESH: 0.0
    }  # fmt: skip
    row_of = {row.number: row for row in found.rows}
    assert {number: close(row) for number, row in row_of.items() if close(row)} == {
        1: ["eval KL"],
        2: ["training KL"],
        3: ["reward", "fresh seeds"],
        4: ["reward"],
    }
    assert [row.number for row in found.rows if row.is_answer] == [1]
    baseline = replace(row_of[1], trial=trial_row(1, origin=Origin.BASELINE))
    assert [row.label for row in (row_of[0], row_of[1], baseline)] == ["reference (0)", "trial 1", "baseline (1)"]


def test_what_would_go_on_to_fresh_seeds_is_open_until_it_has(tmp_path: Path) -> None:
    found = study(tmp_path / "s.db", TRIALS)
    open_rows = [row for row in found.rows if row.state is State.OPEN]
    assert [row.number for row in open_rows] == [1, 2, 3, 0] and {row.passed for row in open_rows} == {4}
    assert found.left == [11, 8, 7, 4, 4] and found.limits[Gate.REWARD] == 1.8
    assert [row.number for row in found.rows if row.is_answer] == [1]


def test_a_running_trial_is_not_decided(tmp_path: Path) -> None:
    within, over = Made(1.0, is_running=True), Made(1.0, 9.0, is_running=True)
    found = study(tmp_path / "s.db", (*TRIALS[:2], within, over))
    row_of = {row.number: row for row in found.rows}
    assert [(row_of[number].passed, row_of[number].state) for number in (2, 3)] == [(2, State.OPEN), (1, State.OPEN)]
    assert found.left == [4, 4, 3, 2, 2]


def test_under_another_budget_nothing_is_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    study(path, TRIALS, FRESH)
    found = read(path, 5.0)
    assert stops(found)[1] == ("eval KL", "5.85") and found.limits[Gate.KL] == 5.0
    assert found.left[-1] == len([row for row in found.rows if row.state is State.OPEN]) == 4


@pytest.mark.parametrize(
    ("name", "left", "ends", "cautions"),
    [
        ("tie", [2, 2, 2, 2, 2, 1], {0: "passed", 1: "fresh seeds"}, {1: ["fresh seeds"]}),
        ("win", [2, 2, 2, 2, 2, 1], {1: "passed", 0: "fresh seeds"}, {}),
        ("breaks", [2, 2, 2, 2, 2, 1], {0: "passed", 1: "fresh seeds"}, {1: ["fresh seeds"]}),
        ("hacked", [2, 2, 2, 2, 2, 1], {1: "passed", 0: "fresh seeds"}, {1: ["length / hacking"]}),
        ("hacked once", [2, 2, 2, 2, 2, 1], {1: "passed", 0: "fresh seeds"}, {1: ["length / hacking"]}),
        ("newer", [3, 3, 3, 3, 3, 1], {1: "passed", 12: "open", 0: "fresh seeds"}, {12: ["reward"]}),
        ("none", [2, 2, 0], {0: "eval KL", 1: "eval KL"}, {}),
        ("one trial", [1, 1, 1, 1, 1], {0: "open"}, {}),
        ("running", [2, 2, 2, 2, 2], {1: "open", 0: "open"}, {}),
    ],
)
def test_it_ends_where_the_answer_is(
    tmp_path: Path, name: str, left: list[int], ends: dict[int, str], cautions: dict[int, list[str]]
) -> None:
    ten.make(tmp_path / "ten.db", STUDIES[name])
    found = read(tmp_path / "ten.db")
    assert found.left == left
    assert {number: where for number, (where, _) in stops(found).items()} == ends
    assert {row.number: marks for row in found.rows if (marks := close(row))} == cautions
    if (answer := ten.of(tmp_path / "ten.db")) is not None:
        assert found.rows[0].is_answer and found.rows[0].number == answer.number


def test_the_hacking_sign_is_the_share_of_the_way_to_its_limit(tmp_path: Path) -> None:
    ten.make(tmp_path / "ten.db", STUDIES["hacked"])
    first = read(tmp_path / "ten.db").rows[0].readings[3]
    # From 20 tokens to the mean of two evaluations, both 36, 34, 35 or 20; the limit is 30.
    assert first.seeds == pytest.approx((0.0, 0.0, 1.4, 1.5, 1.6)) and first.value == pytest.approx(1.4)
    ten.make(tmp_path / "short.db", replace(STUDIES["hacked"], longer=12, longer_fresh=(12, 12, 12, 20, 20)))
    shorter = read(tmp_path / "short.db").rows[0].readings[3]
    assert shorter.value == pytest.approx(0.8), "12 of 20 tokens; the limit is 10"


def test_the_highest_reading_of_a_metric_leaves_out_what_is_no_number(tmp_path: Path) -> None:
    study(tmp_path / "s.db", [Made(1.0, training_kl=math.nan), Made(1.0, training_kl=8.0)])
    with closing(Store.open(f"sqlite:///{tmp_path / 's.db'}")) as store:
        first, second = read_study(store, NAME).trials
        assert store.highest([first.id, second.id], "objective/kl_exact") == {second.id: 8.0}
        assert store.highest([first.id], "eval/reward") == {first.id: 1.0}

"""What runs next, on hand-made trials and in simulated studies; and what the controller makes of it."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.errors import ConfigError
from ppo_core.report import NextMove, StepReport
from tests.tuner.quick_study import NAME, curves, outcomes, quick_spec, rows, run
from tests.tuner.trial_rows import pruned, trial_row
from tuner.cli.arguments import budget
from tuner.control.events import TrialStarted
from tuner.control.trial_ends import guarded
from tuner.engine.protocol import Stepped
from tuner.judge.scoring import charged_seconds, tally
from tuner.search.choose import New, choose, is_exhausted, is_finished, paused, runnable
from tuner.search.propose import new_trial
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Role, Status
from tuner.study.study_file import BUDGET_IS

SEARCH = {"learning_rate": {"low": 1e-5, "high": 1e-3, "scale": "log"}, "num_ppo_epochs": {"low": 1, "high": 6}}


def make_spec(**changes: Any) -> StudySpec:
    content = {
        "name": "made", "task": "reviews", "search": SEARCH, "sampler": {"name": "random"},
        **({} if {"trials", "budget"} & changes.keys() else {"budget": 20}),
    }  # fmt: skip
    return StudySpec.from_dict({**content, **changes}, "made")


CONFIG = make_spec().config({}).to_dict()  # 1,920 episodes


def finished(number: int, **changes: Any) -> TrialRow:
    return trial_row(number, **{"config": CONFIG, "episodes": 1920, "value": 9.0, **changes})


def next_of(trials: Sequence[TrialRow], spec: StudySpec) -> int | str | None:
    """Return what runs next: a trial's number, "new", or None."""
    chosen = choose(spec, trials, ())
    return "new" if isinstance(chosen, New) else chosen


def test_interrupted_trials_come_before_waiting_and_both_before_new() -> None:
    unended = [replace(finished(n), status=Status.WAITING) for n in range(2)]
    unended.append(replace(finished(2), status=Status.RUNNING))
    spec = make_spec()
    assert choose(spec, unended, ()) == 2
    assert choose(spec, unended, (2,)) == 0
    assert choose(spec, unended, (0, 2)) == 1
    assert isinstance(choose(spec, unended, (0, 1, 2)), New)


def test_a_paused_trial_waits_for_a_person() -> None:
    trials = [replace(finished(n), status=status) for n, status in enumerate(Status)]
    waiting = [row.number for row in trials if row.status in (Status.WAITING, Status.RUNNING)]
    assert [row.status for row in paused(make_spec(), trials)] == [Status.PAUSED]
    assert [row.number for row in runnable(make_spec(), trials)] == waiting


@pytest.mark.parametrize(
    ("status", "episodes", "failed"),
    [(Status.FAILED, 64, True), (Status.PRUNED, 0, True), (Status.PRUNED, 64, False), (Status.COMPLETED, 0, False)],
)
def test_what_a_rule_ends_before_its_first_update_has_failed(status: Status, episodes: int, failed: bool) -> None:
    assert trial_row(0, status=status, episodes=episodes).has_failed is failed


def test_a_small_space_is_not_exhausted_before_its_starts_and_baseline_ran() -> None:
    table: dict[str, Any] = {"search": {"num_ppo_epochs": [2, 4]}, "start": [{"num_ppo_epochs": 2}]}
    spec = make_spec(**table, baseline={"learning_rate": 1e-5})
    ran = [
        finished(n, params=params, config=spec.config(params).to_dict())
        for n, params in enumerate(({"num_ppo_epochs": 4}, {"num_ppo_epochs": 2}))
    ]
    assert is_exhausted(make_spec(**table), ran) and not is_exhausted(spec, ran)


def test_a_trial_is_charged_what_it_used_and_a_new_one_needs_a_whole() -> None:
    rows = [finished(0), pruned(1, config=CONFIG, episodes=640), pruned(2, config=CONFIG, episodes=640)]
    assert next_of(rows, make_spec(budget=2.6)) is None, "1.67 spent, and a whole trial does not fit"
    assert next_of(rows, make_spec(budget=2.7)) == "new"
    assert is_finished(make_spec(budget=2.6), rows) and not is_finished(make_spec(budget=2.7), rows)
    rows[2] = replace(rows[2], status=Status.RUNNING)
    assert choose(make_spec(budget=3.3), rows, (2,)) is None, "one that runs may yet use all of a trial"
    assert isinstance(choose(make_spec(budget=3.4), rows, (2,)), New)


@pytest.mark.parametrize(("total", "whole"), [(1000, 1024), (2000, 2048)])
def test_what_rounds_a_trial_up_to_whole_batches_is_not_charged(total: int, whole: int) -> None:
    fixed = {"total_episodes": total}
    done = [finished(number, config=CONFIG | fixed, episodes=whole) for number in range(10)]
    spec = make_spec(budget=10, fixed=fixed)
    assert (next_of(done[:9], spec), next_of(done, spec)) == ("new", None)
    assert tally(done, spec).text == "10 trials ended, 10.0 of 10 full trials spent"


def test_a_budget_in_time_starts_trials_until_they_have_taken_it() -> None:
    rows, spec = [finished(n, seconds=60.0) for n in range(3)], make_spec(budget="3m")
    assert next_of([], make_spec(budget="1s")) == next_of(rows[:2], spec) == "new"
    assert next_of(rows, spec) is None and is_finished(spec, rows)
    assert next_of(rows, make_spec(budget="0.051h")) == "new", "room for 3.6 seconds begins a trial"
    rows[2] = replace(rows[2], status=Status.RUNNING, seconds=5.0)
    assert choose(spec, rows, (2,)) is None, "one that runs counts as what the others took"
    assert isinstance(choose(make_spec(budget="181s"), rows, (2,)), New)
    assert choose(spec, rows, ()) == 2, "and is resumed to its end"
    longer = [replace(row, seconds=200.0) if row.number == 2 else row for row in rows]
    assert choose(make_spec(budget="310s"), longer, (2,)) is None, "but for one that took more already"
    at_once = [trial_row(n, status=Status.FAILED, config=CONFIG, episodes=0, seconds=0.0) for n in range(3)]
    assert (next_of(at_once[:2], make_spec(budget="3s")), next_of(at_once, make_spec(budget="3s"))) == ("new", None)
    assert next_of(rows[:2], make_spec(budget="3m", trials=2)) is None


def test_how_far_a_study_with_a_budget_in_time_is() -> None:
    rows = [finished(0, seconds=60.0), finished(1, seconds=30.0), finished(2, seconds=9e9, origin=Origin.ENQUEUED)]
    far = tally(rows, make_spec(budget="3m"))
    assert (far.text, far.done) == ("3 trials ended, 1.5 of 3 min spent", 0.5)
    running = replace(far, under_way=0.9, running=0.75)
    assert (running.text, running.done) == ("3 trials ended, 2.2 of 3 min spent", 0.75)
    assert tally(rows, make_spec(budget="90s")).text == "3 trials ended, 90.0 of 90 s spent"
    both = tally(rows[:2], make_spec(budget="1h", trials=4))
    assert (both.text, both.done) == ("2 of 4 trials ended, 0.0 of 1 h spent", 0.5)


@pytest.mark.parametrize(("given", "read"), [(8, 8.0), ("8", 8.0), ("90s", "90s"), ("2.5 h", "2.5 h"), ("3m", "3m")])
def test_a_budget_is_trials_or_a_time_and_is_stored_as_it_was_given(given: Any, read: float | str) -> None:
    spec = make_spec(budget=given)
    assert spec.budget == read == StudySpec.from_stored(json.loads(json.dumps(spec.to_dict())), "stored").budget
    assert budget(str(given)) == read
    assert spec.budget_time == {"90s": (90, "s", 90), "2.5 h": (2.5, "h", 9000), "3m": (3, "min", 180)}.get(given)


@pytest.mark.parametrize(
    "given", ["", "m", "0m", "-3m", "3 d", "3x", "1e400m", "inf", "nan", "-1", "90 sec", True, [3]]
)
def test_another_budget_is_one_line_that_says_what_is_allowed(given: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        make_spec(budget=given)
    told = [str(raised.value)]
    if isinstance(given, str):
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            budget(given)
        told.append(str(refused.value))
    for line in told:
        assert "is not allowed" in line and BUDGET_IS in line and "\n" not in line


def test_a_study_ends_with_the_trial_that_spends_its_time(tmp_path: Path) -> None:
    """A trial that takes less than a second is charged one."""
    before, more = 0, (lambda new: new > 0)
    for limit, is_more in (("3s", more), ("3s", lambda new: new == 0), ("6s", lambda new: new >= 0)):
        has_ended, _ = run(tmp_path, quick_spec(trials=None, budget=limit, stop_early=False), workers=1)
        ended = rows(tmp_path)
        assert has_ended and is_more(len(ended) - before)
        assert sum(map(charged_seconds, ended[:-1])) < int(limit[0]) <= sum(map(charged_seconds, ended))
        assert all(row.status.is_final for row in ended)
        before = len(ended)


def test_trials_that_people_asked_for_are_not_counted() -> None:
    rows = [finished(0), finished(1, origin=Origin.ENQUEUED), finished(2, origin=Origin.FORKED, role=Role.FORK)]
    assert next_of(rows, make_spec(trials=2)) == next_of(rows, make_spec(budget=2)) == "new"
    assert next_of([*rows, finished(3)], make_spec(trials=2)) is None
    assert next_of([*rows, finished(3)], make_spec(budget=2)) is None


# Simulated studies


class Simulated:
    """A study without an engine: its trials report all their iterations, several trials in turns."""

    def __init__(self, spec: StudySpec, workers: int) -> None:
        self.spec, self.workers = spec, workers
        self.rows: list[TrialRow] = []
        self.busy: list[int] = []

    def run(self) -> None:
        for _ in range(20_000):
            while len(self.busy) < self.workers and (chosen := choose(self.spec, self.rows, self.busy)) is not None:
                assert isinstance(chosen, New), "every other trial has a worker"
                new = new_trial(self.spec, self.rows, chosen, 1)
                begun = {"status": Status.RUNNING, "value": None, "kl": None, "episodes": 0, "ended_at": None}
                values = {"origin": new.origin, "config": dict(new.config), "params": dict(new.params)}
                self.put(trial_row(new.number, **values, **begun))
                self.busy.append(new.number)
            if not self.busy:
                return
            self._step(self.busy.pop(0))
        raise AssertionError("the study does not come to an end")

    def put(self, row: TrialRow) -> None:
        self.rows[row.number : row.number + 1] = [row]

    def _step(self, number: int) -> None:
        row, config = self.rows[number], self.spec.config(self.rows[number].params)
        episode = row.episodes + config.batch_sizes(world_size=1).batch_size
        reward = 0.1 * (number % 7) + 0.01 * episode
        row = replace(row, episodes=episode, value=reward, kl=1.0, end_kl=1.0)
        if episode >= config.whole_episodes():
            self.put(replace(row, status=Status.COMPLETED))
        elif number % 4 == 3:
            self.put(replace(row, status=Status.PRUNED))
        else:
            self.put(row)
            self.busy.append(number)


WIDE = dict.fromkeys(("learning_rate", "batch_size", "num_ppo_epochs", "kl_coef"), "advised")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "bounds",
    [{"trials": 6}, {"budget": 1}, {"budget": 1.5}, {"budget": 6}, {"budget": 1, "fixed": {"total_episodes": 1000}}],
    ids=str,
)
def test_a_study_comes_to_an_end_within_its_bounds(bounds: dict[str, Any], workers: int) -> None:
    spec = make_spec(search=WIDE, sampler={"name": "tpe"}, **bounds)
    study = Simulated(spec, workers)
    assert not is_finished(spec, []), "a study without trials is not finished"
    study.run()
    assert is_finished(spec, study.rows)
    assert len(study.rows) <= bounds.get("trials", 1000)
    spent = tally(study.rows, spec).spent
    assert bounds.get("budget", 0) - 1 < spent <= bounds.get("budget", 1000)
    assert any(row.status is Status.COMPLETED for row in study.rows)
    ended = study.rows[0]
    study.put(replace(ended, status=Status.PAUSED))
    assert choose(spec, study.rows, ()) is None, "what a person paused is theirs to resume"
    assert not is_finished(spec, study.rows)
    study.put(replace(ended, status=Status.WAITING))
    assert choose(spec, study.rows, ()) == 0
    study.put(ended)
    asked = replace(ended, number=len(study.rows), origin=Origin.ENQUEUED, status=Status.WAITING)
    study.put(asked)
    assert choose(spec, study.rows, ()) == asked.number, "what a person asked for is run beyond the bounds"


def test_what_the_guard_ends_is_evaluated_once_more() -> None:
    bare = {"objective/kl_exact": 90.0}
    reason = Reason("kl_hard", "KL 90 nats is far over the limit", "objective/kl_exact", 90.0, 60.0, 1, 3)
    first = guarded(Stepped(StepReport(3, 192, bare), 1.0, 1.0, reason))
    assert first.action is NextMove.EVALUATE
    for metrics in ({**bare, "eval/reward": 1.0, "eval/kl": 90.0}, bare):
        ended = guarded(Stepped(StepReport(3, 192, metrics), 1.0, 1.0, reason, is_again=True))
        assert (ended.action, ended.reason) == (NextMove.STOP, reason), "evaluated or not"


# Through the controller


def test_a_budget_is_kept_and_more_of_it_goes_on_where_it_was(tmp_path: Path) -> None:
    spec = quick_spec(trials=None, budget=3, kl={"budget": 10.0, "limit": 1000.0})
    is_done, _ = run(tmp_path, spec, workers=2)
    assert is_done
    assert sum(row.episodes for row in rows(tmp_path)) / 160 == 3
    before = outcomes(tmp_path)
    is_done, events = run(tmp_path, spec, workers=2, budget=4)
    assert is_done and outcomes(tmp_path)[:3] == before
    assert [event.row.number for event in events if isinstance(event, TrialStarted)] == [3]
    assert sum(row.episodes for row in rows(tmp_path)) / 160 == 4
    is_done, events = run(tmp_path, spec, workers=2, budget=4)
    assert is_done and not any(isinstance(event, TrialStarted) for event in events)


def test_a_trial_is_evaluated_and_saved_before_it_crosses_the_kl_budget(tmp_path: Path) -> None:
    """KL rises by 4 nats a step: it is 8 at step 2, and would be over the budget of 10 at the next evaluation."""
    spec = quick_spec(
        trials=1, fixed={"learning_rate": 1e-3}, search={"cliprange": "advised"}, kl={"budget": 10.0, "limit": 1000.0}
    )
    assert run(tmp_path, spec)[0]
    (row,) = rows(tmp_path)
    evaluated = [step for step, _, _, _, reward, _ in (one for one in curves(tmp_path)[0] if len(one) == 6) if reward]
    assert evaluated == [0, 1, 2, 3, 6, 9, 10], "1 and 2 are beside the regular ones"
    assert (row.value_step, row.kl, row.end_kl) == (2, 8.0, 40.0), "8 nats and a standard error of 0.25"
    assert row.value == pytest.approx(1 + 8**0.5)
    kept = [path.name for path in checkpoint.complete(tmp_path / "runs" / NAME / "0")]
    assert kept == ["step-000002", "step-000006", "step-000009", "step-000010"], "those between are on the front"

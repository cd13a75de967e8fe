"""What runs next, on hand-made trials and in simulated studies; and early_cut as the controller carries it out."""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.report import NextMove, StepReport
from tests.tuner.quick_study import NAME, curves, opened, outcomes, quick_spec, rows, run
from tests.tuner.trial_rows import pruned, trial_row
from tuner.control.events import StudyWarned, TrialStarted
from tuner.engine.protocol import Stepped
from tuner.files import trial_log
from tuner.judge.decision import judge, why_paused
from tuner.judge.scoring import evaluations_of, rung_score, tally, trial_value
from tuner.search.choose import (
    New,
    Promote,
    Resume,
    choose,
    is_finished,
    lengths,
    own_rung,
    promotable,
    promotions,
    screening_rank,
)
from tuner.search.propose import new_trial
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, PausedBy, Reason, Role, Status
from tuner.study.study_file import STRATEGIES, Strategy

SEARCH = {"learning_rate": {"low": 1e-5, "high": 1e-3, "scale": "log"}, "num_ppo_epochs": {"low": 1, "high": 6}}


def make_spec(strategy: Strategy = "early_cut", **changes: Any) -> StudySpec:
    content = {
        "name": "made", "task": "reviews", "strategy": strategy, "search": SEARCH, "sampler": {"name": "random"},
        **({} if {"trials", "budget"} & changes.keys() else {"budget": 20}),
    }  # fmt: skip
    return StudySpec.from_dict({**content, **changes}, "made")


CONFIG = make_spec().config({}).to_dict()  # 1,920 episodes in batches of 64: the rung is at 192


def screened(number: int, score: float | None, **changes: Any) -> TrialRow:
    rung = {"rung_episode": 192, "rung_score": score, "status": Status.PAUSED, "paused_by": PausedBy.STRATEGY}
    return trial_row(number, **{"config": CONFIG, "episodes": 192, **rung, **changes})


def finished(number: int, score: float | None = None, value: float = 9.0) -> TrialRow:
    rung = {} if score is None else {"rung_episode": 192, "rung_score": score, "is_promoted": True}
    return trial_row(number, config=CONFIG, episodes=1920, value=value, **rung)


def ranked(trials: Sequence[TrialRow]) -> list[int]:
    return [row.number for row in promotable(make_spec(), trials)]


def next_of(trials: Sequence[TrialRow], spec: StudySpec | None = None) -> int | str | None:
    """Return what runs next: a trial's number, "new", or None."""
    chosen = choose(spec or make_spec(), trials, ())
    return "new" if isinstance(chosen, New) else None if chosen is None else chosen.number


@pytest.mark.parametrize(
    ("batch", "whole", "rung"),
    [
        (64, 1920, 192),  # three iterations are 10% to the episode
        (128, 1920, 256),  # the first iteration's end after 192
        (32, 1920, 192),
        (512, 2048, 1024),  # never before two iterations
        (1024, 2048, None),  # which is the whole trial
    ],
)
def test_how_long_a_trial_is_and_where_its_rung_is(batch: int, whole: int, rung: int | None) -> None:
    assert lengths({"total_episodes": 1920, "batch_size": batch}) == (whole, rung)


def test_early_cut_finishes_the_best_when_one_in_six_is_due() -> None:
    scores = [0.1, 0.9, 0.3, 0.7, 0.2, 0.5]
    at_rung = [screened(number, score) for number, score in enumerate(scores)]
    assert next_of(at_rung[:5]) == "new"
    assert next_of(at_rung) == 1
    assert choose(make_spec(), at_rung, (1,)) == Promote(3), "a worker reads trial 1 on the test prompts"
    promoted = [
        replace(row, status=Status.RUNNING, is_promoted=True, paused_by=None) if row.number == 1 else row
        for row in at_rung
    ]
    assert isinstance(choose(make_spec(), promoted, (1,)), New), "one is on its way: the next one begins"
    assert choose(make_spec(), at_rung, ()) == Promote(1) and choose(make_spec(), promoted, ()) == Resume(1)
    done = [finished(1, 0.9) if row.number == 1 else row for row in at_rung]
    more = [*done, *(screened(number, 0.0) for number in range(6, 12))]
    assert next_of(more[:11]) == "new"
    assert next_of(more) == 3
    assert ranked(more)[:3] == [3, 5, 2]


def test_trials_rank_by_rung_score_then_by_value_so_far() -> None:
    slow, poor, good, unread = (0.4, 2.0), (1.0, 0.3), (1.0, 0.6), (None, 3.0)
    at_rung = [screened(n, score, value=value) for n, (score, value) in enumerate([slow, poor, good, unread])]
    assert ranked(at_rung) == [2, 1, 0, 3]
    assert ranked([*at_rung, screened(4, 1.0, value=0.6)])[:2] == [2, 4], "of equals the first"


def test_the_reference_is_paused_and_finished_like_all_others() -> None:
    at_rung = [screened(0, 0.2, origin=Origin.REFERENCE), *(screened(number, 0.1) for number in range(1, 6))]
    assert own_rung(make_spec(), at_rung[0]) == 192
    assert next_of(at_rung) == 0
    at_rung[3] = screened(3, 0.3)
    assert next_of(at_rung) == 3


def test_trials_that_people_asked_for_are_neither_screened_nor_counted() -> None:
    rows = [screened(number, 0.1 * number) for number in range(5)]
    asked = screened(5, 0.9, origin=Origin.ENQUEUED)
    assert next_of([*rows, asked]) == "new"
    report = StepReport(3, 192, {"objective/kl_exact": 1.0, "eval/reward": 1.0, "eval/kl": 1.0})
    stepped = Stepped(report, 1.0, 1.0, None)
    started = trial_row(0, config=CONFIG, status=Status.RUNNING)
    assert judge(make_spec(), started, stepped).action is NextMove.LEAVE
    for role in ({"origin": Origin.ENQUEUED}, {"role": Role.FORK}, {"is_promoted": True}):
        assert judge(make_spec(), replace(started, **role), stepped).action is NextMove.GO_ON
    bare = replace(stepped, report=StepReport(3, 192, {"objective/kl_exact": 1.0}))
    assert judge(make_spec(), started, bare).action is NextMove.EVALUATE
    assert judge(make_spec(), started, replace(bare, is_again=True)).action is NextMove.LEAVE


def test_how_many_promotions_the_budget_can_pay() -> None:
    spec = make_spec(budget=10)
    some = [finished(number, 0.5) for number in range(7)]
    rows = [*some, *(screened(number, 0.1 * number) for number in range(7, 19))]  # 8.2 spent, and 0.9 finishes one

    def payable(*done: int) -> int:
        return promotions(spec, [finished(n, 1.0) if n in done else rows[n] for n in range(19)])

    assert (payable(), payable(18), payable(17, 18)) == (2, 1, 0)
    assert promotions(spec, some) == 0, "none waits"
    assert promotions(make_spec(trials=20), rows[7:13]) == 3, "one in six of twenty"
    assert promotions(make_spec("full", trials=20), some) == 0


def test_the_last_fifth_of_a_budget_only_finishes_and_what_no_longer_fits_is_not_begun() -> None:
    spec = make_spec(budget=10)  # 8 to search, and 2 full trials' worth left: 2 finishes of 0.9
    some = [finished(number, 0.5) for number in range(7)]
    assert next_of([*some, *(screened(number, 0.1) for number in range(7, 18))], spec) == "new"  # 8.1 spent
    rows = [*some, *(screened(number, 0.1 * number) for number in range(7, 19))]  # 8.2 spent: what is left fits 2
    assert next_of(rows, spec) == 18
    rows[18] = finished(18, 1.8)
    assert next_of(rows, spec) == 17
    rows[17] = finished(17, 1.7)
    assert next_of(rows, spec) is None
    assert is_finished(spec, rows)
    assert next_of(rows, make_spec(budget=11)) == 16, "more budget goes on with what at_rung"


def test_a_number_of_trials_alone_finishes_one_in_six_of_them_and_one_at_least() -> None:
    rows = [screened(number, 0.1 * number) for number in range(4)]
    spec = make_spec(trials=4)
    assert next_of(rows, spec) == 3
    rows[3] = finished(3, 0.3)
    assert next_of(rows, spec) is None and is_finished(spec, rows)
    twelve = [finished(0, 0.9), *(screened(number, 0.1 * number) for number in range(1, 12))]
    assert next_of(twelve, make_spec(trials=12)) == 11
    twelve[1] = pruned(1, episodes=64)
    assert next_of(twelve, make_spec(trials=12)) == 11, "of all, not of those that came to the rung"
    twelve[11] = finished(11, 1.1)
    assert next_of(twelve, make_spec(trials=12)) is None


@pytest.mark.parametrize(("total", "rung", "whole"), [(1000, 128, 1024), (2000, 256, 2048)])
def test_what_rounds_a_trial_up_to_whole_batches_is_not_charged(total: int, rung: int, whole: int) -> None:
    fixed = {"total_episodes": total}
    first = screened(0, 0.5, config=CONFIG | fixed, episodes=rung, rung_episode=rung)
    assert lengths(first.config) == (whole, rung)
    assert next_of([first], make_spec(budget=1, fixed=fixed)) == 0, "one full trial is paid for"
    done = [replace(finished(number), config=first.config, episodes=whole) for number in range(10)]
    full = make_spec("full", budget=10, fixed=fixed)
    assert (next_of(done[:9], full), next_of(done, full)) == ("new", None)
    assert tally(done, full).text == "10 trials ended, 10.0 of 10 full trials spent"


def test_no_trial_starts_whose_rung_may_take_what_finishes_the_best() -> None:
    rows = [finished(0, 0.5), *(screened(number, 0.1 * number) for number in range(1, 11))]  # 1,920 are left of 3
    assert next_of(rows, make_spec(budget=3)) == "new", "it leaves the 1,728 that finish one"
    assert next_of(rows, make_spec(budget=3, search=WIDE)) == 10, "a batch of 128 has its rung at 256"
    unpaused = make_spec(budget=3, search={"batch_size": [64, 1024]})  # a batch of 1,024 has no rung
    assert next_of(rows[:2], unpaused) == "new", "3,648 are left: enough for a whole trial and to finish one"
    assert next_of(rows[:3], unpaused) == 2, "3,456 are not"


def test_nothing_is_held_back_where_no_trial_is_paused() -> None:
    fixed = {"total_episodes": 128}  # two batches
    done = [replace(finished(number), config=CONFIG | fixed, episodes=128) for number in range(10)]
    spec = make_spec(budget=10, fixed=fixed)
    assert (next_of(done[:9], spec), next_of(done, spec)) == ("new", None)


def test_a_trial_that_a_person_ended_at_its_rung_was_not_promoted() -> None:
    """It came to the rung, and is none of those that are finished."""
    rows = [screened(number, 0.1 * number) for number in range(6)]
    rows[5] = replace(rows[5], status=Status.STOPPED, paused_by=None)
    assert next_of(rows) == 4


# Simulated studies


class Simulated:
    """A study without an engine: its trials report all their iterations, several trials in turns."""

    def __init__(self, spec: StudySpec, workers: int) -> None:
        self.spec, self.workers = spec, workers
        self.rows: list[TrialRow] = []
        self.evaluations: dict[int, list[dict[str, Any]]] = {}
        self.busy: list[int] = []

    def run(self) -> None:
        for _ in range(20_000):
            while len(self.busy) < self.workers and (chosen := choose(self.spec, self.rows, self.busy)) is not None:
                self._begin(chosen)
            if not self.busy:
                return
            self._step(self.busy.pop(0))
        raise AssertionError("the study does not come to an end")

    def put(self, row: TrialRow) -> None:
        self.rows[row.number : row.number + 1] = [row]

    def _begin(self, chosen: Resume | Promote | New) -> None:
        if isinstance(chosen, New):
            new = new_trial(self.spec, self.rows, chosen, 1)
            begun = {"status": Status.RUNNING, "value": None, "kl": None, "episodes": 0, "ended_at": None}
            self.put(
                trial_row(new.number, origin=new.origin, config=dict(new.config), params=dict(new.params), **begun)
            )
            self.busy.append(new.number)
            return
        row = self.rows[chosen.number]
        assert chosen.number not in self.busy and not row.status.is_final
        assert row.is_at_rung == isinstance(chosen, Promote)
        promoted = row.is_promoted or row.is_at_rung
        self.put(replace(row, status=Status.RUNNING, paused_by=None, reason=None, is_promoted=promoted))
        self.busy.append(chosen.number)

    def _step(self, number: int) -> None:
        row, batch = self.rows[number], int(self.rows[number].config["batch_size"] or 0)
        step, episode = row.episodes // batch + 1, row.episodes + batch
        reward = 0.1 * (number % 7) + 0.01 * step
        metrics = {"eval/reward": reward, "eval/reward_se": 0.0, "eval/kl": 1.0, "eval/kl_se": 0.0}
        self.evaluations.setdefault(number, []).append({"step": step, "episode": episode, **metrics})
        report = StepReport(step, episode, {"objective/kl_exact": 1.0, **metrics})
        decision = judge(self.spec, row, Stepped(report, 1.0, 1.0, None))
        row = replace(row, episodes=episode, value=reward, kl=1.0, end_kl=1.0)
        if decision.action is NextMove.LEAVE:
            seen = self.evaluations[number]
            assert why_paused(self.spec, row, seen) == decision.reason, "one that a kill leaves here is paused, too"
            score = rung_score(seen, self.spec.kl_budget, self.spec.total_episodes)
            rung = {"rung_episode": episode, "rung_score": score}
            self.put(replace(row, status=Status.PAUSED, paused_by=PausedBy.STRATEGY, reason=decision.reason, **rung))
        elif episode >= lengths(row.config)[0]:
            self.put(replace(row, status=Status.COMPLETED))
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
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_study_comes_to_an_end_within_its_bounds(strategy: Strategy, bounds: dict[str, Any], workers: int) -> None:
    spec = make_spec(strategy, search=WIDE, sampler={"name": "tpe"}, **bounds)
    study = Simulated(spec, workers)
    assert not is_finished(spec, []), "a study without trials is not finished"
    study.run()
    assert is_finished(spec, study.rows)
    assert len(study.rows) <= bounds.get("trials", 1000)
    assert tally(study.rows, spec).spent <= bounds.get("budget", 1000)
    assert any(row.status is Status.COMPLETED for row in study.rows)
    best = min((row for row in study.rows if row.rung_episode is not None), key=screening_rank, default=None)
    assert workers > 1 or best is None or best.is_promoted, "the budget that finishes the best was left"
    assert {row.number for row in promotable(spec, study.rows)} <= {row.number for row in study.rows if row.is_at_rung}
    ended = study.rows[0]
    study.put(replace(ended, status=Status.PAUSED, paused_by=PausedBy.PERSON))
    assert choose(spec, study.rows, ()) is None, "what a person paused is theirs to resume"
    assert not is_finished(spec, study.rows)
    study.put(replace(ended, status=Status.WAITING))
    assert choose(spec, study.rows, ()) == Resume(0)
    study.put(ended)
    asked = replace(ended, number=len(study.rows), origin=Origin.ENQUEUED, status=Status.WAITING)
    study.put(asked)
    assert choose(spec, study.rows, ()) == Resume(asked.number), "what a person asked for is run beyond the bounds"
    assert own_rung(spec, asked) is None


def test_the_guard_comes_first_and_what_it_ends_is_evaluated_once_more() -> None:
    row = trial_row(0, config=CONFIG, status=Status.RUNNING)
    bare = {"objective/kl_exact": 90.0}
    reason = Reason("kl_hard", "KL 90 nats is far over the limit", "objective/kl_exact", 90.0, 60.0, 1, 3)
    first = judge(make_spec(), row, Stepped(StepReport(3, 192, bare), 1.0, 1.0, reason))
    assert first.action is NextMove.EVALUATE
    for metrics in ({**bare, "eval/reward": 1.0, "eval/kl": 90.0}, bare):
        ended = judge(make_spec(), row, Stepped(StepReport(3, 192, metrics), 1.0, 1.0, reason, is_again=True))
        assert (ended.action, ended.reason) == (NextMove.STOP, reason), "evaluated or not"


# Through the controller


def without_rung_evaluations(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [one[:4] for one in found if isinstance(one[1], int)]


def at_rung(folder: Path, row: TrialRow) -> float:
    """Return the best reward that a trial's evaluations had read when it came to its rung."""
    with opened(folder) as store:
        before = [one for one in evaluations_of(store, row) if one["episode"] <= 32]
    return trial_value(before, 10.0).value or 0.0


def cut_spec(**changes: Any) -> StudySpec:
    values = {"strategy": "early_cut", "trials": 12, "kl": {"budget": 10.0, "limit": 1000.0}}
    return quick_spec(**{**values, **changes})


def test_early_cut_finishes_one_in_six_as_if_they_had_never_rested(tmp_path: Path) -> None:
    finished, events = run(tmp_path, cut_spec(), workers=1)
    assert finished
    found = rows(tmp_path)
    ended, rest = [r for r in found if r.status is Status.COMPLETED], [r for r in found if r.is_at_rung]
    assert (len(ended), len(rest)) == (2, 10)
    for row in rest:
        assert (row.episodes, row.rung_episode, row.is_promoted) == (32, 32, False)
        assert row.reason is not None and row.reason.rule == "early_cut"
    kept = {
        row.number: [path.name for path in checkpoint.complete(tmp_path / "runs" / NAME / str(row.number))]
        for row in rest
    }
    first = [row.number for row in promotable(cut_spec(), found)[:3]]
    assert all(kept[number][-1:] == ["step-000002"] for number in first), "the best three can be promoted"
    assert [] in kept.values(), "of the others the front's alone are kept"
    assert [(row.is_promoted, row.rung_episode, row.attempts) for row in ended] == [(True, 32, 2)] * 2
    scores = {row.number: (row.rung_score or 0.0, at_rung(tmp_path, row)) for row in found}
    first = max(list(scores)[:6], key=scores.__getitem__)
    assert {row.number for row in ended} == {first, max(scores.keys() - {first}, key=scores.__getitem__)}
    (tmp_path / "full").mkdir()
    run(tmp_path / "full", cut_spec(strategy="full"), workers=1)
    whole, cut = curves(tmp_path / "full"), curves(tmp_path)
    for row in ended:
        assert without_rung_evaluations(cut[row.number]) == without_rung_evaluations(whole[row.number])
    again, events = run(tmp_path, cut_spec(), workers=1)
    assert again and not any(isinstance(event, TrialStarted) for event in events)


def test_a_budget_is_kept_and_more_of_it_goes_on_where_it_was(tmp_path: Path) -> None:
    spec = cut_spec(trials=None, budget=3)
    finished, _ = run(tmp_path, spec, workers=2)
    assert finished
    spent = sum(row.episodes for row in rows(tmp_path)) / 160
    assert 2 < spent <= 3
    finished, events = run(tmp_path, spec, workers=2, budget=4)
    assert finished and any(isinstance(event, TrialStarted) for event in events)
    more = sum(row.episodes for row in rows(tmp_path)) / 160
    assert spent < more <= 4


def test_a_trial_that_lost_its_checkpoints_starts_from_step_0_when_it_is_promoted_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.judge.scoring.MOST_ON_FRONT", 1)
    spec = cut_spec()
    assert run(tmp_path, spec, workers=1)[0]
    paused = [row.number for row in rows(tmp_path) if row.is_at_rung]
    here = [n for n in paused if checkpoint.complete(tmp_path / "runs" / NAME / str(n))]
    assert len(paused) > len(here) >= 2
    finished, events = run(tmp_path, spec, workers=1, budget=30)
    assert finished and all(row.status is Status.COMPLETED for row in rows(tmp_path))
    begun = {event.row.number: event.resumed_step for event in events if isinstance(event, TrialStarted)}
    assert begun.keys() == set(paused)
    lost = sorted(number for number, step in begun.items() if step is None)
    told = sorted(event.message for event in events if isinstance(event, StudyWarned))
    assert [text.partition(":")[0] for text in told] == sorted(f"trial {number} restarts" for number in lost) != []
    assert told[0] in trial_log.tail(tmp_path / "runs" / NAME / str(lost[0]), 1000)
    (tmp_path / "full").mkdir()
    run(tmp_path / "full", cut_spec(strategy="full"), workers=1)
    cut, whole = curves(tmp_path), curves(tmp_path / "full")
    assert all(without_rung_evaluations(cut[n]) == without_rung_evaluations(whole[n]) for n in cut)


def test_a_trial_is_evaluated_and_saved_before_it_crosses_the_kl_budget(tmp_path: Path) -> None:
    """KL rises by 4 nats a step: it is 8 at step 2, and would be over the budget of 10 at the next evaluation."""
    spec = quick_spec(
        trials=1, strategy="full", fixed={"learning_rate": 1e-3}, search={"cliprange": "advised"},
        kl={"budget": 10.0, "limit": 1000.0},
    )  # fmt: skip
    assert run(tmp_path, spec)[0]
    (row,) = rows(tmp_path)
    evaluated = [step for step, _, _, _, reward, _ in (one for one in curves(tmp_path)[0] if len(one) == 6) if reward]
    assert evaluated == [0, 1, 2, 3, 6, 9, 10], "1 and 2 are beside the regular ones"
    assert (row.value_step, row.kl, row.end_kl) == (2, 8.0, 40.0), "8 nats and a standard error of 0.25"
    assert row.value == pytest.approx(1 + 8**0.5)
    kept = [path.name for path in checkpoint.complete(tmp_path / "runs" / NAME / "0")]
    assert kept == ["step-000002", "step-000006", "step-000009", "step-000010"], "those between are on the front"


def test_a_trial_that_a_kill_left_at_its_rung_rests_there(tmp_path: Path) -> None:
    """The worker's last report was recorded, and its rest was not: as the undisturbed study, to the last value."""
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    run(undisturbed, cut_spec(trials=7), workers=1)
    run(tmp_path, cut_spec(trials=5), workers=1, timeout=None)
    (tmp_path / "again").mkdir()
    spec = cut_spec(trials=7)
    run(tmp_path / "again", spec, workers=1)
    with sqlite3.connect(tmp_path / "again" / "store.db") as store:
        kept = "UPDATE ppo_trials SET status = 'running', paused_by = NULL, reason = NULL, value = NULL, kl = NULL, "
        first = "(SELECT MIN(number) FROM ppo_trials WHERE status = 'paused')"
        changed = store.execute(
            f"{kept} rung_score = NULL, rung_episode = NULL, value_step = NULL WHERE number = {first}"
        )
        assert changed.rowcount == 1
        store.execute("UPDATE ppo_studies SET finished_at = NULL")
    finished, events = run(tmp_path / "again", spec, workers=1)
    assert finished and not any(isinstance(event, TrialStarted) for event in events)
    assert outcomes(tmp_path / "again") == outcomes(undisturbed)
    assert [r.rung_score for r in rows(tmp_path / "again")] == [r.rung_score for r in rows(undisturbed)]

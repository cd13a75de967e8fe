"""What each strategy runs next, on hand-made trials; and early_cut as the controller carries it out."""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.hyperparameters import PPOConfig
from ppo_core.report import StepReport
from tests.tuner.quick_study import NAME, curves, outcomes, quick_spec, rows, run, storage
from tests.tuner.trial_rows import trial_row
from tuner.events import StudyStopped, TrialStarted
from tuner.protocol import Stepped
from tuner.scheduler import Action
from tuner.scoring import TrialList, best_within, evaluations_of
from tuner.spec import StudySpec
from tuner.status import Origin, PausedBy, Role, Status
from tuner.store import NewTrial, Store, TrialRow
from tuner.strategies import MAKERS, EarlyCut, FullRuns, rung_episodes
from tuner.study_file import Strategy

SEARCH = {"learning_rate": {"low": 1e-5, "high": 1e-3, "scale": "log"}, "num_ppo_epochs": {"low": 1, "high": 6}}


def make_spec(strategy: Strategy = "early_cut", **changes: Any) -> StudySpec:
    content = {
        "name": "made", "task": "reviews", "strategy": strategy, "search": SEARCH, "sampler": {"name": "random"},
        **({} if {"trials", "budget"} & changes.keys() else {"budget": 20}),
    }  # fmt: skip
    return StudySpec.from_dict({**content, **changes}, "made")


CONFIG = make_spec().config({}).to_dict()  # 1,920 episodes in batches of 64: the rung is at 192


def resting(number: int, *scores: float | None, **changes: Any) -> TrialRow:
    episodes = (192, 576)[len(scores) - 1]
    values = {"status": Status.PAUSED, "paused_by": PausedBy.STRATEGY, "rung": len(scores) - 1, "rung_scores": scores}
    return trial_row(number, **{"config": CONFIG, "episodes": episodes, **values, **changes})


def finished(number: int, *scores: float, value: float = 9.0) -> TrialRow:
    return trial_row(number, config=CONFIG, episodes=1920, rung=len(scores), rung_scores=scores, value=value)


def scheduler(spec: StudySpec | None = None) -> FullRuns:
    spec = spec or make_spec()
    return MAKERS[spec.strategy](spec, 1)


def next_of(made: FullRuns, trials: Sequence[TrialRow]) -> int | str | None:
    """Return what runs next: a trial's number, "new", or None."""
    chosen = made.next(TrialList(list(trials)), ())
    return "new" if isinstance(chosen, NewTrial) else chosen


@pytest.mark.parametrize(
    ("batch", "share", "episodes"),
    [
        (64, 0.1, 192),  # three iterations are 10% to the episode
        (128, 0.1, 256),  # the first iteration's end after 192
        (32, 0.1, 192),
        (512, 0.1, 1024),  # never before two iterations
        (1024, 0.1, None),  # which is the whole trial
        (64, 0.3, 576),
        (128, 0.3, 640),
    ],
)
def test_where_a_rung_is(batch: int, share: float, episodes: int | None) -> None:
    assert rung_episodes(PPOConfig.from_dict({"total_episodes": 1920, "batch_size": batch}), share) == episodes


def test_early_cut_finishes_the_best_when_one_in_six_is_due() -> None:
    scores = [0.1, 0.9, 0.3, 0.7, 0.2, 0.5]
    at_rung = [resting(number, score) for number, score in enumerate(scores)]
    assert next_of(scheduler(), at_rung[:5]) == "new"
    assert next_of(scheduler(), at_rung) == 1
    promoted = [
        replace(row, status=Status.RUNNING, rung=1, paused_by=None) if row.number == 1 else row for row in at_rung
    ]
    assert scheduler().next(TrialList(promoted), (1,)) not in range(6), "one is on its way: the next one begins"
    done = [finished(1, 0.9) if row.number == 1 else row for row in at_rung]
    more = [*done, *(resting(number, 0.0) for number in range(6, 12))]
    assert next_of(scheduler(), more[:11]) == "new"
    assert next_of(scheduler(), more) == 3
    assert scheduler().promotable(TrialList(more))[:3] == [3, 5, 2]


def test_of_equal_scores_the_cheaper_trial_is_finished() -> None:
    rows = [resting(number, 0.5, config={**CONFIG, "num_ppo_epochs": 6 - number}) for number in range(6)]
    assert next_of(scheduler(), rows) == 5
    unread = [resting(number, None if number == 5 else 0.1, config=row.config) for number, row in enumerate(rows)]
    assert next_of(scheduler(), unread) == 4, "where nothing could be read a trial is the last"


def test_scores_above_what_finished_trials_usually_come_to_rank_by_the_value_so_far() -> None:
    """The slow trial's look ahead is far beyond what any came to; the quick one has more to show."""
    slow, quick, poor = (1.6, 0.3), (0.8, 0.6), (0.4, 0.65)
    rests = [resting(n, score, value=value) for n, (score, value) in enumerate([slow, quick, poor])]
    ends = [finished(n, value=value) for n, value in enumerate((0.2, 0.7, 0.75), start=3)]
    order = scheduler().promotable
    assert order(TrialList(rests)) == [0, 1, 2], "nothing has ended yet"
    assert order(TrialList([*rests, *ends])) == [1, 0, 2]
    failed = replace(ends[0], status=Status.FAILED)
    assert order(TrialList([*rests, failed])) == [0, 1, 2]


def test_trials_that_people_asked_for_neither_rest_nor_count() -> None:
    rows = [resting(number, 0.1 * number) for number in range(5)]
    asked = resting(5, 0.9, origin=Origin.ENQUEUED)
    assert next_of(scheduler(), [*rows, asked]) == "new"
    report = StepReport(3, 192, {"objective/kl_exact": 1.0, "eval/reward": 1.0, "eval/kl": 1.0})
    stepped = Stepped(report, 1.0, 1.0, None)
    started = trial_row(0, config=CONFIG, status=Status.RUNNING)
    assert scheduler().decide(started, stepped).action is Action.PAUSE
    for role in ({"origin": Origin.ENQUEUED}, {"role": Role.FORK}, {"rung": 1}):
        assert scheduler().decide(replace(started, **role), stepped).action is Action.GO_ON
    bare = replace(stepped, report=StepReport(3, 192, {"objective/kl_exact": 1.0}))
    assert scheduler().decide(started, bare).action is Action.EVALUATE
    assert scheduler().decide(started, replace(bare, is_again=True)).action is Action.PAUSE


def test_how_many_promotions_the_budget_can_pay() -> None:
    spec = make_spec(budget=10)
    some = [finished(number, 0.5) for number in range(7)]
    rows = [*some, *(resting(number, 0.1 * number) for number in range(7, 19))]  # 8.2 spent, and 0.9 finishes one

    def payable(*done: int) -> int:
        return scheduler(spec).promotions(TrialList([finished(n, 1.0) if n in done else rows[n] for n in range(19)]))

    assert (payable(), payable(18), payable(17, 18)) == (2, 1, 0)
    assert scheduler(spec).promotions(TrialList(some)) == 0, "none waits"
    without = scheduler(make_spec(trials=20))
    assert without.promotions(TrialList(rows[7:13])) == 3, "one in six of twenty"
    assert scheduler(make_spec("full", trials=20)).promotions(TrialList(some)) == 0


def test_the_last_fifth_of_a_budget_only_finishes_and_what_no_longer_fits_is_not_begun() -> None:
    spec = make_spec(budget=10)  # 8 to search, and 2 full trials' worth left: 2 finishes of 0.9
    some = [finished(number, 0.5) for number in range(7)]
    assert next_of(scheduler(spec), [*some, *(resting(number, 0.1) for number in range(7, 18))]) == "new"  # 8.1 spent
    rows = [*some, *(resting(number, 0.1 * number) for number in range(7, 19))]  # 8.2 spent: what is left fits 2
    assert next_of(scheduler(spec), rows) == 18
    rows[18] = finished(18, 1.8)
    assert next_of(scheduler(spec), rows) == 17
    rows[17] = finished(17, 1.7)
    assert next_of(scheduler(spec), rows) is None
    assert scheduler(spec).is_finished(TrialList(rows))
    assert next_of(scheduler(make_spec(budget=11)), rows) == 16, "more budget goes on with what rests"


def test_a_number_of_trials_alone_finishes_one_in_six_of_them_and_one_at_least() -> None:
    rows = [resting(number, 0.1 * number) for number in range(4)]
    spec = make_spec(trials=4)
    assert next_of(scheduler(spec), rows) == 3
    rows[3] = finished(3, 0.3)
    assert next_of(scheduler(spec), rows) is None and scheduler(spec).is_finished(TrialList(rows))
    twelve = [finished(0, 0.9), *(resting(number, 0.1 * number) for number in range(1, 12))]
    assert next_of(scheduler(make_spec(trials=12)), twelve) == 11
    twelve[11] = finished(11, 1.1)
    assert next_of(scheduler(make_spec(trials=12)), twelve) is None


def test_full_starts_only_what_its_budget_has_room_for() -> None:
    made = scheduler(make_spec("full", budget=2.5))
    assert next_of(made, [finished(0)]) == "new"
    assert next_of(made, [finished(0), finished(1)]) is None
    assert made.is_finished(TrialList([finished(0), finished(1)]))
    assert not made.is_finished(TrialList([finished(0)]))


# Through the controller


def without_rung_evaluations(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [one[:4] for one in found if isinstance(one[1], int)]


def at_rung(folder: Path, row: TrialRow) -> float:
    """Return the best reward that a trial's evaluations had read when it came to its rung."""
    store = Store.open(storage(folder))
    before = [one for one in evaluations_of(store, row) if one["episode"] <= 32]
    store.close()
    return best_within(before, 10.0).value or 0.0


def cut_spec(**changes: Any) -> StudySpec:
    values = {"strategy": "early_cut", "trials": 12, "kl": {"budget": 10.0, "limit": 1000.0}}
    return quick_spec(**{**values, **changes})


def test_early_cut_finishes_the_reference_and_one_in_six_as_if_they_had_never_rested(tmp_path: Path) -> None:
    finished, events = run(tmp_path, cut_spec(), workers=1)
    assert finished
    found = rows(tmp_path)
    ended, rest = [r for r in found if r.status is Status.COMPLETED], [r for r in found if r.is_resting]
    assert (len(ended), len(rest)) == (2, 10)
    for row in rest:
        assert (row.episodes, row.rung, len(row.rung_scores)) == (32, 0, 1)
        assert row.reason is not None and row.reason.rule == "early_cut"
    kept = {
        row.number: [path.name for path in checkpoint.complete(tmp_path / "runs" / NAME / str(row.number))]
        for row in rest
    }
    ranked = scheduler(cut_spec()).promotable(TrialList(found))
    assert all(kept[number][-1:] == ["step-000002"] for number in ranked[:3]), "the best three can be promoted"
    assert [] in kept.values(), "of the others the front's alone are kept"
    assert [(row.rung, len(row.rung_scores), row.attempts) for row in ended] == [(0, 0, 1), (1, 1, 2)]
    usual = found[0].value
    scores = {row.number: (min(row.rung_score or 0.0, usual), at_rung(tmp_path, row)) for row in found[1:7]}
    assert [row.number for row in ended] == [0, max(scores, key=scores.__getitem__)], "the reference runs whole"
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
        changed = store.execute(f"{kept} rung_scores = NULL, value_step = NULL WHERE number = {first}")
        assert changed.rowcount == 1
        store.execute("UPDATE ppo_studies SET finished_at = NULL")
    finished, events = run(tmp_path / "again", spec, workers=1)
    assert finished and not any(isinstance(event, TrialStarted) for event in events)
    assert outcomes(tmp_path / "again") == outcomes(undisturbed)
    assert [r.rung_scores for r in rows(tmp_path / "again")] == [r.rung_scores for r in rows(undisturbed)]


def test_a_study_keeps_its_strategy(tmp_path: Path) -> None:
    run(tmp_path, cut_spec(trials=2), workers=1)
    stored = Store.open(storage(tmp_path))
    spec = StudySpec.from_dict(stored.study(NAME).spec, "stored")
    stored.close()
    (line,) = cut_spec(strategy="full").changes_to(spec).refused
    assert "give the study another name" in line


def test_a_trial_that_a_person_resumes_past_its_rung_runs_to_its_end() -> None:
    row = replace(resting(0, 0.5), status=Status.WAITING, paused_by=None, rung=1)
    stepped = Stepped(StepReport(4, 256, {"objective/kl_exact": 1.0}), 1.0, 1.0, None)
    assert EarlyCut(make_spec(), 1).decide(row, stepped).action is Action.GO_ON


def test_what_stopped_says_how_far_the_study_is(tmp_path: Path) -> None:
    _, events = run(tmp_path, cut_spec(trials=None, budget=3), timeout=1e-9)
    assert isinstance(events[-1], StudyStopped)
    assert events[-1].extent.text == "0 trials ended, 0.0 of a budget of 3 spent"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": "early"}, '"early_cut"'),
        ({"budget": 0.5}, "at least 1"),
        ({"budget": -1}, "budget = -1"),
        ({"trials": 0}, "trials = 0"),
        ({"trial": [{"lam": 0.9}], "strategy": "early_cut", "search": None, "sampler": None}, "needs a [search]"),
    ],
)
def test_what_is_not_allowed_is_one_line(changes: dict[str, Any], said: str) -> None:
    content = {"name": "made", "task": "reviews", "budget": 4, "search": SEARCH} | changes
    if changes.get("trial"):
        content.pop("budget")
    with pytest.raises(Exception, match="made: ") as raised:
        StudySpec.from_dict({key: value for key, value in content.items() if value is not None}, "made")
    assert said in str(raised.value) and "\n" not in str(raised.value)

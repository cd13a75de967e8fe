"""A scheduler that pauses and promotes, as the controller carries it out; and audits, in which rules are only noted."""

import json
from functools import partial
from pathlib import Path

import pytest

from ppo_core import checkpoint
from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, curves, quick_spec, rows, run, storage
from tests.tuner.test_conformance import HalfWay
from tuner.checkpoints import NO_ROOM, CheckpointPolicy
from tuner.events import StudyWarned, TrialSetAside, TrialStarted
from tuner.scheduler import is_audited
from tuner.status import PausedBy, Role, Status, Verdict
from tuner.store import Store

half_way = partial(run, workers=1, make_scheduler=HalfWay)


def verdicts(folder: Path) -> dict[int, list[Verdict]]:
    store = Store.open(storage(folder))
    try:
        numbers = {row.id: row.number for row in store.trials(store.study(NAME))}
        return {numbers[trial]: found for trial, found in store.verdicts(numbers).items()}
    finally:
        store.close()


def test_a_strategy_pauses_trials_and_promotes_the_better_ones_from_their_checkpoints(tmp_path: Path) -> None:
    spec = quick_spec(trials=4, kl={"budget": 10.0, "limit": 1000.0})
    finished, events = half_way(tmp_path, spec)
    assert finished
    found = rows(tmp_path)
    completed = [row for row in found if row.status is Status.COMPLETED]
    resting = [row for row in found if row.is_resting]
    assert len(completed) == len(resting) == 2
    rung = {row.number: next(one[4] for one in curves(tmp_path)[row.number] if one[0] == 3) for row in found}
    assert min(rung[row.number] for row in completed) > max(rung[row.number] for row in resting)
    for row in resting:
        assert row.reason is not None and (row.reason.rule, row.paused_by) == ("half_way", PausedBy.STRATEGY)
        assert checkpoint.complete(tmp_path / "runs" / NAME / str(row.number))[-1].name == "step-000003"
    for row in completed:
        assert row.reason is None and row.paused_by is None and row.attempts == 2
    promoted = [event.resumed_step for event in events if isinstance(event, TrialStarted) and event.resumed_step]
    assert promoted == [3, 3]
    assert sum(isinstance(event, TrialSetAside) for event in events) == 4
    assert {number: [one.reason.rule for one in said] for number, said in verdicts(tmp_path).items()} == {
        row.number: ["half_way"] for row in found
    }
    (tmp_path / "full").mkdir()
    run(tmp_path / "full", spec, workers=1)
    whole = curves(tmp_path / "full")
    assert all(curves(tmp_path)[row.number] == whole[row.number] for row in completed)
    finished, events = half_way(tmp_path, spec)
    assert finished and not any(isinstance(event, TrialStarted) for event in events)


def test_where_the_quota_has_no_room_the_lowest_ranked_are_pruned_before_their_checkpoints_go(tmp_path: Path) -> None:
    spec = quick_spec(trials=4, kl={"budget": 10.0, "limit": 1000.0})
    finished, events = half_way(tmp_path, spec, policy=CheckpointPolicy(None, 1))
    assert finished
    found = rows(tmp_path)
    pruned = [row for row in found if row.status is Status.PRUNED]
    assert len(pruned) == 2 and {row.reason.rule for row in pruned if row.reason} == {NO_ROOM}
    assert all(row.value is not None and row.paused_by is None for row in pruned)
    assert not any(checkpoint.complete(tmp_path / "runs" / NAME / str(row.number)) for row in pruned)
    assert any(isinstance(event, StudyWarned) and "over the quota" in event.message for event in events)


@pytest.mark.parametrize(("audit", "status"), [(0.0, Status.PRUNED), (1.0, Status.COMPLETED)])
def test_an_audited_trial_runs_on_and_what_the_guard_said_is_noted(
    tmp_path: Path, audit: float, status: Status, ppo_tuner: Invoke
) -> None:
    finished, _ = run(tmp_path, quick_spec(audit=audit))
    assert finished
    ends = {row.number: row.status for row in rows(tmp_path)}
    assert ends.pop(5) is status and set(ends.values()) == {Status.COMPLETED}
    (verdict,) = verdicts(tmp_path)[5]
    assert (verdict.reason.rule, verdict.is_enforced) == ("kl_limit", audit == 0)
    assert {(row.role, row.seed, row.is_audited) for row in rows(tmp_path)} == {(Role.SEARCH, 5, audit > 0)}
    steps = [step for step, *_ in curves(tmp_path)[5] if isinstance(step, int)]
    assert (steps[-1] == 10) is (audit > 0)
    shown = ppo_tuner("show", NAME, "5", "--storage", storage(tmp_path))[1]
    assert ("Rule kl_limit would have ended this trial at step" in " ".join(shown.split())) is (audit > 0)
    detail = json.loads(ppo_tuner("show", NAME, "5", "--storage", storage(tmp_path), "--json")[1])
    assert [(one["step"], one["is_enforced"]) for one in detail["verdicts"]] == [(verdict.step, audit == 0)]


def test_a_share_of_the_trials_is_audited_and_always_the_same() -> None:
    spec = quick_spec(audit=0.3)
    drawn = [is_audited(spec, number) for number in range(1000)]
    assert drawn == [is_audited(spec, number) for number in range(1000)]
    assert 250 < sum(drawn) < 350
    assert not any(is_audited(quick_spec(), number) for number in range(1000))


def test_a_trial_is_evaluated_and_saved_before_it_crosses_the_kl_budget(tmp_path: Path) -> None:
    """KL rises by 4 nats a step: it is 8 at step 2, and would be over the budget of 10 at the next evaluation."""
    spec = quick_spec(
        trials=1, strategy="full", fixed={"learning_rate": 1e-3}, search={"cliprange": "advised"}, objective="best",
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
    (tmp_path / "end").mkdir()
    run(tmp_path / "end", quick_spec(trials=1, fixed={"learning_rate": 1e-3}, search={"cliprange": "advised"}))
    found = [one[0] for one in curves(tmp_path / "end")[0] if len(one) == 6 and one[4]]
    assert 2 not in found, "under the objective `end` no checkpoint before the end counts"

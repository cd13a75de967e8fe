"""What audited trials tell: which verdicts were wrong, how sure that is, and how early readings foretold the end."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.tuner.invoke import Invoke
from tests.tuner.quick_study import NAME, quick_spec, run, storage
from tests.tuner.trial_rows import make_spec, pruned, trial_row
from tuner.audit import Audited, Count, Course, audited, correlations, counts, courses, saved, upper_bound
from tuner.results import StudyView
from tuner.status import PausedBy, Reason, Status, Verdict
from tuner.store import Store, StudyRow, TrialRow

SPEC = make_spec(strategy="early_cut", budget=8)
STUDY = StudyRow(1, "mine", {}, 1.5, None, None, None, None, None)


class Noted:
    """Stands for a store: evaluations (step, reward, KL) and verdicts (step, rule, enforced), by trial id."""

    def __init__(self, evaluations: Mapping[int, Any], verdicts: Mapping[int, Sequence[tuple[int, str, bool]]]) -> None:
        self.evaluations, self.said = evaluations, verdicts

    def steps(self, ids: Sequence[int], names: Collection[str], *, evaluations_only: bool) -> list[dict[str, Any]]:
        return [
            {"trial_id": ids[0], "step": step, "episode": 64 * step, "eval/reward": reward, "eval/reward_se": 0.0,
             "eval/kl": kl, "eval/kl_se": 0.0}
            for step, reward, kl in self.evaluations[ids[0]]
        ]  # fmt: skip

    def verdicts(self, ids: Collection[int]) -> dict[int, list[Verdict]]:
        return {
            trial: [Verdict(step, Reason(rule, rule), is_enforced) for step, rule, is_enforced in said]
            for trial, said in self.said.items()
            if trial in ids
        }


def store(evaluations: Mapping[int, Any], verdicts: Mapping[int, Any] | None = None) -> Store:
    return cast(Store, Noted(evaluations, verdicts or {}))


def view(*rows: TrialRow) -> StudyView:
    return StudyView(STUDY, SPEC, rows)


def row(number: int, value: float, **changes: Any) -> TrialRow:
    return trial_row(number, value=value, **({"value_step": 9, "is_audited": True} | changes))


RECOVERS = [(0, 0.1, 0.0), (3, 1.0, 4.0), (6, 2.0, 20.0), (9, 2.5, 9.0)]
"""It is over the limit at step 6, and comes back within the budget with its best."""


def test_a_verdict_is_wrong_where_the_trial_beats_later_what_the_answer_would_have_been() -> None:
    said = {100: [(6, "kl_limit", False), (8, "kl_limit", False)]}
    for other, wrong in ((2.4, True), (2.6, False)):
        trials = view(row(0, 2.5), row(1, other, is_audited=False))
        (found,) = audited(store({100: RECOVERS}, said), trials)
        assert (found.trial, found.rule, found.step, found.later, found.answer) == (0, "kl_limit", 6, 2.5, other)
        assert found.was_wrong is wrong
    alone = audited(store({100: RECOVERS}, said), view(row(0, 2.5)))
    assert (alone[0].answer, alone[0].was_wrong) == (1.0, True), "against what it had by then itself"


def test_what_came_before_the_verdict_and_what_is_over_the_budget_make_no_verdict_wrong() -> None:
    early = [(0, 0.1, 0.0), (3, 2.5, 4.0), (6, 3.0, 20.0), (9, 4.0, 30.0)]
    (found,) = audited(store({100: early}, {100: [(6, "kl_limit", False)]}), view(row(0, 2.5, value_step=3)))
    assert (found.later, found.answer, found.was_wrong) == (2.5, 2.5, False)
    enforced = {100: [(6, "nonfinite", True)]}
    assert audited(store({100: RECOVERS}, enforced), view(row(0, 2.5))) == [], "not one that ended it"
    running = view(row(0, 2.5, status=Status.RUNNING))
    assert audited(store({100: RECOVERS}, {100: [(6, "kl_limit", False)]}), running) == []


def test_the_strategys_word_counts_only_where_it_would_have_stood_by_it() -> None:
    """The trial's rung score is 0.1 + 0.9 sqrt(10 / 4) = 1.52."""
    said = {100: [(3, "early_cut", False)]}
    for promoted, verdicts in ((1.6, 1), (1.5, 0)):
        other = row(1, 1.8, is_audited=False, rung=1, rung_scores=(promoted,))
        found = audited(store({100: RECOVERS}, said), view(row(0, 2.5), other))
        assert len(found) == verdicts
        assert all(one.by == "strategy" and one.was_wrong for one in found)


def test_counts_are_by_rule_and_apart_for_guard_and_strategy() -> None:
    def one(rule: str, later: float) -> Audited:
        return Audited("mine", 0, rule, 6, later, 1.0)

    found = counts([one("kl_limit", 2.0), one("kl_limit", 0.5), one("nothing_learned", 0.5), one("early_cut", 2.0)])
    assert found == [
        Count("kl_limit", 2, 1), Count("nothing_learned", 1, 0), Count("the guard", 3, 1), Count("the strategy", 1, 1)
    ]  # fmt: skip
    assert counts([]) == []


def test_few_verdicts_allow_a_large_share() -> None:
    """0 of n: 1 - 0.05^(1/n). 1 of 20: 0.2161 (Clopper and Pearson's tables)."""
    assert upper_bound(0, 10) == pytest.approx(1 - 0.05 ** (1 / 10)) == pytest.approx(0.2589, abs=1e-4)
    assert upper_bound(1, 20) == pytest.approx(0.2161, abs=1e-4)
    assert upper_bound(3, 3) == 1.0


def test_early_readings_are_correlated_with_the_final_value_over_audited_whole_runs() -> None:
    """At the rung (step 3), at half way (step 15) and at the end (step 30) of 1,920 episodes."""

    def course(rung: float, half: float, end: float) -> list[tuple[int, float, float]]:
        return [(0, 0.0, 0.0), (3, rung, 1.0), (15, half, 1.0), (30, end, 1.0)]

    evaluations = {100: course(1, 3, 5), 101: course(2, 2, 6), 102: course(3, 4, 7), 103: course(9, 9, 9)}
    ended = [row(number, 5.0) for number in range(3)]
    found = courses(store(evaluations), view(*ended, row(3, 9.0, is_audited=False)))
    assert [one.end for one in found] == [5, 6, 7]
    assert [one.half for one in found] == [3, 2, 4]
    assert correlations(found) == {"rung": (3, pytest.approx(1.0)), "half": (3, pytest.approx(0.5))}
    assert correlations(found[:2])["rung"] == (2, None)
    assert correlations([Course(None, 1.0, 2.0)])["rung"] == (0, None)


def test_what_was_spared_is_at_each_trials_own_pace() -> None:
    rows = [
        pruned(0, episodes=480, seconds=10.0, config={"total_episodes": 1920}),
        trial_row(1, status=Status.PAUSED, paused_by=PausedBy.STRATEGY, episodes=192, seconds=2.0,
                  config={"total_episodes": 1920}),
        trial_row(2, episodes=1920, seconds=20.0, config={"total_episodes": 1920}),
    ]  # fmt: skip
    assert saved(rows) == {"kl_limit": 30.0, "strategy": 18.0}


def test_the_command_pools_studies_and_says_where_there_is_nothing(ppo_tuner: Invoke, own_folder: Path) -> None:
    run(own_folder, quick_spec("tested", objective="best", audit=1.0, trials=6))
    where = ["--storage", storage(own_folder)]
    status, out, _ = ppo_tuner("audit", *where)
    assert status == 0
    assert "Verdicts on 6 audited trials" in out and "kl_limit" in out and "the guard" in out
    data = json.loads(ppo_tuner("audit", NAME, "--json", *where)[1])
    assert data["studies"] == [NAME] and data["trials"] == 6
    assert {one["rule"] for one in data["verdicts"]} == {"kl_limit"}
    assert [one["at_most"] for one in data["counts"] if one["verdicts"] == 1] == [pytest.approx(0.95)] * 2
    run(own_folder, quick_spec("tested", name="plain", trials=1))
    status, out, err = ppo_tuner("audit", "plain", *where)
    assert (status, err) == (0, "") and len(out.splitlines()) == 1
    assert out.startswith('No audited trial of "plain" has ended. ') and "then run: ppo-tuner run FILE.toml" in out
    status, _, err = ppo_tuner("audit", "plan", *where)
    assert status == 1 and '"plain"?' in err

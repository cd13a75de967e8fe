"""What is kept up as trials change is what going through all of them gives, on random histories of studies."""

import math
import random
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

import pytest
from optuna.trial import TrialState

from tests.tuner import from_scratch
from tests.tuner.trial_rows import trial_row
from tuner.scoring import Told, TrialList, extent, frozen
from tuner.search import memory
from tuner.search.matching import Match, label
from tuner.search.sampler import Projection
from tuner.spec import StudySpec
from tuner.standings import Ranking
from tuner.status import Origin, PausedBy, Reason, Role, Status
from tuner.store import NewTrial, TrialRow
from tuner.strategies import MAKERS, FullRuns
from tuner.study_file import Strategy

SEARCH = {
    "learning_rate": {"low": 1e-5, "high": 1e-3, "scale": "log"},
    "kl_coef": {"low": 0.01, "high": 0.5, "scale": "log"},
    "num_ppo_epochs": {"low": 1, "high": 4},
}

ALMOST = math.nextafter(0.6, 0)
"""With 4.4 added it is what 0.6 with 4.4 added is."""


def make_spec(strategy: Strategy, **changes: Any) -> StudySpec:
    content = {"name": "made", "task": "reviews", "strategy": strategy, "search": SEARCH, **changes}
    return StudySpec.from_dict(content, "made")


class History:
    """A study whose trials change at random, as a controller and people may change them; few values, so many ties."""

    def __init__(self, spec: StudySpec, seed: int) -> None:
        self.spec, self.trials, self._chance = spec, TrialList(), random.Random(seed)

    def go_on(self, events: int) -> Iterator[TrialList]:
        for _ in range(events):
            going = [row for row in self.trials if not row.status.is_final]
            row = self._chance.choice(going) if going and self._chance.random() < 0.8 else None
            self.trials.put(self._new() if row is None else self._changed(row))
            yield self.trials

    def _new(self) -> TrialRow:
        pick, number = self._chance.choice, len(self.trials)
        params = {"learning_rate": pick((1e-4, 3e-4)), "kl_coef": pick((0.03, 0.1)), "num_ppo_epochs": pick((1, 2))}
        origin, role = pick([Origin.SAMPLED] * 7 + [Origin.MATCHED, Origin.ENQUEUED, Origin.LISTED]), Role.SEARCH
        if number == 0:
            origin = Origin.REFERENCE
        if self._chance.random() < 0.1:
            role = pick((Role.FORK, Role.CONFIRM))
        config = self.spec.config(params).to_dict() | ({"kl_target": 6.0} if self._chance.random() < 0.2 else {})
        return trial_row(number, status=Status.RUNNING, origin=origin, role=role, params=params, config=config,
                         value=None, kl=None, ended_at=None, episodes=0)  # fmt: skip

    def _changed(self, row: TrialRow) -> TrialRow:
        pick = self._chance.choice
        if row.status is Status.WAITING:
            return replace(row, status=Status.RUNNING)
        if row.status is Status.PAUSED:
            rung = row.rung + row.is_resting
            return replace(row, status=Status.WAITING, paused_by=None, rung=rung)
        score = pick((None, 0.1, 0.2, 0.3, 0.4, 5.0))
        read = {"value": score, "kl": pick((3.0, 9.0)), "value_step": 2, "violation": -0.1}
        how = pick(("rest", "rest", "rest", "end", "end", "prune", "fail", "pause", "stay"))
        if how == "rest" and row.counts and self.spec.pauses_trials and not row.rung:
            episodes = from_scratch.next_stop(row, self.spec)
            scores = (pick((None, 0.2, 0.3, 0.4, ALMOST, 0.6, 0.7)),)
            rests = {"status": Status.PAUSED, "paused_by": PausedBy.STRATEGY, "rung_scores": scores}
            return replace(row, **rests, **read, episodes=episodes)
        if how == "pause":
            return replace(row, status=Status.PAUSED, paused_by=PausedBy.PERSON, **read)
        ended_at = float(pick((10, 20, 30)) + len(self.trials))
        if how == "end":
            end_kl = pick((None, 2.0, 5.0, 7.8, 9.0, 12.0, 40.0))
            ends = {"status": Status.COMPLETED, "end_kl": end_kl, "ended_at": ended_at}
            return replace(row, **ends, **read, episodes=from_scratch.whole(replace(row, episodes=0)))
        if how == "prune":
            reason = Reason(pick(("kl_limit", "nonfinite")), "made up")
            return replace(row, status=Status.PRUNED, reason=reason, ended_at=ended_at, **read, episodes=320)
        return replace(row, status=Status.FAILED, ended_at=ended_at) if how == "fail" else replace(row, seconds=99.0)


def scheduler(spec: StudySpec) -> FullRuns:
    """The strategy, but that a new trial is not proposed."""

    class Unproposed(MAKERS[spec.strategy]):  # type: ignore[misc]
        def _new(self, trials: TrialList) -> NewTrial:
            return NewTrial(len(trials), Origin.SAMPLED, {}, {}, 1)

    made: FullRuns = Unproposed(spec, 1)
    return made


def chosen(made: FullRuns, trials: TrialList, busy: Container[int]) -> int | str | Match | None:
    found = made.next(trials, busy)
    if not isinstance(found, NewTrial):
        return found
    if found.origin is Origin.SAMPLED:
        return "new"
    number = next(row.number for row in trials if label(row.number) == found.label)
    return Match(number, found.params)


BOUNDS: list[dict[str, Any]] = [{"budget": 8}, {"budget": 40}, {"trials": 12}, {"trials": 60, "budget": 20}]


@pytest.mark.parametrize("strategy", MAKERS)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_a_strategy_chooses_what_going_through_all_trials_gives(strategy: Strategy, bounds: dict[str, Any]) -> None:
    spec = make_spec(strategy, **bounds)
    seen = set[str]()
    for seed in range(3):
        history, made = History(spec, seed), scheduler(spec)
        for trials in history.go_on(100):
            rows = trials.rows
            busy = [row.number for row in rows if row.status is Status.RUNNING]
            wanted = from_scratch.choice(rows, spec, busy)
            assert chosen(made, trials, busy) == wanted
            assert chosen(scheduler(spec), TrialList(rows), busy) == wanted
            assert made._match(trials) == from_scratch.match(rows, spec)
            assert made._promoted(trials) == from_scratch.promoted(rows, spec)
            for row in from_scratch.waiting(rows, spec)[:3]:
                assert made._matching.from_the_start(trials, row) == from_scratch.from_the_start(rows, row, spec)
            assert made.is_finished(trials) == from_scratch.is_finished(rows, spec)
            assert made.promotable(trials) == from_scratch.promotable(rows, spec)
            seen.add(type(wanted).__name__)
    assert seen >= {"int", "str" if strategy == "full" else "Match"}, "each kind of choice came up"


def test_a_ranking_ranks_as_sorting_does_whatever_scores_count_at_most() -> None:
    chance, ranking = random.Random(0), Ranking()
    rows = dict[int, tuple[TrialRow, float | None]]()
    for number in range(400):
        if rows and chance.random() < 0.4:
            gone = chance.choice(list(rows))
            ranking.remove(gone)
            del rows[gone]
        config = {"num_ppo_epochs": chance.choice((1, 2))}
        row = trial_row(number, value=chance.choice((None, 1.0, 2.0)), config=config)
        rows[number] = row, chance.choice((None, 0.1, 0.2, 0.3, 0.4))
        ranking.add(*rows[number])
        most = chance.choice((0.05, 0.1, 0.2, 0.25, 0.3, 0.9, math.inf))

        def order(number: int, most: float = most) -> tuple[float, float, int, int]:
            return from_scratch.order(*rows[number], most)

        ranked = sorted(rows, key=order)
        assert list(ranking.best_first(most)) == ranked and len(ranking) == len(ranked)


def test_of_predictions_that_come_to_the_same_the_earlier_trial_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_READ", 2)
    monkeypatch.setattr(memory, "BEST_READ", 1)
    trials = memory.InMemoryTrials()
    for number, score in enumerate((ALMOST, 0.6, 0.1)):
        trials.put(number, frozen(Told(TrialState.COMPLETE, score), ({}, {})), rung=0)
    assert [trial.number for trial in trials.get_all_trials(0)] == [1, 2]
    trials.set_gain(0, 4.4)
    assert [(trial.number, trial.value) for trial in trials.get_all_trials(0)] == [(0, 5.0), (2, 4.5)]


def test_what_the_controller_asks_of_all_trials_is_what_going_through_them_gives() -> None:
    spec = make_spec("early_cut", budget=20)
    for seed in range(2):
        for trials in History(spec, seed).go_on(150):
            rows = trials.rows
            for total in (None, 0, 5, 20):
                asked = from_scratch.asked(rows, total)
                assert trials.unended(total) == [row for row in asked if not row.is_done]
                paused = [row.number for row in asked if row.paused_by is PausedBy.PERSON]
                assert trials.paused(total) == paused
                left_out = [row.number for row in rows if not row.is_done and row not in asked]
                assert trials.left_out(total) == left_out
            assert trials.count == len(trials.counted()) == len(from_scratch.counted(rows))
            counts = extent(trials, spec)
            assert counts == extent(rows, spec)
            searched = [row for row in rows if row.role is not Role.CONFIRM]
            assert counts.ended == sum(row.status.is_final for row in searched)
            assert counts.resting == sum(row.is_resting for row in rows)
            assert counts.spent == sum(row.episodes for row in rows if row.counts) / spec.total_episodes
            assert counts.confirmed == sum(row.status.is_final for row in rows if row.role is Role.CONFIRM)


def test_a_sampler_reads_what_going_through_all_trials_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_READ", 16)
    monkeypatch.setattr(memory, "BEST_READ", 6)
    spec = make_spec("early_cut", budget=20)
    for seed in range(2):
        projection = Projection(spec)
        for trials in History(spec, seed).go_on(200):
            if len(trials) % 3 == 0:  # not after each change
                continue
            projection.follow(trials)
            found = projection._views[None]._study.get_trials(deepcopy=False)
            read = [(trial.number, trial.state, trial.value) for trial in found]
            assert read == from_scratch.read(trials.rows, spec, 16, 6)

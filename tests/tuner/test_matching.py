"""Configurations are run at the β with which their KL ends within the budget: finished ones again, paused ones anew."""

import math
from typing import Any

import pytest

from tests.tuner.trial_rows import make_spec, pruned, trial_row
from tuner.judge import why_paused
from tuner.search.choose import Promote, choose, is_finished, new_trial, promotable
from tuner.search.matching import New, from_the_start, match
from tuner.status import Origin, PausedBy, Role, Status
from tuner.store import TrialRow

SPEC = make_spec()  # a KL budget of 10 nats: the goal is 7.8
PARAMS = {"learning_rate": 1e-4, "batch_size": 64, "num_ppo_epochs": 4, "kl_control": "fixed", "vf_coef": 0.5}


def ended(number: int, beta: float, kl: float | None, **changes: Any) -> TrialRow:
    params = {**PARAMS, "kl_coef": beta, **changes.pop("params", {})}
    config = SPEC.config(params).to_dict() | changes.pop("config", {})
    return trial_row(number, **{"params": params, "config": config, "end_kl": kl, "episodes": 1920, **changes})


def match_of(*rows: TrialRow, **changes: Any) -> New | None:
    return match(make_spec(**changes), rows)


def again(parent: int, beta: Any) -> New:
    """Trial `parent` at another β, with PARAMS otherwise."""
    return New({**PARAMS, "kl_coef": beta}, Origin.MATCHED, f"trial {parent} at another β", parent)


def value_of(found: New | None, name: str = "kl_coef") -> float:
    assert found is not None and found.params is not None
    return float(str(found.params[name]))


def beta_of(*rows: TrialRow) -> float:
    return value_of(match_of(*rows))


@pytest.mark.parametrize(
    ("kl", "beta"),
    [
        (12.0, 0.0856699),  # 0.05 * (12 / 7.8) ** 1.25
        (20.0, 0.1622330),
        (4.0, 0.0216983),
        (9.8, None),  # log(9.8 / 7.8) = 0.228 is the first that is away from the goal
        (9.7, None),
        (6.3, None),
        (1.9, None),  # another β alone does not multiply its KL by four
        (32.0, None),
        (None, None),
    ],
)
def test_beta_is_what_brings_the_kl_to_the_goal(kl: float | None, beta: float | None) -> None:
    found = match_of(ended(0, 0.05, kl))
    if kl == 9.8:
        assert value_of(found) == pytest.approx(0.05 * (9.8 / 7.8) ** 1.25)
    elif beta is None:
        assert found is None
    else:
        assert found == again(0, pytest.approx(beta, rel=1e-5))


def test_two_values_of_beta_say_how_steep_the_kl_is() -> None:
    first = ended(0, 0.05, 20.0)
    # log(20 / 12) / log(0.1 / 0.05) = 0.737: 0.1 * (12 / 7.8) ** (1 / 0.737)
    assert beta_of(first, ended(1, 0.1, 12.0, origin=Origin.MATCHED)) == pytest.approx(0.179416, rel=1e-4)
    # The KL hardly moved: a slope under 0.4 is taken for 0.4.
    assert beta_of(ended(0, 0.02, 14.0), ended(1, 0.04, 13.0)) == pytest.approx(0.04 * (13 / 7.8) ** 2.5)
    # It went past the goal: between the two, from the nearer one.
    assert 0.05 < beta_of(first, ended(1, 0.2, 5.5)) < 0.2
    assert match_of(first, ended(1, 0.1, 8.0)) is None, "it is there"
    assert match_of(first, ended(1, 0.1, 14.0), ended(2, 0.15, 11.0)) is None, "three values are enough"


@pytest.mark.parametrize("slope", [0.5, 0.8, 1.2, 1.8])
def test_whatever_the_slope_is_three_values_of_beta_end_within_the_budget(slope: float) -> None:
    rows = [ended(0, 0.04, 16.0)]
    while (found := match_of(*rows)) is not None:
        beta = value_of(found)
        rows.append(ended(len(rows), beta, 16.0 * (beta / 0.04) ** -slope, origin=Origin.MATCHED))
    assert len(rows) in (2, 3)
    assert min(abs(math.log((row.end_kl or 0) / 7.8)) for row in rows) < 0.25


def test_what_is_not_a_matter_of_beta_is_left_alone() -> None:
    adaptive = {"params": {"kl_control": "adaptive"}, "config": {"kl_target": 6.0}}
    assert match_of(ended(0, 0.05, 20.0, **adaptive)) is None
    assert match_of(ended(0, 0.05, 20.0, status=Status.PAUSED, paused_by=PausedBy.STRATEGY)) is None
    assert match_of(pruned(0, params=PARAMS, config=SPEC.config(PARAMS).to_dict(), end_kl=20.0)) is None
    assert match_of(ended(0, 0.05, 20.0, role=Role.CONFIRM)) is None
    assert match_of(ended(0, 0.05, 20.0), ended(1, 0.1, None, status=Status.RUNNING)) is None, "one runs already"
    assert match_of(ended(0, 0.3, 20.0)) is None, "β is at the end of its range"
    end = [ended(0, 0.012, 5.0), ended(1, 0.01, 5.1)]  # the nearer one would be run again at the range's end
    assert closer_of(*end) is None and closer_of(*end[::-1]) is None, "it ran there already"


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": "random"},
        {"sampler": "qmc"},
        {"search": {"learning_rate": "advised", "kl_target": "advised"}},
    ],
)
def test_studies_that_only_draw_or_search_no_beta_have_none(changes: dict[str, Any]) -> None:
    assert match_of(ended(0, 0.05, 20.0), **changes) is None


def test_the_most_promising_one_comes_first() -> None:
    one, other = (
        ended(0, 0.05, 20.0, rung_score=1.2),
        ended(1, 0.05, 20.0, rung_score=1.9, params={"learning_rate": 2e-4}),
    )
    found = match_of(one, other)
    assert found is not None and (found.parent, value_of(found, "learning_rate")) == (1, 2e-4)


def at_rung(number: int, beta: float, score: float, **changes: Any) -> TrialRow:
    rung = {"rung_episode": 192, "rung_score": score, "status": Status.PAUSED, "paused_by": PausedBy.STRATEGY}
    return ended(number, beta, 1.0, **{"episodes": 192, **rung, **changes})


OTHER = {"params": {"learning_rate": 3e-4}}
ADAPTIVE = {"params": {"kl_control": "adaptive", "kl_target": 6.0, "learning_rate": 3e-4}, "config": {"kl_target": 6.0}}


def start_of(row: TrialRow, *finished: TrialRow, **changes: Any) -> float | None:
    found = from_the_start(make_spec(**changes), [*finished, row], row)
    assert found is None or found.parent == row.number
    return None if found is None else value_of(found)


def test_a_paused_trial_is_finished_at_the_beta_that_suited_the_finished_ones() -> None:
    # 0.05 * (12 / 7.8) ** 1.25, and 0.1 itself: the median of two in the logarithm
    first, second = ended(0, 0.05, 12.0), ended(1, 0.1, 7.8)
    suits = math.exp((math.log(0.0856699) + math.log(0.1)) / 2)
    assert start_of(at_rung(2, 0.02, 1.0, **OTHER), first, second) == pytest.approx(suits, rel=1e-5)
    assert start_of(at_rung(2, 0.2, 1.0, **OTHER), first, second) == pytest.approx(suits, rel=1e-5)
    assert start_of(at_rung(2, 0.075, 1.0, **OTHER), first, second) is None, "close enough: it goes on"
    assert start_of(at_rung(2, 0.02, 1.0, **OTHER)) is None, "nothing has ended yet"
    assert start_of(at_rung(2, 0.02, 1.0, **OTHER), ended(0, 0.05, 40.0)) is None, "too far away to tell"
    assert start_of(at_rung(2, 0.02, 1.0, **OTHER), first, sampler="random") is None
    # Of four finished ones the three nearest to the goal count.
    more = [ended(3, 0.1, 7.8), ended(4, 0.1, 7.8), ended(5, 0.3, 28.0)]
    assert start_of(at_rung(6, 0.02, 1.0, **OTHER), first, *more) == pytest.approx(0.1)


def test_a_paused_trial_with_an_adaptive_beta_is_finished_with_a_fixed_one() -> None:
    row = at_rung(1, 0.05, 1.0, **ADAPTIVE)
    found = from_the_start(SPEC, [ended(0, 0.1, 7.8), row], row)
    assert found is not None and found.params is not None
    assert found.params == {**PARAMS, "learning_rate": 3e-4, "kl_coef": pytest.approx(0.1)}
    assert SPEC.config(found.params).kl_target is None


def test_a_search_of_beta_alone_finishes_what_it_proposed() -> None:
    spec = make_spec(search={"kl_coef": "advised"}, trials=None, budget=30)
    rows = [ended(0, 0.05, 12.0), ended(1, 0.0857, 7.8, origin=Origin.MATCHED)]
    rows += [at_rung(n, 0.01 * n, 0.1 * n) for n in range(2, 8)]
    assert choose(spec, rows, ()) == Promote(7)


def test_what_was_run_from_the_start_is_neither_finished_nor_promoted_again() -> None:
    spec = make_spec(strategy="early_cut", trials=None, budget=30)
    rows = [ended(0, 0.1, 7.8, origin=Origin.REFERENCE)]
    rows += [at_rung(n, 0.02, 0.1 * n, params={"learning_rate": n * 1e-5}) for n in range(1, 7)]

    def ranked(*more: TrialRow) -> list[int]:
        return [row.number for row in promotable(spec, [*rows, *more])]

    chosen = choose(spec, rows, ())
    assert isinstance(chosen, New)
    assert ranked() == [6, 5, 4, 3, 2, 1]
    assert (chosen.parent, chosen.origin, chosen.label) == (6, Origin.MATCHED, "trial 6 at another β")
    made = new_trial(spec, rows, chosen, 1)
    assert (made.number, made.parent, made.config["kl_coef"]) == (7, 6, pytest.approx(0.1))
    assert made.params["learning_rate"] == pytest.approx(6e-5)
    running = ended(7, 0.1, None, params=made.params, origin=Origin.MATCHED, status=Status.RUNNING, value=None)
    assert ranked(running) == [5, 4, 3, 2, 1]
    following = choose(spec, [*rows, running], (7,))
    assert isinstance(following, New) and following.origin is Origin.SAMPLED, "one in six was due"
    done = ended(7, 0.1, 7.8, params=made.params, origin=Origin.MATCHED)
    little = make_spec(strategy="early_cut", trials=None, budget=3.5)
    last = choose(little, [*rows, done], ())
    assert last == Promote(5), "under a whole trial is left: the next best goes on as it is"


def closer_of(*rows: TrialRow, is_last: bool = True) -> New | None:
    return match(make_spec(), rows, is_last=is_last)


def test_the_last_full_trial_is_the_best_one_closer_to_the_budget() -> None:
    best = ended(0, 0.05, 7.0, value=1.9)
    other = ended(1, 0.05, 7.5, value=1.2, params={"learning_rate": 2e-4})
    # 0.05 * (7 / 9) ** (1 / 0.8)
    assert closer_of(best, other) == again(0, pytest.approx(0.0365204, rel=1e-5))
    assert closer_of(best, other, is_last=False) is None
    # Two values say how steep: log(7 / 14) / log(0.05 / 0.025) = -1, so 0.05 * 7 / 9.
    assert closer_of(best, ended(1, 0.025, 14.0, value=1.0)) == again(0, pytest.approx(0.05 * 7 / 9))
    assert closer_of(ended(0, 0.05, 8.1, value=1.9)) is None, "log(9 / 8.1) = 0.105: close enough"
    assert closer_of(ended(0, 0.05, 9.5, value=1.9)) is None, "only its checkpoint was below"
    adaptive = ended(2, 0.05, 5.0, value=2.0, params={"kl_control": "adaptive"}, config={"kl_target": 6.0})
    assert closer_of(best, other, adaptive) is None, "the best one's β is not fixed"
    running = ended(2, 0.036, None, value=None, status=Status.RUNNING, origin=Origin.MATCHED)
    assert closer_of(best, other, running) is None, "it runs already"
    away = ended(1, 0.05, 20.0, value=1.0, params={"learning_rate": 3e-4})
    found = closer_of(best, away)
    assert found is not None and found.parent == 1, "one whose KL is away from the goal has more to gain"


@pytest.mark.parametrize("strategy", ["early_cut", "full"])
def test_it_runs_to_its_end_before_others_while_there_is_budget(strategy: str) -> None:
    spec = make_spec(strategy=strategy, trials=None, budget=4)
    rows = [ended(0, 0.05, 20.0, origin=Origin.REFERENCE)]
    chosen = choose(spec, rows, ())
    assert chosen == match(spec, rows) and isinstance(chosen, New)
    made = new_trial(spec, rows, chosen, 1)
    assert (made.number, made.origin, made.label) == (1, Origin.MATCHED, "trial 0 at another β")
    assert made.config["kl_coef"] == made.params["kl_coef"] == pytest.approx(0.1622330, rel=1e-5)
    assert made.config["learning_rate"] == 1e-4
    running = ended(1, 0.16, None, origin=Origin.MATCHED, status=Status.RUNNING, episodes=192, value=None)
    following = choose(spec, [*rows, running], (1,))
    assert isinstance(following, New) and following.origin is Origin.SAMPLED
    # Its whole length is promised: 2.2 of 4 are left, and what it will take.
    assert why_paused(spec, running, [{"episode": 192, "step": 3, "eval/kl": 1.0, "eval/reward": 1.0}]) is None
    spent = [ended(n, 0.05, 8.0, params={"learning_rate": n * 1e-4}) for n in (1, 2)]
    last = [*rows, *spent, ended(3, 0.05, 8.0, params={"learning_rate": 5e-4}, episodes=192)]
    assert choose(spec, last, ()) is None, "0.9 trials are left, too few for a whole one"
    assert is_finished(spec, last)
    assert not is_finished(spec, rows)

"""What is said of a run that has ended, and what its folder is called, from what is known of it alone."""

import json
import math
import re
from dataclasses import asdict
from typing import Any

import pytest

from ppo_core.cli.ending import judge, outcome
from ppo_core.output import dumps


def step(number: int, reward: float, kl: float, se: float = 0.1) -> dict[str, float]:
    return {"step": number, "episode": 8 * number, "eval/reward": reward, "eval/reward_se": se, "eval/kl": kl}


@pytest.mark.parametrize(
    ("middle", "end", "kept", "note", "best"),
    [
        ((2.0, 1.0), (2.1, 3.0), 1, None, None),
        ((2.1, 1.0), (2.0, 3.0), 1, None, 1),  # chosen as a study would, and within a standard error
        ((2.0, 1.0), (2.0, 3.0), 1, None, 1),  # of equal rewards the lower KL
        ((2.2, 1.0), (2.0, 3.0), 1, "its reward of 2.00 ± 0.10 is below that of an earlier checkpoint", 1),
        ((1.2, 1.0), (2.0, 5.1), 1, "its KL of 5.10 nats/response is over the budget of 5", 1),
        ((1.2, 6.0), (2.0, 5.1), None, "over the budget of 5; no checkpoint was within the budget", None),
        ((0.8, 1.0), (0.75, 1.0), 1, None, 1),  # within two standard errors of the start
        ((0.8, 1.0), (0.7, 1.0), 1, "its reward of 0.70 ± 0.10 is below the start's 1.00 ± 0.10", 1),
        ((0.6, 1.0), (0.7, 1.0), 1, "is below the start's 1.00 ± 0.10; no better checkpoint was kept", None),
        ((0.6, 1.0), (0.7, 9.0), 1, "KL 1.00 nats/response, which is also below the start's 1.00 ± 0.10", 1),
        ((1.2, 1.0), (math.nan, 1.0), 1, "its last evaluation is not finite", 1),
        ((1.2, 1.0), (2.0, math.nan), None, "its last evaluation is not finite; no checkpoint was", None),
    ],
)
def test_how_a_run_ended(
    middle: tuple[float, float], end: tuple[float, float], kept: int | None, note: str | None, best: int | None
) -> None:
    lines: list[dict[str, Any]] = [step(0, 1.0, 0.0), {**step(1, *middle)}, {"step": 2}, {**step(3, *end)}]
    stored = json.loads(dumps(lines))  # as steps.jsonl has them
    ending = judge(stored, 5.0, kept)
    assert (ending.best and ending.best.step) == best
    assert ending.note is None if note is None else ending.note is not None and note in ending.note
    json.dumps(asdict(ending))


def test_the_outcome_has_what_smaller_budgets_would_have_given() -> None:
    kls = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]
    rewards = [1.0, 1.5, 1.4, 2.0, 2.1, 2.2, 2.3, 3.0]  # step 2 is below the one before it
    steps = [step(i, reward, kl) for i, (reward, kl) in enumerate(zip(rewards, kls, strict=True))]
    found = outcome(steps, judge(steps, 7.0, 6))
    assert found is not None and found.reading.step == 6 and found.start.step == 0
    assert [each.step for each in found.front] == [1, 3, 4, 5, 6], "at most five, none over the budget"
    assert found.front_table.row_count == 5 and "reward 2.30 ± 0.10" in found.text
    assert outcome([{"step": 1}], judge([], 7.0, None)) is None


def test_the_budget_holds_with_the_standard_error_of_the_kl() -> None:
    steps = [step(0, 1.0, 0.0), step(1, 2.0, 4.0), step(2, 2.2, 4.9) | {"eval/kl_se": 0.2}]
    assert judge(steps, 5.2, 2).note is None
    ending = judge(steps, 5.0, 1)
    assert ending.best is not None and ending.best.step == 1
    assert ending.note is not None
    assert "its KL of 4.90 ± 0.20 nats/response is with its standard error over the budget of 5" in ending.note


@pytest.mark.parametrize(
    ("kls", "told"),
    [
        ((0.0, 2.0, 5.0), None),
        ((0.0, 6.0, 4.0, 7.0, 8.0), "KL left the budget of 5 nats/response for good at step 3 (episode 24)"),
        (
            (0.0, 6.0, 4.0, 7.0, 3.0),
            "KL was over the budget of 5 nats/response at step 1 (episode 8), and stayed within it from step 4 (episode 32)",
        ),
        ((0.0, math.nan, 4.0), None),
    ],
)
def test_where_kl_left_the_budget_or_came_back_is_told(kls: tuple[float, ...], told: str | None) -> None:
    ending = judge([step(n, 1.0 + n, kl) for n, kl in enumerate(kls)], 5.0, None)
    assert ending.kl_course == told == asdict(ending)["kl_course"]


@pytest.mark.parametrize(
    ("signs", "steps"), [("...", []), ("..xx", [2]), (".x.xx", [3]), ("xx", [0]), (".x..", [1, 2]), (".x.x.", [1, 4])]
)
def test_kl_leaves_for_good_or_first_and_comes_back_last(signs: str, steps: list[int]) -> None:
    lines = [step(n, 1.0, 9.0 if sign == "x" else 0.0) for n, sign in enumerate(signs)]
    assert [int(found) for found in re.findall(r"step (\d+)", judge(lines, 5.0, None).kl_course or "")] == steps

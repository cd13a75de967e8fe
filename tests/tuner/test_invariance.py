"""No unit of a task decides anything: the same runs, told in other units, are judged alike.

A made-up trainer reports runs in a unit of reward, with an offset, under a KL budget, with responses of some length and
in some number of iterations. What guard, watch, diagnosis and answer say of them is what they say of the same
runs in the first row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ppo_core.report import StepReport
from tests.tuner.absolute_constants import constants
from tests.tuner.trial_rows import make_spec, trial_row
from tuner.judge.best import best_trial
from tuner.judge.diagnose import NEEDED, Course, diagnose
from tuner.judge.guard import GuardState, WatchState, check_step, watch
from tuner.judge.scoring import EVALUATION_METRICS, outcome
from tuner.store import TrialRow
from tuner.study.rules import blame_of
from tuner.study.spec import StudySpec
from tuner.study.status import Reason, Status

BATCH = 64
SHARES = (1 / 3, 2 / 3, 1.0)


@dataclass(frozen=True)
class Unit:
    """What a task brings along."""

    scale: float = 1.0
    """Of the reward."""
    offset: float = 0.0
    kl_budget: float = 8.0
    """In nats per response."""
    tokens: int = 32
    """Of a response."""
    iterations: int = 30

    @property
    def beta(self) -> float:
        """The study's β: a fifth of the best policy's with the KL budget, in reward per nat."""
        return 0.2 * self.scale / math.sqrt(2 * self.kl_budget)

    @property
    def spec(self) -> StudySpec:
        return make_spec(
            search={"learning_rate": {"low": 1e-7, "high": 1.0}, "num_ppo_epochs": {"low": 1, "high": 8}},
            fixed={"kl_coef": self.beta, "batch_size": BATCH, "total_episodes": BATCH * self.iterations},
            kl={"budget": self.kl_budget},
        )


@dataclass(frozen=True)
class Run:
    """Curves over the share of a run that is done, in units of their own: KL in budgets, reward in spreads."""

    kl: Any = lambda share: 0.8 * share
    reward: Any = lambda share: math.sqrt(min(1.0, 1.6 * share))
    return_std: Any = lambda share: 1.0
    loss: Any = lambda share: 0.3 - 0.1 * share
    """In spreads of reward, squared."""
    updates: Any = lambda unit: 0.3 * unit.kl_budget / (unit.iterations * unit.tokens)
    """Approx KL in nats per token: here a walk that takes the budget."""
    raw: float = 0.0
    """What raw scores have over those that are used."""
    beta: float = 1.0
    """β in units of the study's."""

    def reports(self, unit: Unit) -> Iterator[StepReport]:
        for step in range(unit.iterations + 1):
            share, before = step / unit.iterations, max(step - 1, 0) / unit.iterations
            kl = unit.kl_budget * self.kl(before)  # of the policy before the step's update
            metrics = {
                "objective/kl_exact": kl,
                "objective/scores": unit.scale * self.reward(before) + unit.offset + self.raw,
                "objective/scores_std": unit.scale * self.return_std(before),
                "objective/kl_coef": unit.beta * self.beta,
                "objective/non_score_reward": -unit.beta * self.beta * kl,
                "val/return_std": unit.scale * self.return_std(before),
                "loss/value_avg": unit.scale**2 * self.loss(before),
                "val/var_explained": 0.5,
                "val/ratio": 1.0,
                "policy/approxkl_avg": self.updates(unit),
                "policy/clipfrac_avg": 0.1,
                "policy/entropy_avg": 2.0 - 0.4 * before,
                "response/repetition": 0.1,
                "response/length_mean": float(unit.tokens),
            }  # fmt: skip
            if step == 0:
                metrics = {}
            if step == 0 or any(before < third <= share for third in SHARES):
                metrics |= {
                    "eval/reward": unit.scale * self.reward(share) + unit.offset,
                    "eval/reward_se": unit.scale * 0.03,
                    "eval/kl": unit.kl_budget * self.kl(share),
                    "eval/kl_se": 0.01 * unit.kl_budget * self.kl(share),
                    "eval/length": float(unit.tokens),
                    "eval/repetition": 0.1,
                    "eval/entropy": 2.0 - 0.4 * share,
                }
            yield StepReport(step, BATCH * step, metrics)


def flat(share: float) -> float:
    return 0.001


RUNS = {
    "sound": Run(),
    "over": Run(kl=lambda share: 1.4 * share),
    "blown": Run(kl=lambda share: 20 * share),
    "stuck": Run(kl=lambda share: 0.003 * share, reward=flat, updates=lambda unit: 0.5 * unit.kl_budget / unit.iterations**2 / unit.tokens),
    "rounding": Run(kl=lambda share: 0.006 * (share > 0), reward=flat),
    "held by β": Run(kl=flat, reward=flat, beta=6.0),
    "slow": Run(kl=lambda share: 0.3 * share, reward=lambda share: 0.9 * share),
    "exploding": Run(loss=lambda share: 0.5 * 10 ** (6 * share)),
    "exploding, and its returns": Run(
        loss=lambda share: 0.5 * 10 ** (6 * share), return_std=lambda share: max(1.0, 0.3 * 10 ** (3 * share))
    ),
    "rare": Run(
        return_std=lambda share: math.sqrt((0.02 + 0.48 * share) * (0.98 - 0.48 * share)),
        loss=lambda share: 0.5 * (0.02 + 0.48 * share) * (0.98 - 0.48 * share),
    ),
    "penalised late": Run(
        return_std=lambda share: 0.5 if share > 0.35 else 0.01, loss=lambda share: 0.1 if share > 0.35 else 5e-5
    ),
    "normalized": Run(loss=lambda share: 5e5 if share > 0.3 else 0.4, raw=1000.0),
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """What is decided of a run."""

    rule: str | None
    """That ended it."""
    blame: str | None
    advice: tuple[tuple[str, str, float], ...]
    """Rule, hyperparameter and the factor by which it is to change."""


def judged(run: Run, unit: Unit) -> tuple[Judged, TrialRow]:
    """Return what is decided of a run, and its row."""
    spec, steps, state, watched = unit.spec, list[dict[str, Any]](), GuardState(), WatchState()
    reason: Reason | None = None
    config = spec.config({"kl_coef": unit.beta * run.beta})
    for report in run.reports(unit):
        state, reason = check_step(spec.guard, state, report, config.whole_episodes(), spec.kl_budget)
        watched, _ = watch(watched, report, spec.kl_budget, config.eval_interval)
        steps.append(
            {"step": report.step, "episode": report.episode}
            | {name: report.metrics.get(name) for name in (*NEEDED, *EVALUATION_METRICS)}
        )
        if reason is not None:
            break
    evaluations = [step for step in steps if step["eval/reward"] is not None]
    course = Course(steps, config.to_dict(), spec, reason)
    advice = tuple(
        (one.rule, one.name, round(float(one.value or 0) / float(one.was or 1), 2)) for one in diagnose(course)
    )
    status = Status.COMPLETED if reason is None else Status.PRUNED
    row = trial_row(list(RUNS.values()).index(run), config=config.to_dict(), reason=reason)
    rule = None if reason is None else reason.rule
    return Judged(rule, blame_of(reason), advice), replace(row, **vars(outcome(evaluations, spec, status, reason)))


def all_judged(unit: Unit) -> tuple[dict[str, Judged], int | None]:
    """Return what is decided of each run, and the answer's number."""
    both = {name: judged(run, unit) for name, run in RUNS.items()}
    best = best_trial([row for _, row in both.values()], unit.kl_budget)
    return {name: decided for name, (decided, _) in both.items()}, None if best is None else best.number


IN_REWARD = [
    *(Unit(scale=2.0**power) for power in (-7, 7)),
    *(Unit(scale=scale) for scale in (0.01, 100)),
    Unit(offset=1000),
    Unit(scale=100, offset=1000),
]
IN_KL = [Unit(kl_budget=0.5, tokens=2), Unit(kl_budget=50, tokens=200), Unit(kl_budget=8, tokens=512)]


def test_what_is_decided_of_the_made_up_runs() -> None:
    found, answer = all_judged(Unit())
    assert {name: one.rule for name, one in found.items() if one.rule} == {
        "blown": "kl_limit", "stuck": "nothing_learned", "rounding": "nothing_learned", "held by β": "nothing_learned",
        "exploding": "value_divergence", "exploding, and its returns": "value_divergence",
        "normalized": "value_divergence",
    }  # fmt: skip
    said = {name: [(rule, moved) for rule, moved, _ in one.advice] for name, one in found.items()}
    assert said == {
        "sound": [], "rare": [], "penalised late": [],
        "over": [("KL too high", "kl_coef")],
        "blown": [("KL too high", "learning_rate")],
        "stuck": [("KL budget unused", "learning_rate"), ("Updates too small", "learning_rate")],
        "rounding": [("KL budget unused", "learning_rate")],
        "held by β": [("KL budget unused", "kl_coef")],
        "slow": [("Stable but slow", "kl_coef")],
        "exploding": [("Critic diverges", "value_learning_rate")],
        "exploding, and its returns": [("Critic diverges", "value_learning_rate")],
        "normalized": [("Critic diverges", "value_learning_rate")],
    }  # fmt: skip
    assert answer == list(RUNS).index("sound")


@pytest.mark.parametrize("unit", [*IN_REWARD, *IN_KL], ids=str)
def test_another_unit_changes_no_decision(unit: Unit) -> None:
    assert all_judged(unit) == all_judged(Unit())


@pytest.mark.parametrize(
    "unit", [Unit(iterations=5, tokens=512), Unit(iterations=5), Unit(iterations=300, tokens=8), Unit(iterations=5000)],
    ids=str,
)  # fmt: skip
def test_another_number_of_iterations_changes_no_decision(
    unit: Unit,
) -> None:
    (found, answer), (usual, usual_answer) = all_judged(unit), all_judged(Unit())
    assert answer == usual_answer
    for name, one in found.items():
        assert one.advice == usual[name].advice, name
        if unit.iterations > 8 or usual[name].rule != "nothing_learned":
            assert one.blame == usual[name].blame, name


@pytest.mark.parametrize("iterations", [30, 300, 5000])
def test_a_run_that_is_on_course_at_6_percent_has_no_small_updates(iterations: int) -> None:
    """Of 5,000 iterations with responses of 32 tokens: an approx KL of 1.5e-5 nats per token."""
    unit = Unit(iterations=iterations)
    until = list(RUNS["sound"].reports(unit))[: round(0.06 * iterations) + 1]
    steps = [{"step": one.step, "episode": one.episode, **dict.fromkeys(NEEDED), **one.metrics} for one in until]
    assert diagnose(Course(steps, unit.spec.config({}).to_dict(), unit.spec)) == []


def test_the_numbers_of_judge_and_search_that_have_a_tasks_unit_are_these() -> None:
    """`python -m tests.tuner.absolute_constants` lists them; all others are shares of something."""
    found: Sequence[Any] = list(constants())
    assert [one.where for one in found if one.doc is None] == [], "a number without a description"
    assert {one.where.removeprefix("tuner.") for one in found if one.is_absolute} == {
        "judge.diagnose FEWEST", "judge.guard WINDOW", "study.rules patience", "judge.hacking LAST",
        "study.rules IDLE_STEPS", "study.rules sampler_mismatch", "study.rules approx_kl",
    }  # fmt: skip

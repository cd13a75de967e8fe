"""What the battery's studies came to: values on a common scale, time to random search's value, table and picture.

A study's value at a moment is the reward on the test prompts of the checkpoint that is the best within the KL budget on
the eval prompts by then, by the means of both readings for those that were read again after the search; where its KL on
the test prompts is over the budget by two standard errors, the SFT policy's. On a task's scale 0 is the SFT policy, 1
the best that random search's trials found. Clocks are CPU-seconds of steps and evaluations, and arms are read at the
median cost of random search.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from dashboard.style import COLOURS
from ppo_core.config.kl_budget import is_within
from support.intervals import Interval

from .recipes import Recipe
from .runs import ALL_STARTS, BUDGET, KEYS, OPTUNA, PACED, RANDOM, as_run
from .tasks import Start

OTHERS: Mapping[str, Literal["any start", "its start"]] = {RANDOM: "any start", OPTUNA: "its start", PACED: "any start"}
"""The arms that ours is compared with, and whether a start makes a difference to them."""
POINTS = 60
"""Moments at which curves are drawn."""


@dataclass(frozen=True)
class Study:
    """One study: its value as it changed."""

    task: str
    start: Start
    budget: int
    seed: int
    times: NDArray[np.float64]
    """CPU-seconds at which the value changed, rising."""
    values: NDArray[np.float64]
    """From then on; rewards."""
    cost: float
    """CPU-seconds in all."""
    is_over: bool
    """True if the KL of what it chose is over the budget on the test prompts by two standard errors."""
    ends: int
    """Trials that were run whole."""
    ends_over: int
    """Those of them whose last evaluation is over the KL budget."""

    def value(self, moment: float, baseline: float) -> float:
        """Return the value then; the SFT policy's before the first."""
        known = int(np.searchsorted(self.times, moment, side="right"))
        return float(self.values[known - 1]) if known else baseline

    def reaches(self, value: float) -> float:
        """Return the first moment at which it is worth so much; inf: never."""
        return float(min(self.times[self.values >= value], default=math.inf))


def studies(results: pd.DataFrame, tasks: Mapping[str, Recipe], pace: Mapping[str, float]) -> list[Study]:
    """Return the studies of one arm's results.

    Their seconds are those of a machine on which the first two iterations of a task take its `pace`.
    """
    own = results.groupby("task").pace.median()
    return [
        _study(*key, rows, tasks[key[0]].kl_budget, pace[key[0]] / own[key[0]])
        for key, rows in results.groupby(KEYS, sort=False)
    ]


def _study(
    task: str, start: Start, budget: int, seed: int, rows: pd.DataFrame, kl_budget: float, speed: float
) -> Study:
    baseline = float(rows[rows.step == 0].fresh_reward.iloc[0])
    best: dict[int, tuple[float, float, float, bool]] = {}
    """By trial: its reward, its KL, what it is worth, and whether it is over the budget on the test prompts."""
    times, values, is_over = [], [], False
    for row in rows[rows.step > 0].itertuples():
        if not math.isnan(row.again_reward):
            reward, kl, worth, is_over = best.pop(row.trial)
            if is_within(kl := (kl + row.again_kl) / 2, row.again_kl_se, kl_budget):
                best[row.trial] = (reward + row.again_reward) / 2, kl, worth, is_over
        elif row.reward > best.get(row.trial, (-math.inf,))[0] and is_within(row.kl, row.kl_se, kl_budget):
            is_over = row.fresh_kl > kl_budget + 2 * row.fresh_kl_se
            best[row.trial] = row.reward, row.kl, baseline if is_over else row.fresh_reward, is_over
        *_, worth, is_over = max(best.values(), key=lambda one: one[0], default=(0.0, 0.0, baseline, False))
        if worth != (values[-1] if values else baseline):
            times.append(speed * row.cpu)
            values.append(worth)
    whole = rows[rows.kl.notna()].groupby("trial").tail(1)
    whole = whole[whole.step == rows.step.max()]
    cost, ends_over = speed * float(rows.cpu.max()), int((whole.kl > kl_budget).sum())
    return Study(
        task, start, budget, seed, np.array(times), np.array(values), cost, bool(is_over), len(whole), ends_over
    )


@dataclass(frozen=True)
class Line:
    """One arm at one start and budget, over the tasks."""

    arm: str
    start: Start | Literal["all"]
    budget: int
    studies: int
    value: Interval
    """On the tasks' scales."""
    over: Mapping[str, Interval]
    """Of ours alone: the difference to each other arm at the same task, start and seed."""
    worst: tuple[str, float] | None
    """The task where the difference to Optuna alone is least in the mean."""
    trials: float
    """Median time to random search's mean value, in trials of full length; inf: most never reach it."""
    answers_over: int
    """Studies whose answer's KL is over the budget on the test prompts by two standard errors."""
    ends_over: float
    """Of the trials that were run whole, the share whose last evaluation is over the KL budget."""


class Battery:
    """The studies of all arms on a group of tasks."""

    def __init__(self, tasks: Sequence[Recipe], results: Mapping[str, pd.DataFrame]) -> None:
        by_name = {task.name: task for task in tasks}
        results = {arm: found[found.task.isin(list(by_name))] for arm, found in results.items()}
        random = results[RANDOM]
        pace = {str(task): float(rows.pace.median()) for task, rows in random.groupby("task")}
        self.arms = {arm: studies(found, by_name, pace) for arm, found in results.items()}
        first = random[random.step == 0].groupby("task").fresh_reward.first()
        self.baselines = {str(task): float(reward) for task, reward in first.items()}
        costs = {
            task: [study.cost * BUDGET / study.budget for study in self.arms[RANDOM] if study.task == task]
            for task in pace
        }
        self.costs = {task: float(np.median(seconds)) for task, seconds in costs.items()}
        """CPU-seconds at which arms are read: those of random search's first `BUDGET` trials."""
        self.best = dict(self.baselines)
        for study in self.arms[RANDOM]:
            self.best[study.task] = max(self.best[study.task], *study.values, -math.inf)

    def moment(self, task: str, budget: int) -> float:
        """Return the CPU-seconds at which the studies of a budget are read."""
        return self.costs[task] * budget / BUDGET

    def scaled(self, study: Study, moment: float) -> float:
        """Return the value at a moment on the task's scale."""
        baseline = self.baselines[study.task]
        return (study.value(moment, baseline) - baseline) / (self.best[study.task] - baseline)

    def chosen(self, arm: str, start: Start, budget: int) -> list[Study]:
        """Return an arm's studies at a start and a budget, one of each task and seed.

        Those of an equal start stand in for a start that was not run, and beginnings of larger budgets for a budget.
        """
        is_run = any(study.start == start for study in self.arms[arm])
        at = start if is_run else as_run(arm, start)
        found: dict[tuple[str, int], Study] = {}
        for study in sorted(self.arms[arm], key=lambda study: -study.budget):
            if study.start == at and study.budget >= budget:
                found[study.task, study.seed] = study
        return list(found.values())

    def values(self, arm: str, start: Start, budget: int) -> dict[str, dict[int, float]]:
        """Return the values of an arm's studies on the tasks' scales, by task and seed."""
        found: dict[str, dict[int, float]] = {}
        for study in self.chosen(arm, start, budget):
            found.setdefault(study.task, {})[study.seed] = self.scaled(study, self.moment(study.task, budget))
        return found

    def line(self, arm: str, starts: Sequence[Start], budget: int) -> Line | None:
        """Return what an arm came to at some starts and a budget; None without studies."""
        studies = [study for start in starts for study in self.chosen(arm, start, budget)]
        if not studies:
            return None
        values: dict[str, list[float]] = {}
        over: dict[str, dict[str, list[float]]] = {}
        for start in starts:
            for task, by_seed in self.values(arm, start, budget).items():
                values.setdefault(task, []).extend(by_seed.values())
            for other in [other for other in self.arms if OTHERS.get(other) and not OTHERS.get(arm)]:
                others = self.values(other, start, budget)
                for task, by_seed in self.values(arm, start, budget).items():
                    shared = [
                        value - others[task][seed] for seed, value in by_seed.items() if seed in others.get(task, {})
                    ]
                    over.setdefault(other, {}).setdefault(task, []).extend(shared)
        over = {other: {task: found for task, found in tasks.items() if found} for other, tasks in over.items()}
        means = {task: float(np.mean(found)) for task, found in over.get(OPTUNA, {}).items()}
        return Line(
            arm,
            starts[0] if len(starts) == 1 else "all",
            budget,
            len(studies),
            Interval.of_groups(values),
            {other: Interval.of_groups(tasks) for other, tasks in over.items() if tasks},
            min(means.items(), key=lambda each: each[1], default=None),
            float(np.median([self._trials(study, budget) for study in studies])),
            sum(study.is_over for study in studies),
            sum(study.ends_over for study in studies) / max(sum(study.ends for study in studies), 1),
        )

    def _trials(self, study: Study, budget: int) -> float:
        """Return the time of a study to random search's mean value, in trials of full length."""
        shares = self.values(RANDOM, "fair", budget)[study.task].values()
        baseline = self.baselines[study.task]
        wanted = baseline + float(np.mean(list(shares))) * (self.best[study.task] - baseline)
        return study.reaches(wanted) / self.moment(study.task, 1)

    def lines(self) -> list[Line]:
        """Return all lines of the table."""
        starts = [start for start in ALL_STARTS if any(study.start == start for study in self.arms.get(OPTUNA, []))]
        cases = [[start] for start in starts or ALL_STARTS[:1]]
        cases += [starts] if len(starts) > 1 else []
        found = [self.line(arm, of_case, BUDGET) for of_case in cases for arm in self.arms]
        return [one for one in found if one is not None and (OTHERS.get(one.arm) != "any start" or one.start == "fair")]

    def curves(self, arm: str) -> tuple[list[float], list[float]]:
        """Return shares of random search's cost, and the mean value by then of an arm's studies of the full budget from
        the fair start.
        """
        shares = list(np.linspace(0, 1.25, POINTS))
        chosen = self.chosen(arm, "fair", BUDGET)
        means = [np.mean([self.scaled(one, share * self.costs[one.task]) for one in chosen]) for share in shares]
        return shares, list(map(float, means))


def table(lines: Sequence[Line]) -> str:
    """Return the lines for people, after what they say of ours."""
    said = [
        f"What random search finds in {one.budget} trials, {one.arm} finds in {one.trials:.1f} (start: {one.start})."
        for one in lines
        if one.arm not in OTHERS
    ]
    head = (
        f"{'start':12}{'budget':>7}  {'arm':15}{'studies':>8}{'value':>19}"
        + "".join(f"{f'over {other}':>23}" for other in OTHERS)
        + f"{'worst task':>21}{'trials to random':>17}{'answers over':>14}{'ends over':>11}"
    )
    rows = []
    for one in lines:
        over = "".join(f"{one.over[other].text(2) if other in one.over else '':>23}" for other in OTHERS)
        worst = "" if one.worst is None else f"{one.worst[0]} {one.worst[1]:+.2f}"
        rows.append(
            f"{one.start:12}{one.budget:7}  {one.arm:15}{one.studies:8}{one.value.text(2):>19}{over}{worst:>21}"
            f"{one.trials:17.1f}{one.answers_over:14}{one.ends_over:11.1%}"
        )
    return "\n".join([*said, "", head, *rows])


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the lines as plain values; what is infinite is null."""
    return [asdict(one) | {"trials": None if math.isinf(one.trials) else one.trials} for one in lines]


def figure(battery: Battery) -> go.Figure:
    """Return the picture: value against cost, a line an arm."""
    made = go.Figure()
    for arm, colour in zip(battery.arms, COLOURS, strict=False):
        shares, means = battery.curves(arm)
        made.add_scatter(x=shares, y=means, name=arm, mode="lines", line={"color": colour, "width": 2.5})
    made.update_layout(
        template="plotly_white",
        width=800,
        height=420,
        xaxis={"title": "CPU-seconds, as a share of random search's for 12 trials", "tickformat": ".0%"},
        yaxis_title="value: 0 the SFT policy, 1 random search's best",
        legend={"x": 0.99, "y": 0.01, "xanchor": "right", "yanchor": "bottom"},
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
    )
    return made

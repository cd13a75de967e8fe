"""What the battery's studies came to: values on a common scale, time to random search's value, table and picture.

A study's value at a moment is the reward on the test prompts of the checkpoint that is the best within the KL budget on
the eval prompts by then, by the means of both readings for those that were read again after the search; where its KL on
the test prompts is over the budget by two standard errors, the SFT policy's. On a task's scale 0 is the SFT policy, 1
the best value seen there. Clocks are CPU-seconds of steps and evaluations, and arms are read at the median cost of
random search.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from ppo_core.config.kl_budget import is_within
from support.intervals import Interval

from .recipes import Recipe
from .runs import ALL_STARTS, BUDGET, KEYS, OPTUNA, RANDOM, SMALL_BUDGET, as_run
from .tasks import Start

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
    best: dict[int, tuple[float, float, float]] = {}
    """By trial: its reward, its KL, and what it is worth."""
    times, values = [], []
    for row in rows[rows.step > 0].itertuples():
        if not math.isnan(row.again_reward):
            reward, kl, worth = best.pop(row.trial)
            if is_within(kl := (kl + row.again_kl) / 2, row.again_kl_se, kl_budget):
                best[row.trial] = (reward + row.again_reward) / 2, kl, worth
        elif row.reward > best.get(row.trial, (-math.inf,))[0] and is_within(row.kl, row.kl_se, kl_budget):
            is_over = row.fresh_kl > kl_budget + 2 * row.fresh_kl_se
            best[row.trial] = row.reward, row.kl, baseline if is_over else row.fresh_reward
        chosen = max(best.values(), key=lambda one: one[0], default=(0.0, 0.0, baseline))[2]
        if chosen != (values[-1] if values else baseline):
            times.append(speed * row.cpu)
            values.append(chosen)
    return Study(task, start, budget, seed, np.array(times), np.array(values), speed * float(rows.cpu.max()))


@dataclass(frozen=True)
class Line:
    """One arm at one start and budget, over the tasks."""

    arm: str
    start: Start | Literal["all"]
    budget: int
    studies: int
    value: Interval
    """On the tasks' scales."""
    over_optuna: Interval | None
    """The difference to Optuna alone at the same task, start and seed."""
    worst: tuple[str, float] | None
    """The task where that difference is least in the mean."""
    speed: float
    """Median time to random search's mean value, as a share of what that takes; inf: most never reach it."""
    gain_kept: float | None
    """Of an arm's gain over random search at the fair start, the share that is left at this one; None: it has none."""


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
        for study in (study for found in self.arms.values() for study in found):
            self.best[study.task] = max(self.best[study.task], *study.values, -math.inf)

    def moment(self, task: str, budget: int) -> float:
        """Return the CPU-seconds at which the studies of a budget are read."""
        return self.costs[task] * budget / BUDGET

    def scaled(self, study: Study, moment: float) -> float:
        """Return the value at a moment on the task's scale."""
        baseline = self.baselines[study.task]
        return (study.value(moment, baseline) - baseline) / (self.best[study.task] - baseline)

    def _chosen(self, arm: str, start: Start, budget: int) -> list[Study]:
        """Return an arm's studies at a start and a budget.

        Those of an equal start stand in for a start that was not run, and others' beginnings for a budget.
        """
        is_run = any(study.start == start for study in self.arms[arm])
        at = start if is_run else as_run(arm, start)
        of_start = [study for study in self.arms[arm] if study.start == at]
        return [study for study in of_start if study.budget == budget] or of_start

    def values(self, arm: str, start: Start, budget: int) -> dict[str, dict[int, float]]:
        """Return the values of an arm's studies on the tasks' scales, by task and seed."""
        found: dict[str, dict[int, float]] = {}
        for study in self._chosen(arm, start, budget):
            found.setdefault(study.task, {})[study.seed] = self.scaled(study, self.moment(study.task, budget))
        return found

    def line(self, arm: str, start: Start, budget: int) -> Line | None:
        """Return what an arm came to at a start and a budget; None without studies."""
        values = self.values(arm, start, budget)
        if not values:
            return None
        gains = {task: self._gain(values[task], task, budget) for task in values}
        fair = self.values(arm, "fair", budget)
        fair_gains = {task: self._gain(fair[task], task, budget) for task in values if task in fair}
        has_gain = len(fair_gains) == len(gains) and sum(fair_gains.values()) > 0
        is_off = arm != RANDOM and start != "fair" and has_gain
        over = self._over_optuna(values, start, budget) if arm not in (RANDOM, OPTUNA) else {}
        means = {task: float(np.mean(found)) for task, found in over.items()}
        worst = min(means.items(), key=lambda each: each[1], default=None)
        return Line(
            arm,
            start,
            budget,
            sum(map(len, values.values())),
            Interval.of_groups({task: list(of_task.values()) for task, of_task in values.items()}),
            Interval.of_groups(over) if over else None,
            worst,
            float(np.median(self._times(arm, start, budget))),
            float(np.mean(list(gains.values())) / np.mean(list(fair_gains.values()))) if is_off else None,
        )

    def _gain(self, values: Mapping[int, float], task: str, budget: int) -> float:
        random = self.values(RANDOM, "fair", budget)[task]
        return float(np.mean(list(values.values())) - np.mean(list(random.values())))

    def _over_optuna(
        self, values: Mapping[str, Mapping[int, float]], start: Start, budget: int
    ) -> dict[str, list[float]]:
        other = self.values(OPTUNA, start, budget) if OPTUNA in self.arms else {}
        paired = {
            task: [value - other[task][seed] for seed, value in of_task.items() if seed in other[task]]
            for task, of_task in values.items()
            if task in other
        }
        return {task: found for task, found in paired.items() if found}

    def _times(self, arm: str, start: Start, budget: int) -> list[float]:
        """Return the time of each study to random search's mean value, as a share of what that takes."""
        wanted = {}
        for task, random in self.values(RANDOM, "fair", budget).items():
            share, baseline = float(np.mean(list(random.values()))), self.baselines[task]
            wanted[task] = baseline + share * (self.best[task] - baseline)
        times = [(study.reaches(wanted[study.task]), study.task) for study in self._chosen(arm, start, budget)]
        return [seconds / self.moment(task, budget) for seconds, task in times]

    def lines(self) -> list[Line]:
        """Return all lines of the table."""
        cases = [(start, BUDGET) for start in ALL_STARTS] + [("fair", SMALL_BUDGET)]
        found = [self.line(arm, start, budget) for start, budget in cases for arm in self.arms]
        known = [one for one in found if one is not None and (one.arm != RANDOM or one.start == "fair")]
        return known + [self._over_starts(arm) for arm in self.arms if arm != RANDOM]

    def _over_starts(self, arm: str) -> Line:
        """Return what an arm came to at the full budget over all starts."""
        values: dict[str, list[float]] = {}
        over: dict[str, list[float]] = {}
        times = []
        for start in ALL_STARTS:
            of_start = self.values(arm, start, BUDGET)
            for task, by_seed in of_start.items():
                values.setdefault(task, []).extend(by_seed.values())
            paired = self._over_optuna(of_start, start, BUDGET) if arm != OPTUNA else {}
            for task, found in paired.items():
                over.setdefault(task, []).extend(found)
            times += self._times(arm, start, BUDGET)
        means = {task: float(np.mean(found)) for task, found in over.items()}
        return Line(
            arm,
            "all",
            BUDGET,
            sum(map(len, values.values())),
            Interval.of_groups(values),
            Interval.of_groups(over) if over else None,
            min(means.items(), key=lambda each: each[1], default=None),
            float(np.median(times)),
            None,
        )

    def curves(self, arm: str) -> tuple[list[float], list[float]]:
        """Return shares of random search's cost, and the mean value of an arm's studies of the full budget by then."""
        shares = list(np.linspace(0, 1.25, POINTS))
        chosen = [study for study in self.arms[arm] if study.budget >= BUDGET]
        means = [np.mean([self.scaled(one, share * self.costs[one.task]) for one in chosen]) for share in shares]
        return shares, list(map(float, means))


def table(lines: Sequence[Line]) -> str:
    """Return the lines for people."""
    head = (
        f"{'start':12}{'budget':>7}  {'arm':18}{'studies':>8}{'value':>21}{'over Optuna':>22}{'worst task':>21}"
        f"{'time to random':>16}{'gain kept':>11}"
    )
    rows = []
    for one in lines:
        over = "" if one.over_optuna is None else one.over_optuna.text(2)
        worst = "" if one.worst is None else f"{one.worst[0]} {one.worst[1]:+.2f}"
        kept = "" if one.gain_kept is None else f"{one.gain_kept:.2f}"
        rows.append(
            f"{one.start:12}{one.budget:7}  {one.arm:18}{one.studies:8}{one.value.text(2):>21}{over:>22}{worst:>21}"
            f"{one.speed:16.2f}{kept:>11}"
        )
    return "\n".join([head, *rows])


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the lines as plain values; what is infinite is null."""
    return [asdict(one) | {"speed": None if math.isinf(one.speed) else one.speed} for one in lines]


def draw(battery: Battery, path: Path) -> None:
    """Write the picture: value against cost, a line an arm."""
    figure = go.Figure()
    for arm in battery.arms:
        shares, means = battery.curves(arm)
        figure.add_scatter(x=shares, y=means, name=arm, mode="lines")
    figure.update_layout(
        template="plotly_white",
        xaxis_title="CPU-seconds, as a share of random search's",
        yaxis_title="value: 0 the SFT policy, 1 the best seen",
        width=800,
        height=450,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path, include_plotlyjs=True)

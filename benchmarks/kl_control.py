"""How should β move? Random configurations of four of the battery's open tasks, each trained with β five ways.

python benchmarks/kl_control.py                   # about nine minutes on two cores; resumes where it was
python benchmarks/kl_control.py --configurations 2

A run's value is the best eval reward within the KL budget, 0 the SFT policy's and 1 the best of random search's trials.
Learning rates lie between half of the fair one and four times it: others hardly learn, or blow up, whatever β is.
"""

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))  # for tools/

import pandas as pd
from support.battery import runs
from support.battery.recipes import Recipe
from support.battery.tasks import fair_reference, make_task
from support.battery.words import recipes
from support.common import add_line, read_lines
from support.intervals import Interval

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import is_within
from ppo_core.trainer import ppo_trainer
from tuner.search.prior import spread_params
from tuner.study.spec import KL_TARGET, StudySpec

RESULTS = runs.WORK / "kl_control.jsonl"
RATES = (0.5, 4.0)
"""Ends of the learning rates, as multiples of the fair one."""


def ways(task: Recipe, rng: Random) -> dict[str, dict[str, Any]]:
    """Return by name how β moves in the runs of a configuration; `kl_coef` is a multiple of the reference's."""
    target = KL_TARGET * task.kl_budget
    return {
        "fixed, at random": {"kl_coef": 400 ** (rng.random() - 0.5), "kl_target": None},
        "fixed, the reference's": {"kl_coef": 1.0, "kl_target": None},
        "adaptive": {"kl_coef": 1.0, "kl_target": target},
        "adaptive, from 10 times it": {"kl_coef": 10.0, "kl_target": target},
        "landing": {"kl_coef": 1.0, "kl_target": target, "kl_controller": "landing"},
    }


def train(job: tuple[str, int, str]) -> dict[str, Any]:
    """Train one run, and return its value and where its KL ended, as a share of the budget."""
    name, number, way = job
    task = next(one for one in recipes("open") if one.name == name)
    spec = StudySpec.load(make_task(task, runs.WORK / name)["fair"])
    reference, rng = fair_reference(task), Random(f"{name} {number}")
    changed = ways(task, rng)[way]
    low, high = (factor * reference["learning_rate"] for factor in RATES)
    values = spec.config({}).to_dict() | spread_params(spec.search, 0, number)
    values |= {"learning_rate": low * (high / low) ** rng.random(), "kl_controller": "adaptive"} | changed
    values["kl_coef"] = changed["kl_coef"] * reference["kl_coef"]
    baseline, best, kl, ended = math.nan, -math.inf, 0.0, False
    for report in ppo_trainer(PPOConfig.from_dict(values), spec.task, device="cpu"):
        if report.is_evaluation:
            reward, kl, kl_se = (report.metrics[key] for key in ("eval/reward", "eval/kl", "eval/kl_se"))
            baseline = reward if report.step == 0 else baseline
            best = max(best, reward) if is_within(kl, kl_se, task.kl_budget) else best
        if report.metrics.get("objective/kl_exact", 0.0) > spec.kl_limit:
            break
    else:
        ended = True
    return {
        "task": name, "number": number, "way": way, "baseline": baseline, "best": best,
        "kl": kl / task.kl_budget if ended else math.inf,
    }  # fmt: skip


def tops() -> Mapping[str, float]:
    """Return the best eval reward within the budget of random search's recorded trials, by task."""
    found = runs.read_results(runs.RANDOM)
    budgets = {task.name: task.kl_budget for task in recipes("open")}
    rows = found[found.task.isin(list(budgets)) & found.reward.notna()]
    within = [is_within(row.kl, row.kl_se, budgets[row.task]) for row in rows.itertuples()]
    best: dict[str, float] = rows[within].groupby("task").reward.max().to_dict()
    return best


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: value with its 95% interval over runs, and how many ended at 0.6 to 1 of the budget."""
    frame, top = pd.DataFrame(results), tops()
    frame["value"] = [(row.best - row.baseline) / (top[row.task] - row.baseline) for row in frame.itertuples()]
    lines = [f"{'β':28}{'runs':>5}{'value':>22}{'KL landed':>12}"]
    for way, group in frame.groupby("way", sort=False):
        landed = statistics.fmean(0.6 <= kl <= 1 for kl in group.kl)
        lines.append(f"{way:28}{len(group):>5}{Interval.of(list(group.value)).text(2):>22}{landed:>12.0%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, metavar="N", default=5, help="of each task (5)")
    amount = parser.parse_args().configurations
    os.environ["OMP_NUM_THREADS"] = "1"
    tasks = recipes("open")
    for task in tasks:
        make_task(task, runs.WORK / task.name)
    names = list(ways(tasks[0], Random(0)))
    wanted = [(task.name, number, way) for number in range(amount) for task in tasks for way in names]
    known = read_lines(RESULTS)
    have = {(one["task"], one["number"], one["way"]) for one in known}
    context = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        for one in pool.map(train, [job for job in wanted if job not in have]):
            known.append(one)
            add_line(RESULTS, one)
    order = {name: place for place, name in enumerate(names)}
    print(table(sorted((one for one in known if one["number"] < amount), key=lambda one: order[one["way"]])))


if __name__ == "__main__":
    main()

"""Is the KL held, and what is a run worth, from learning rates over four powers of ten? The open tasks of both makes.

python benchmarks/kl_control.py configurations           # random configurations, a rate each: half an hour; resumes
python benchmarks/kl_control.py configurations --number 5
python benchmarks/kl_control.py rates                    # the fair configuration from five rates: a quarter of an hour
python benchmarks/kl_control.py rates --iterations 120
python benchmarks/kl_control.py settings                 # eight other settings, three rates and seeds: ten minutes
python benchmarks/kl_control.py early                    # what reward and KL early in a run say of its value: seconds
python benchmarks/kl_control.py exported                 # what another trainer loses that cannot keep a pace: minutes

A run's value is the best eval reward within the KL budget, 0 the SFT policy's and 1 the best of random search's trials.
It holds its KL if the training KL of its last third is 0.6 to 1 of the budget in the mean. "landing" is recorded: it is
how β moved before runs kept their pace (commit d918634a), on the same configurations, with a critic in reward.
"""

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))  # for tools/

import numpy as np
import pandas as pd
from scipy.stats import spearmanr
from support.battery import runs
from support.battery.recipes import Recipe
from support.battery.tasks import fair_reference, make_task, recipes
from support.common import add_line, read_lines
from support.intervals import Interval

from ppo_core.config.declare import Range
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import is_within
from ppo_core.trainer import ppo_trainer
from tuner.exchange.trainers import WARMUP, settled
from tuner.search.prior import spread_params
from tuner.study.spec import KL_TARGET, StudySpec

RESULTS = runs.WORK / "kl_control.jsonl"
RECORDED = runs.DATA.parent / "kl_control.jsonl"
PACED, ADAPTIVE = "keeps its pace", "schedule, β adapts"
RATES = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Learning rates, as multiples of the fair one; those of random configurations lie between the ends."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "1 epoch, 1 mini-batch": {"num_ppo_epochs": 1, "num_mini_batches": 1},
    "1 epoch, 32 mini-batches": {"num_ppo_epochs": 1, "num_mini_batches": 32},
    "6 epochs, 4 mini-batches": {"num_ppo_epochs": 6, "num_mini_batches": 4},
    "separate critic": {"value_model": "separate"},
    "without a critic (RLOO)": {"advantage_estimator": "rloo", "num_generations": 4},
    "LoRA": {"use_peft": True},
    "bfloat16": {"bf16": True},
    "separate, LoRA, bfloat16": {"value_model": "separate", "use_peft": True, "bf16": True},
}
"""Other settings of the fair configuration, run on a task of each make."""
SEEDS = (1, 2)
"""Other seeds of each of them, at the fair rate."""
HELD = (0.6, 1.0)
"""Mean training KL of the last third, as shares of the budget, of a run that holds it."""


@dataclass(frozen=True)
class Job:
    """One run. A `number` is that of a random configuration; None: the fair one."""

    task: str
    way: str
    number: int | None
    factor: float
    """Learning rate, as a multiple of the fair one."""
    iterations: int | None = None
    """None: the task's."""
    setting: str | None = None
    """One of SETTINGS."""
    seed: int | None = None
    """None: the task's."""

    @property
    def key(self) -> dict[str, Any]:
        """What its result is found by."""
        fields = {"task": self.task, "way": self.way, "number": self.number, "factor": round(self.factor, 6)}
        return fields | {"iterations": self.iterations, "setting": self.setting, "seed": self.seed}


def random_factor(task: str, number: int) -> float:
    """Return the rate of a random configuration: evenly over the powers of ten between the ends of RATES."""
    low, high = RATES[0], RATES[-1]
    return float(low * (high / low) ** Random(f"{task} {number}").random())


def config_of(job: Job, task: Recipe, spec: StudySpec) -> PPOConfig:
    """Return a run's configuration."""
    own = {name: span for name, span in spec.search.items() if name not in ("learning_rate", "kl_coef", "kl_target")}
    own["lam"] = Range(0.9, 1.0)
    reference = fair_reference(task)
    values = spec.config({}).to_dict() | ({} if job.number is None else spread_params(own, 0, job.number))
    values |= {"learning_rate": job.factor * reference["learning_rate"], "kl_target": KL_TARGET * task.kl_budget}
    values |= {"kl_coef": reference["kl_coef"], "kl_step": None, "kl_controller": None}
    if job.iterations is not None:
        values["total_episodes"] = job.iterations * int(reference["batch_size"])
    if job.setting is not None:
        values |= {"mini_batch_size": None, "num_mini_batches": 2} | SETTINGS[job.setting]
    if job.seed is not None:
        values["seed"] = job.seed
    return PPOConfig.from_dict(values | {"lr_controller": "kl_step" if job.way == PACED else "schedule"})


def train(job: Job) -> dict[str, Any]:
    """Train one run; return what its value is made of, and shares of the KL budget: at the end, last third, highest."""
    task = next(one for one in recipes("open") if one.name == job.task)
    spec = StudySpec.load(make_task(task, runs.WORK / job.task)["fair"])
    return job.key | outcome(config_of(job, task, spec), task, spec)[0]


def train_exported(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a task's fair configuration at its own pace, then as `export` gives it to trainers without that."""
    task = next(one for one in recipes("open") if one.name == name)
    spec = StudySpec.load(make_task(task, runs.WORK / name)["fair"])
    config = config_of(Job(name, PACED, None, 1.0), task, spec)
    paced, steps = outcome(config, task, spec)
    std = steps[-1]["val/return_std"]
    kl_coef, rate = (settled([step[metric] for step in steps]) for metric in ("objective/kl_coef", "lr"))
    exported = replace(
        config, lr_controller="schedule", kl_target=None, kl_coef=kl_coef, learning_rate=rate,
        lr_scheduler_type="constant_with_warmup", warmup_ratio=WARMUP, value_lr_scheduler_type=config.lr_scheduler_type,
        normalize_values=False, vf_coef=config.vf_coef / std**2, cliprange_value=(config.cliprange_value or 0.0) * std,
    )  # fmt: skip
    key = {"task": name}
    return key | {"way": PACED} | paced, key | {"way": "exported"} | outcome(exported, task, spec)[0]


def outcome(config: PPOConfig, task: Recipe, spec: StudySpec) -> tuple[dict[str, Any], list[Mapping[str, float]]]:
    """Train a run; return its outcome, and the metrics of its iterations."""
    baseline, best, kl = math.nan, -math.inf, math.nan
    kls: list[float] = []
    evaluations: list[tuple[float, float]] = []
    steps: list[Mapping[str, float]] = []
    for report in ppo_trainer(config, spec.task, device="cpu"):
        if report.is_evaluation:
            reward, kl, kl_se = (report.metrics[key] for key in ("eval/reward", "eval/kl", "eval/kl_se"))
            baseline = reward if report.step == 0 else baseline
            evaluations.append((reward, kl / task.kl_budget))
            best = max(best, reward) if is_within(kl, kl_se, task.kl_budget) else best
        if report.step:
            steps.append(report.metrics)
            kls.append(report.metrics["objective/kl_exact"] / task.kl_budget)
            if not kls[-1] <= spec.kl_limit / task.kl_budget:
                kl = math.inf
                break
    third = kls[-max(1, len(kls) // 3) :]
    ended = math.isfinite(kl)
    return {
        "baseline": baseline, "best": best, "kl": kl / task.kl_budget if ended else None,
        "last_third": statistics.fmean(third) if ended else None, "highest": max(kls), "evaluations": evaluations,
    }, steps  # fmt: skip


def tops() -> Mapping[str, float]:
    """Return the best eval reward within the budget of random search's recorded trials, by task."""
    found = runs.read_results(runs.RANDOM)
    budgets = {task.name: task.kl_budget for task in recipes("open")}
    rows = found[found.task.isin(list(budgets)) & found.reward.notna()]
    within = [is_within(row.kl, row.kl_se, budgets[row.task]) for row in rows.itertuples()]
    best: dict[str, float] = rows[within].groupby("task").reward.max().to_dict()
    return best


def table(results: Sequence[Mapping[str, Any]], by: str) -> str:
    """Return the table of runs grouped by a column, with 95% intervals of the mean over runs."""
    frame, top = pd.DataFrame(results), tops()
    frame["value"] = [(row.best - row.baseline) / (top[row.task] - row.baseline) for row in frame.itertuples()]
    frame["kl"], frame["last_third"] = frame.kl.fillna(math.inf), frame.last_third.fillna(math.inf)
    lines = [f"{by:28}{'runs':>5}{'value':>22}{'KL held':>9}{'end over':>10}{'over 1.2':>10}{'worst end':>11}"]
    for name, group in frame.groupby(by, sort=False):
        held = statistics.fmean(HELD[0] <= kl <= HELD[1] for kl in group.last_third)
        over, far = (statistics.fmean(kl > most for kl in group.kl) for most in (1, 1.2))
        worst = max(group.kl)
        lines.append(
            f"{name:<28}{len(group):>5}{Interval.of(list(group.value)).text(2):>22}{held:>9.0%}{over:>10.0%}{far:>10.0%}"
            f"{'broken' if worst == math.inf else f'{worst:.2f}':>11}"
        )
    return "\n".join(lines)


SHARES = (0.1, 0.2, 0.3, 0.5)
"""Shares of a run at which it is read early."""
EARLY: Mapping[str, Callable[[Sequence[tuple[float, float]]], float]] = {
    "reward": lambda read: read[-1][0],
    "best reward within the budget": lambda read: max(reward for reward, kl in read if kl <= 1),
    "KL": lambda read: read[-1][1],
    "reward gain over √KL": lambda read: (read[-1][0] - read[0][0]) / math.sqrt(max(read[-1][1], 0.02)),
}
"""What may rank runs early, from their evaluations so far: reward, and KL as a share of the budget."""
DRAWS = 1000


def early_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return how well each early score ranks the runs of one task by value, and what its best third is worth.

    Both are means over tasks; the intervals, of 95%, resample a task's runs.
    """
    top, tasks = tops(), list(dict.fromkeys(one["task"] for one in results))
    of_task = [[one for one in results if one["task"] == task] for task in tasks]
    values = [
        np.array([(one["best"] - one["baseline"]) / (top[one["task"]] - one["baseline"]) for one in runs_of])
        for runs_of in of_task
    ]
    rng = np.random.default_rng(0)
    draws = [[rng.integers(0, len(each), len(each)) for each in values] for _ in range(DRAWS)]
    lines = [f"{'score':30}{'at':>6}{'rank correlation':>22}{'best third over mean':>24}"]
    for name, score in EARLY.items():
        for share in SHARES:
            scores = [
                np.array(
                    [score(one["evaluations"][: 1 + round(share * (len(one["evaluations"]) - 1))]) for one in each]
                )
                for each in of_task
            ]
            pairs = list(zip(scores, values, strict=True))
            found = [_ranks([(s[i], v[i]) for (s, v), i in zip(pairs, draw, strict=True)]) for draw in draws]
            ends = np.percentile(found, (2.5, 97.5), axis=0)
            texts = [f"{m:.2f} [{a:.2f}, {b:.2f}]" for m, a, b in zip(_ranks(pairs), *ends, strict=True)]
            lines.append(f"{name:30}{share:>6.0%}{texts[0]:>22}{texts[1]:>24}")
    return "\n".join(lines)


def _until(share: float, evaluations: Sequence[Any]) -> Sequence[Any]:
    return evaluations[: 1 + round(share * (len(evaluations) - 1))]


def _ranks(pairs: Sequence[tuple[Any, Any]]) -> tuple[float, float]:
    """Return the mean rank correlation, and the mean value of each best third over that of all."""
    correlations = [np.nan_to_num(spearmanr(scores, values).statistic) for scores, values in pairs]
    thirds = [values[np.argsort(-scores)[: len(values) // 3]].mean() - values.mean() for scores, values in pairs]
    return float(np.mean(correlations)), float(np.mean(thirds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("configurations", "rates", "settings", "early", "exported"))
    parser.add_argument("--number", type=int, metavar="N", default=20, help="configurations of each task (20)")
    parser.add_argument(
        "--iterations", type=int, metavar="N", help="of runs of the fair configuration; unset: the task's"
    )
    parser.add_argument("--way", nargs="+", choices=(PACED, ADAPTIVE), default=[PACED, ADAPTIVE])
    parser.add_argument("--workers", type=int, metavar="N", default=2, help="runs at a time (2)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [task.name for task in recipes("open")]
    for task in recipes("open"):
        make_task(task, runs.WORK / task.name)
    context = get_context("spawn")
    if arguments.part == "exported":
        with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
            pairs = list(pool.map(train_exported, names))
        for ways in zip(*pairs, strict=True):
            print(f"{ways[0]['way']}\n{table(ways, 'task')}\n")
        print(table([one for pair in pairs for one in pair], "way"))
        return
    if arguments.part == "early":
        print(early_table([one for one in read_lines(RESULTS) if one["number"] is not None and one["way"] == PACED]))
        return
    if arguments.part == "rates":
        jobs = [Job(name, PACED, None, factor, arguments.iterations) for factor in RATES for name in names]
    elif arguments.part == "settings":
        draws = [(rate, None) for rate in RATES[::2]] + [(1.0, seed) for seed in SEEDS]
        both = (names[0], names[-1])
        jobs = [Job(t, PACED, None, rate, None, one, seed) for one in SETTINGS for rate, seed in draws for t in both]
    else:
        numbers = range(arguments.number)
        jobs = [Job(name, PACED, number, random_factor(name, number)) for number in numbers for name in names]
    wanted = [replace(job, way=way) for job in jobs for way in arguments.way]
    known = [*read_lines(RECORDED), *read_lines(RESULTS)]
    have = [{name: one.get(name) for name in wanted[0].key} for one in known]
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        for one in pool.map(train, [job for job in wanted if job.key not in have]):
            known.append(one)
            add_line(RESULTS, one)
    keys = [job.key for job in wanted] + [job.key | {"way": "landing"} for job in wanted]
    shown = [one for one in known if {name: one.get(name) for name in wanted[0].key} in keys]
    for way in dict.fromkeys(one["way"] for one in shown):
        of_way = [one for one in shown if one["way"] == way]
        print(f"{way}\n{table(of_way, 'task')}\n")
    print(table(shown, {"configurations": "way", "rates": "factor", "settings": "setting"}[arguments.part]))


if __name__ == "__main__":
    main()

"""Does the task tell configurations apart? The spread of values over random configurations against that over seeds.

    .venv/bin/python benchmarks/value_spread.py

Draws 12 random configurations from a study's search space, runs each to its end (no guard), runs the one with the
median value on two more seeds, and prints every value, both standard deviations and their ratio.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from ppo_core.hyperparameters import PPOConfig
from ppo_core.trainer import ppo_trainer
from tuner.objective import trial_value
from tuner.projection import Projection
from tuner.spec import SamplerSpec, StudySpec


def run(config: PPOConfig, task: str) -> tuple[float, float]:
    """Train one configuration to its end; return its value and eval KL in nats per response."""
    reports = ppo_trainer(config, task, device="cpu")
    result = trial_value([{"step": report.step, **report.metrics} for report in reports if report.is_evaluation])
    if result.value is None or result.kl is None:
        raise SystemExit("a configuration left no finite evaluation; draw others with --seed")
    return result.value, result.kl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", default="studies/reviews.toml")
    parser.add_argument("--configurations", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="of the configurations (default: the study's)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = replace(StudySpec.load(arguments.study), sampler=SamplerSpec(name="random"))
    if arguments.seed is not None:
        spec = replace(spec, seed=arguments.seed)
    sampler = Projection(spec, [])
    results = []
    for number in range(arguments.configurations):
        start = time.perf_counter()
        params = sampler.propose(number)
        sampler.note_running(number, params)
        config = spec.config(params)
        value, kl = run(config, spec.task)
        results.append((value, kl, config))
        seconds = time.perf_counter() - start
        print(f"configuration {number:2d}: value {value:7.3f}  KL {kl:7.2f}  {seconds:5.1f} s", flush=True)
    median = sorted(results, key=lambda result: result[0])[len(results) // 2]
    repeats = [median[0]]
    for seed in range(1, arguments.seeds):
        value, kl = run(replace(median[2], seed=spec.seed + seed), spec.task)
        repeats.append(value)
        print(f"the median one, seed {spec.seed + seed}: value {value:7.3f}  KL {kl:7.2f}", flush=True)
    over_configurations = statistics.stdev(value for value, _, _ in results)
    over_seeds = statistics.stdev(repeats)
    print(f"standard deviation over {len(results)} configurations: {over_configurations:.3f}")
    print(f"standard deviation over {len(repeats)} seeds of one:    {over_seeds:.3f}")
    print(f"ratio: {over_configurations / over_seeds:.1f}")


if __name__ == "__main__":
    main()

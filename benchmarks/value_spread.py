"""Does the task tell configurations apart? The spread of values over random configurations against that over seeds.

    .venv/bin/python benchmarks/value_spread.py

Draws 12 random configurations from a study's search space, runs each to its end (no guard), runs four of them,
evenly spaced by value from the second worst up, on two more seeds, and prints every value and standard deviation.
The ratio is to the median of the four: rates near the upper end of the space make a run unstable, and its seeds
differ as much as configurations do.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from ppo_core.hyperparameters import PPOConfig
from ppo_core.trainer import ppo_trainer
from tuner.scoring import trial_value
from tuner.search.sampler import Projection
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
    parser.add_argument("--repeated", type=int, default=4, help="configurations that are run on several seeds")
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
    over_seeds = []
    ranked = sorted(range(len(results)), key=lambda number: results[number][0])
    for number in ranked[1 :: max(1, len(ranked) // arguments.repeated)][: arguments.repeated]:
        first, _, config = results[number]
        more = [run(replace(config, seed=spec.seed + seed), spec.task)[0] for seed in range(1, arguments.seeds)]
        over_seeds.append(statistics.stdev([first, *more]))
        values = " ".join(f"{value:7.3f}" for value in (first, *more))
        rate = config.learning_rate
        print(
            f"configuration {number:2d} on {arguments.seeds} seeds:{values}  rate {rate:.2g}  std {over_seeds[-1]:.3f}",
            flush=True,
        )
    over_configurations = statistics.stdev(value for value, _, _ in results)
    within = statistics.median(over_seeds)
    print(f"standard deviation over {len(results)} configurations:       {over_configurations:.3f}")
    print(f"standard deviation over seeds, median of {len(over_seeds)}: {within:.3f}")
    print(f"ratio: {over_configurations / within:.1f}")


if __name__ == "__main__":
    main()

"""Do our PPO and TRL's learn the same? Same policy, reward model, prompts and settings, a few seeds each.

    .venv/bin/python benchmarks/against_trl.py

Trains both on the reviews task, judges both policies by the same evaluation on held-out prompts, prints reward and KL
at each evaluation and at the end, and says whether they agree within the noise of the seeds.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from multiprocessing import get_context

from support.curves import LIMIT, Curve, Difference, Measure, agree, differences

OURS, TRL = "ours", "TRL"
RULE = (
    f"They agree if at no evaluation the means differ by more than {LIMIT:g} standard errors; the standard error comes "
    "from the spread over seeds, pooled over both sides, the evaluation and its two neighbours."
)
KNOWN_DIFFERENCES = (
    "TRL puts the score on the token after the end-of-sequence token, and trains a value there; ours on the "
    "end-of-sequence token itself",
    "TRL takes the old log-probabilities from generate's scores; ours from the training's own forward pass",
    "TRL reads a sampled padding token as the response's end",
    "TRL has one AdamW and one rate for policy and critic, and never clips gradients; ours runs here with equal rates "
    "and a clip that never bites",
    "the reward model scores the text on both sides: TRL would also feed it the end-of-sequence token, so it gets a "
    "wrapper here that leaves that out",
    "prompts, samples and shuffles come from other random streams",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of each side (at least 2)")
    parser.add_argument("--episodes", type=int, help="length of a run (default: the benchmark's)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON with all curves as well")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds = {arguments.seeds} is not allowed; expected at least 2")
    if find_spec("trl") is None:
        raise SystemExit("against_trl.py: TRL is not installed; run: pip install -e '.[bench]'")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    curves = train(arguments.seeds, arguments.episodes)
    found: dict[Measure, list[Difference]] = {
        "reward": differences(curves[OURS], curves[TRL], "reward"),
        "kl": differences(curves[OURS], curves[TRL], "kl"),
    }
    for measure, title in (("reward", "reward"), ("kl", "exact KL, nats per response")):
        print(f"\n{title}\n{table(found[measure])}")
    print("\nAt the end, mean ± standard deviation over seeds:")
    for i, side in enumerate((OURS, TRL)):
        last = {measure: of_measure[-1] for measure, of_measure in found.items()}
        ends = (f"{measure} {end.means[i]:.3f} ± {end.spreads[i]:.3f}" for measure, end in last.items())
        print(f"  {side:5}", ",  ".join(ends))
    verdicts = {measure: verdict(measure, of_measure) for measure, of_measure in found.items()}
    print("", RULE, *verdicts.values(), "Known differences:", *(f"- {line}" for line in KNOWN_DIFFERENCES), sep="\n")
    if arguments.json:
        agreements = {measure: agree(of_measure) for measure, of_measure in found.items()}
        runs = [asdict(curve) for of_side in curves.values() for curve in of_side]
        print(json.dumps({"agree": agreements, "curves": runs}))


def train(seeds: int, episodes: int | None) -> dict[str, list[Curve]]:
    """Return the curves of both sides, each run in a process of its own, one at a time."""
    from support import runs

    settings = runs.Settings() if episodes is None else runs.Settings(total_episodes=episodes)
    sides: dict[str, Callable[[runs.Settings, int], Curve]] = {OURS: runs.run_ours, TRL: runs.run_trl}
    curves: dict[str, list[Curve]] = {side: [] for side in sides}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for seed in range(seeds):
            for side, run in sides.items():
                start = time.perf_counter()
                curve = pool.submit(run, settings, seed).result()
                curves[side].append(curve)
                end, seconds = curve.points[-1], time.perf_counter() - start
                message = f"{side:5} seed {seed}: reward {end.reward:.3f}  KL {end.kl:.2f}  {seconds:.0f} s"
                print(message, file=sys.stderr, flush=True)
    return curves


def table(found: list[Difference]) -> str:
    """Return the evaluations line by line: means, spreads, and the difference in standard errors."""
    lines = [f"{'episodes':>9}{OURS:>18}{TRL:>18}{'difference':>12}{'in std. errors':>16}"]
    for at in found:
        ours, trl = (f"{mean:.3f} ± {spread:.3f}" for mean, spread in zip(at.means, at.spreads, strict=True))
        lines.append(f"{at.episode:9}{ours:>18}{trl:>18}{at.means[0] - at.means[1]:12.3f}{at.errors:16.1f}")
    return "\n".join(lines)


def verdict(measure: str, found: list[Difference]) -> str:
    """Return in one sentence whether the curves agree."""
    worst = max(found, key=lambda difference: abs(difference.errors))
    how = "agree within seed noise" if agree(found) else "differ by more than seed noise"
    return (
        f"The {measure.replace('kl', 'KL')} curves {how}: the largest difference is {abs(worst.errors):.1f} standard "
        f"errors, after {worst.episode} episodes."
    )


if __name__ == "__main__":
    main()

"""How long one PPO iteration takes, ours against TRL's, and how much memory.

    .venv/bin/python benchmarks/ppo_iteration.py

A process each for TRL (which has a separate critic only), ours with a shared trunk and ours with a separate critic.
After an iteration to warm up they take turns, one iteration at a time, while the others sleep. A ratio is the median
time of ours over TRL's: lower is better. `benchmarks/README.md` says what is timed and what makes it the same work.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from support.shape import Shape
from support.turns import Lap, Side, alternate

TRL, SHARED, SEPARATE = "trl", "shared_trunk", "separate_critic"
FEWEST_PAIRS = 5


@dataclass(frozen=True)
class Result:
    """What the JSON says: times are medians in seconds, memory is each process's peak, by side where there are several.

    A floor is what the iteration's matrix multiplications alone take here; its share is of our time.
    """

    shared_trunk_ratio: float
    separate_critic_ratio: float
    seconds: dict[str, float]
    fastest_seconds: dict[str, float]
    slowest_seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    phase_seconds: dict[str, dict[str, float]]
    floor_seconds: dict[str, float]
    floor_gflop: dict[str, float]
    shared_trunk_floor_share: float
    separate_critic_floor_share: float
    peak_mib: dict[str, float]
    optimizer_steps: dict[str, int]
    response_tokens: dict[str, int]
    pairs: int
    threads: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=FEWEST_PAIRS, help=f"rounds of turns (at least {FEWEST_PAIRS})")
    parser.add_argument("--threads", type=int, help="of each side (default: what torch takes)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    arguments = parser.parse_args()
    if arguments.pairs < FEWEST_PAIRS:
        parser.error(f"--pairs = {arguments.pairs} is not allowed; expected at least {FEWEST_PAIRS}")
    if arguments.threads is not None and arguments.threads < 1:
        parser.error(f"--threads = {arguments.threads} is not allowed; expected at least 1")
    if find_spec("trl") is None:
        raise SystemExit("ppo_iteration.py: TRL is not installed; run: pip install -e '.[bench]'")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    shape = Shape()
    result = compare(shape, arguments.pairs, arguments.threads)
    print(json.dumps(asdict(result)) if arguments.json else table(shape, result))


def compare(shape: Shape, pairs: int, threads: int | None) -> Result:
    """Return the comparison.

    Raises:
        SystemExit: a side failed, or the sides did not do the same work.
    """
    with tempfile.TemporaryDirectory() as folder:
        return summarise(shape, run_sides(Path(folder), shape, pairs, threads))


def run_sides(folder: Path, shape: Shape, pairs: int, threads: int | None) -> dict[str, list[Lap]]:
    """Return the laps of the three sides on models saved in `folder`."""
    from support import ours, trls
    from support.models import save_models

    saved = save_models(folder, shape)
    sides = [
        Side(TRL, trls.run, saved, shape, threads),
        Side(SHARED, ours.run, saved, shape, threads, "shared"),
        Side(SEPARATE, ours.run, saved, shape, threads, "separate"),
    ]
    try:
        return alternate(sides, pairs, partial(require_same_work, shape))
    finally:
        for side in sides:
            side.close()


def require_same_work(shape: Shape, name: str, lap: Lap) -> None:
    """Raise SystemExit unless the lap took all optimizer steps and made all tokens."""
    wanted = (shape.optimizer_steps, shape.episodes * shape.new_tokens)
    if (lap.optimizer_steps, lap.response_tokens) != wanted:
        raise SystemExit(
            f'the side "{name}" took {lap.optimizer_steps} optimizer steps on {lap.response_tokens} tokens in an '
            f"iteration, not {wanted[0]} on {wanted[1]}: the times would not compare"
        )


def summarise(shape: Shape, laps: dict[str, list[Lap]]) -> Result:
    """Return the medians, and the floors as measured now."""
    import torch
    from support import floor

    threads = laps[TRL][0].threads
    torch.set_num_threads(threads)
    seconds = {name: statistics.median(lap.seconds for lap in of_side) for name, of_side in laps.items()}
    floors = {SHARED: floor.measure(shape, False), SEPARATE: floor.measure(shape, True)}
    return Result(
        shared_trunk_ratio=seconds[SHARED] / seconds[TRL],
        separate_critic_ratio=seconds[SEPARATE] / seconds[TRL],
        seconds=seconds,
        fastest_seconds={name: min(lap.seconds for lap in of_side) for name, of_side in laps.items()},
        slowest_seconds={name: max(lap.seconds for lap in of_side) for name, of_side in laps.items()},
        cpu_seconds={name: statistics.median(lap.cpu_seconds for lap in of_side) for name, of_side in laps.items()},
        phase_seconds={name: _phases(of_side) for name, of_side in laps.items()},
        floor_seconds={name: found.seconds for name, found in floors.items()},
        floor_gflop={name: found.gflop for name, found in floors.items()},
        shared_trunk_floor_share=floors[SHARED].seconds / seconds[SHARED],
        separate_critic_floor_share=floors[SEPARATE].seconds / seconds[SEPARATE],
        peak_mib={name: of_side[-1].peak_mib for name, of_side in laps.items()},
        optimizer_steps={name: of_side[-1].optimizer_steps for name, of_side in laps.items()},
        response_tokens={name: of_side[-1].response_tokens for name, of_side in laps.items()},
        pairs=len(laps[TRL]),
        threads=threads,
    )


def _phases(laps: Sequence[Lap]) -> dict[str, float]:
    return {name: statistics.median(lap.phases[name] for lap in laps) for name in laps[0].phases}


def table(shape: Shape, result: Result) -> str:
    """Return the result for people."""
    lines = [
        f"{shape}; {result.threads} threads; medians of {result.pairs} rounds",
        "",
        f"{'':18}{'seconds':>9}{'range':>17}{'CPU s':>8}{'over TRL':>10}{'floor share':>13}{'peak MiB':>10}{'steps':>7}"
        f"{'tokens':>8}",
    ]
    ratios = {TRL: 1.0, SHARED: result.shared_trunk_ratio, SEPARATE: result.separate_critic_ratio}
    shares = {SHARED: result.shared_trunk_floor_share, SEPARATE: result.separate_critic_floor_share}
    names = {TRL: "TRL", SHARED: "ours, shared", SEPARATE: "ours, separate"}
    for key, name in names.items():
        span = f"{result.fastest_seconds[key]:.3f} to {result.slowest_seconds[key]:.3f}"
        share = f"{shares[key]:.2f}" if key in shares else ""
        lines.append(
            f"{name:18}{result.seconds[key]:9.3f}{span:>17}{result.cpu_seconds[key]:8.3f}{ratios[key]:10.2f}"
            f"{share:>13}{result.peak_mib[key]:10.0f}{result.optimizer_steps[key]:7}{result.response_tokens[key]:8}"
        )
    lines.append("")
    for key in (SHARED, SEPARATE):
        phases = ", ".join(f"{name} {value:.3f}" for name, value in result.phase_seconds[key].items())
        lines.append(
            f"{names[key]:18}{phases}; its {result.floor_gflop[key]:.1f} GFLOP of matrix multiplications alone: "
            f"{result.floor_seconds[key]:.3f} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

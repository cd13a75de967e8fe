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
from collections.abc import Mapping, Sequence
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
    """What a side took: medians over the rounds, in seconds, and the most memory that its process held."""

    ratio: float
    """Of `seconds` to TRL's."""
    seconds: float
    fastest_seconds: float
    slowest_seconds: float
    cpu_seconds: float
    phase_seconds: dict[str, float]
    """Where the side tells."""
    peak_mib: float
    optimizer_steps: int
    response_tokens: int
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
    with tempfile.TemporaryDirectory() as folder:
        laps = run_sides(Path(folder), shape, arguments.pairs, arguments.threads)
    found = {side: summarise(of_side, laps[TRL]) for side, of_side in laps.items()}
    print(json.dumps({side: asdict(one) for side, one in found.items()}) if arguments.json else table(shape, found))


def run_sides(folder: Path, shape: Shape, pairs: int, threads: int | None) -> dict[str, list[Lap]]:
    """Return the laps of the three sides on models saved in `folder`.

    Raises:
        SystemExit: a side failed, or the sides did not do the same work.
    """
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


def summarise(laps: Sequence[Lap], theirs: Sequence[Lap]) -> Result:
    """Return what a side's laps come to, beside TRL's."""
    seconds = statistics.median(lap.seconds for lap in laps)
    last = laps[-1]
    return Result(
        ratio=seconds / statistics.median(lap.seconds for lap in theirs),
        seconds=seconds,
        fastest_seconds=min(lap.seconds for lap in laps),
        slowest_seconds=max(lap.seconds for lap in laps),
        cpu_seconds=statistics.median(lap.cpu_seconds for lap in laps),
        phase_seconds={name: statistics.median(lap.phases[name] for lap in laps) for name in last.phases},
        peak_mib=last.peak_mib,
        optimizer_steps=last.optimizer_steps,
        response_tokens=last.response_tokens,
        threads=last.threads,
    )


def table(shape: Shape, found: Mapping[str, Result]) -> str:
    """Return the results for people."""
    lines = [
        f"{shape}; {found[TRL].threads} threads; medians",
        "",
        f"{'':18}{'seconds':>9}{'range':>17}{'CPU s':>8}{'over TRL':>10}{'peak MiB':>10}{'steps':>7}{'tokens':>8}",
    ]
    for side, name in ((TRL, "TRL"), (SHARED, "ours, shared"), (SEPARATE, "ours, separate")):
        one = found[side]
        span = f"{one.fastest_seconds:.3f} to {one.slowest_seconds:.3f}"
        lines.append(
            f"{name:18}{one.seconds:9.3f}{span:>17}{one.cpu_seconds:8.3f}{one.ratio:10.2f}{one.peak_mib:10.0f}"
            f"{one.optimizer_steps:7}{one.response_tokens:8}"
        )
        if one.phase_seconds:
            lines.append("  " + ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in one.phase_seconds.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""What a trial costs the controller, against Optuna's bare ask, suggest and tell, from 100 trials to 5,000.

    .venv/bin/python benchmarks/controller.py

Ours runs trials of 20 steps of a trainer that does nothing, on two local workers: pipes, store, sampler, guard's
verdicts, checkpoints' upkeep. Optuna's side stores nothing but parameters and values. Both have the
same sampler, the same six dimensions, and an SQLite file of their own that holds the same made-up finished trials to
begin with. `benchmarks/README.md` says what is timed.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from support import filled_stores
from support.controller_sides import Block, ours, theirs

COUNTS = (100, 500, 1000, 2000, 5000)
OURS, OPTUNA = "ours", "optuna"


@dataclass(frozen=True)
class Result:
    """What the JSON says: ratios are ours to Optuna's, times medians of seconds per trial, by trial count and side."""

    ratio_at: dict[int, float]
    """Of the time without waiting for workers."""
    worst_ratio: float
    cpu_ratio_at: dict[int, float]
    """Of the controller's processor time."""
    seconds_at: dict[int, dict[str, float]]
    cpu_seconds_at: dict[int, dict[str, float]]
    wall_seconds_at: dict[int, float]
    """Ours with the waiting: how fast trials that do nothing follow each other."""
    trials_a_block: int
    rounds: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=COUNTS[-1], help="measure up to this many (default: 5000)")
    parser.add_argument("--block", type=int, default=40, help="trials measured at a time")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each side at each count, alternating")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    arguments = parser.parse_args()
    for name in ("trials", "block", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} = {getattr(arguments, name)} is not allowed; expected at least 1")
    counts = [count for count in COUNTS if count <= arguments.trials] or [arguments.trials]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = compare(counts, arguments.block, arguments.rounds)
    print(json.dumps(asdict(result)) if arguments.json else table(result))


def compare(counts: Sequence[int], block: int, rounds: int) -> Result:
    """Measure both sides at each count, in turns; every other round goes backwards."""
    blocks: dict[int, dict[str, list[Block]]] = {count: {OURS: [], OPTUNA: []} for count in counts}
    context = get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=context) as our_process,
        ProcessPoolExecutor(1, mp_context=context) as their_process,
    ):
        for count in counts:
            paths = {OURS: Path(folder) / f"ours-{count}.db", OPTUNA: Path(folder) / f"optuna-{count}.db"}
            spec = filled_stores.make_spec(count)
            trials = filled_stores.made_up(spec, count)
            our_process.submit(filled_stores.fill_ours, paths[OURS], spec, trials).result()
            their_process.submit(filled_stores.fill_optuna, paths[OPTUNA], spec, trials).result()
            for turn in range(rounds):
                for side in (OURS, OPTUNA) if turn % 2 == 0 else (OPTUNA, OURS):
                    process, run = (our_process, ours) if side == OURS else (their_process, theirs)
                    blocks[count][side].append(process.submit(run, paths[side], count, block).result())
    return _result(blocks, block, rounds)


def _result(blocks: dict[int, dict[str, list[Block]]], block: int, rounds: int) -> Result:
    def median(count: int, side: str, what: str) -> float:
        return statistics.median(getattr(found, what) for found in blocks[count][side])

    seconds = {count: {side: median(count, side, "busy") for side in (OURS, OPTUNA)} for count in blocks}
    cpu = {count: {side: median(count, side, "cpu") for side in (OURS, OPTUNA)} for count in blocks}
    ratios = {count: found[OURS] / found[OPTUNA] for count, found in seconds.items()}
    return Result(
        ratio_at=ratios,
        worst_ratio=max(ratios.values()),
        cpu_ratio_at={count: found[OURS] / found[OPTUNA] for count, found in cpu.items()},
        seconds_at=seconds,
        cpu_seconds_at=cpu,
        wall_seconds_at={count: median(count, OURS, "wall") for count in blocks},
        trials_a_block=block,
        rounds=rounds,
    )


def table(result: Result) -> str:
    """Return the result as people read it."""
    lines = [
        f"milliseconds a trial, medians of {result.rounds} blocks of {result.trials_a_block} trials after as many as "
        "stand in front;",
        "these are made up, the same on both sides, and were written in bulk",
        "",
        f"{'trials':>7} {'ours':>8} {'Optuna':>8} {'ratio':>6}   {'ours CPU':>8} {'Optuna CPU':>10} {'ratio':>6}"
        f"   {'with waiting':>12}",
    ]
    for count, seconds in result.seconds_at.items():
        cpu = result.cpu_seconds_at[count]
        lines.append(
            f"{count:>7} {1e3 * seconds[OURS]:>8.1f} {1e3 * seconds[OPTUNA]:>8.1f} {result.ratio_at[count]:>6.2f}   "
            f"{1e3 * cpu[OURS]:>8.1f} {1e3 * cpu[OPTUNA]:>10.1f} {result.cpu_ratio_at[count]:>6.2f}   "
            f"{1e3 * result.wall_seconds_at[count]:>12.1f}"
        )
    return "\n".join([*lines, "", f"worst ratio: {result.worst_ratio:.2f}"])


if __name__ == "__main__":
    main()

"""Whether `ppo-tuner confirm` is right when it says so: studies and confirmations drawn from many real runs.

    python benchmarks/confirm.py run      # trains each configuration on each seed, once; resumes where it was
    python benchmarks/confirm.py show     # draws studies from them, and counts which claims hold
    python benchmarks/confirm.py simulate # how often equal configurations are told apart, in seconds

Some configurations around the reference, and the reference, are trained on many seeds and evaluated on the test
prompts, by `confirm` itself. A drawn study ranks them by their eval values on one seed; its three best and the
reference are confirmed on five other seeds, and what is claimed of them is looked up on all the rest. A claim holds
if the difference has the same sign there. Where two halves of one configuration's seeds stand for two configurations,
any claim is wrong.

`simulate` draws normal readings of equal configurations, or of one that breaks in a fifth of its runs and is worth as
much as the reference for that, and counts claims to beat the reference: by the rules of `tuner.confirm.result`, and by
a plain paired t-interval of 95% at every look, for comparison.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from support.common import run_command

from ppo_core.errors import PPOTunerError
from tuner.confirm.intervals import ALPHA, error_of_look, share_at_most, t_quantile
from tuner.confirm.plan import Plan, due_step
from tuner.confirm.result import Confirmed, compared
from tuner.control.events import Event, TrialEnded
from tuner.control.run import run_study
from tuner.judge.results import StudyView, read_study
from tuner.search.prior import first_params
from tuner.store import Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin

FOLDER = Path("runs", "benchmarks", "confirm")
STORE = f"sqlite:///{FOLDER / 'store.db'}"
NAME = "confirmed"
CONFIGURATIONS, SEEDS = 8, 16
TOP, CONFIRMING_SEEDS = 3, 5
STUDIES, RESAMPLES = 2000, 20
SEARCHED = ("learning_rate", "value_learning_rate", "batch_size", "num_ppo_epochs", "cliprange", "kl_coef")


def study(episodes: int) -> StudySpec:
    """Return a study that lists the reference and configurations around it."""
    table = {
        "name": NAME,
        "task": "reviews",
        "threads": 1,
        "device": "cpu",
        "fixed": {"total_episodes": episodes, "mini_batch_size": 16},
        "kl": {"budget": 6.0, "limit": 15.0},
    }
    space = StudySpec.from_dict({**table, "trials": 1, "search": dict.fromkeys(SEARCHED, "advised")}, "benchmark")
    reference = space.reference_params()
    drawn = [first_params(space.search, reference, 1, number) for number in range(CONFIGURATIONS - 1)]
    return StudySpec.from_dict({**table, "trial": [reference, *drawn]}, "benchmark")


def run(arguments: argparse.Namespace) -> None:
    """Train every configuration on every seed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    spec = study(arguments.episodes)
    for plan in (None, Plan(top=CONFIGURATIONS, seeds=arguments.seeds)):
        run_study(
            spec, storage=STORE, runs_folder=FOLDER, workers=arguments.workers, plan=plan, on_event=_tell,
            from_file=plan is None,
        )  # fmt: skip


def _tell(event: Event) -> None:
    if isinstance(event, TrialEnded):
        value = "nothing" if event.row.value is None else f"{event.row.value:.3f}"
        print(f"trial {event.row.number}, seed {event.row.seed}: {value}, {event.row.seconds:.0f} s", flush=True)


# What claims are worth


Readings = Mapping[int, Mapping[int, tuple[float, float]]]
"""Each configuration's eval value and test reward by seed, by the number of its trial; 0 is the reference's."""


@dataclass(frozen=True)
class Drawn:
    """What one drawn confirmation claimed, and whether that held; None: it claimed nothing."""

    which: int
    """The trial that read the most."""
    over_reference: bool | None
    best_of_all: bool | None


@dataclass(frozen=True)
class Claims:
    """How often something was claimed, and how often that held on further seeds."""

    claimed: float
    """Share of the drawn studies."""
    held: float
    """Share of the claims; NaN: there were none."""
    low: float
    high: float
    """Between which `held` lies in 90% of resamples of the configurations."""


def readings(store: Store, view: StudyView) -> dict[int, dict[int, tuple[float, float]]]:
    """Return what the confirming runs came to (see `Readings`)."""
    tests, found = store.test_readings([row.id for row in view.confirming]), dict[int, dict[int, tuple[float, float]]]()
    for row in view.confirming:
        step = due_step(row, view.spec)
        test = None if step is None else tests.get((row.id, step))
        if test is not None and test.reward is not None and row.value is not None:
            found.setdefault(row.parent or 0, {})[row.seed or 0] = (row.value, test.reward)
    return found


def show(arguments: argparse.Namespace) -> None:
    """Draw studies, and print which claims held."""
    with closing(Store.open(STORE)) as store:
        view = read_study(store, NAME)
        read = readings(store, view)
    if len(read) <= TOP:
        raise PPOTunerError("the confirming runs are not evaluated on the test prompts yet; first: confirm.py run")
    rows = {row.number: replace(row, origin=Origin.REFERENCE if row.number == 0 else row.origin) for row in view.trials}
    found = judge(read, rows, arguments.studies)
    if arguments.json:
        print(json.dumps(found | {name: asdict(found[name]) for name in ("over_reference", "best_of_all")}))
        return
    print(f"{len(read)} configurations on {found['seeds']} seeds; {arguments.studies} studies drawn from them, each "
          f"confirming {TOP} and the reference on {CONFIRMING_SEEDS} seeds.")  # fmt: skip
    for name, what in (("over_reference", "over the reference"), ("best_of_all", "better than every other one")):
        one = found[name]
        print(f"{what}: claimed in {one.claimed:.0%}, held on further seeds in {one.held:.1%} "
              f"[{one.low:.1%}, {one.high:.1%}]")  # fmt: skip
    print(f"of one configuration over itself: claimed in {found['of_equals']:.1%} (the interval allows 5%)")
    print(f"which read the most: {', '.join(f'trial {number} ({count})' for number, count in found['which'].items())}")


def judge(read: Readings, rows: Mapping[int, TrialRow], studies: int) -> dict[str, Any]:
    """Return what was claimed in so many drawn studies, and how much of it held."""
    random = np.random.default_rng(0)
    seeds = sorted(set.intersection(*(set(own) for own in read.values())))
    drawn = [_draw(random, read, rows, seeds) for _ in range(studies)]
    others = [number for number in read if number]
    resampled = []
    for _ in range(RESAMPLES):
        chosen = {0, *random.choice(others, len(others)).tolist()}
        if len(chosen) > TOP:
            some = {number: read[number] for number in chosen}
            resampled.append([_draw(random, some, rows, seeds) for _ in range(max(20, studies // RESAMPLES))])
    equals = [
        _draw_equals(random, own, rows, seeds) for own in read.values() for _ in range(max(1, studies // len(read)))
    ]
    return {
        "configurations": len(read),
        "seeds": len(seeds),
        "studies": studies,
        **{
            name: _claims(*([getattr(one, name) for one in some] for some in (drawn, *resampled)))
            for name in ("over_reference", "best_of_all")
        },
        "of_equals": float(np.mean(equals)),
        "which": dict(Counter(one.which for one in drawn).most_common()),
    }


def _claims(drawn: Sequence[bool | None], *resampled: Sequence[bool | None]) -> Claims:
    shares = [share for one in resampled if not math.isnan(share := _held(one))]
    low, high = np.quantile(shares, [0.05, 0.95]) if shares else (math.nan, math.nan)
    return Claims(float(np.mean([one is not None for one in drawn])), _held(drawn), float(low), float(high))


def _held(drawn: Sequence[bool | None]) -> float:
    claims = [one for one in drawn if one is not None]
    return float(np.mean(claims)) if claims else math.nan


def _draw(random: np.random.Generator, read: Readings, rows: Mapping[int, TrialRow], seeds: Sequence[int]) -> Drawn:
    """Search on one seed, confirm on others, and look up what was claimed on all the rest."""
    order = [seeds[place] for place in random.permutation(len(seeds))]
    searched, confirming, rest = order[0], order[1 : 1 + CONFIRMING_SEEDS], order[1 + CONFIRMING_SEEDS :]
    top = sorted((number for number in read if number), key=lambda number: -read[number][searched][0])[:TOP]
    found = compared(0, [_confirmed(rows[number], read[number], confirming) for number in (*top, 0)], None)
    best, reference = found.best, found.reference
    assert best is not None and reference is not None
    later = {number: float(np.mean([read[number][seed][1] for seed in rest])) for number in (*top, 0)}
    number, over, wins = best.trial.number, None, None
    if best.over_reference is not None and found.is_decided:
        over = later[number] > later[0]
    if not found.not_told_apart:
        wins = later[number] == max(later.values())
    return Drawn(number, over, wins)


def _confirmed(row: TrialRow, own: Mapping[int, tuple[float, float]], seeds: Sequence[int]) -> Confirmed:
    by_seed = {seed: own[seed][1] for seed in seeds}
    return Confirmed(row, 0, by_seed, {}, {})


def _draw_equals(
    random: np.random.Generator,
    own: Mapping[int, tuple[float, float]],
    rows: Mapping[int, TrialRow],
    seeds: Sequence[int],
) -> bool:
    """Return whether one of two sets of a configuration's seeds is claimed to be better than the other one."""
    order = [seeds[place] for place in random.permutation(len(seeds))]
    sets = order[:CONFIRMING_SEEDS], order[CONFIRMING_SEEDS : 2 * CONFIRMING_SEEDS]
    pair = [
        _confirmed(row, dict(enumerate(own[seed] for seed in chosen)), range(len(chosen)))
        for row, chosen in zip(list(rows.values())[:2], sets, strict=True)
    ]
    return not compared(0, pair, None).not_told_apart


# What claims are worth where nothing is better

SFT, REFERENCE, NOISE, BREAKS = 0.0, 1.0, 0.05, 0.2
"""Rewards of the SFT policy and the reference, the spread over seeds, and how often the one breaks that does."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Case:
    """Configurations of equal worth, the reference first, and the seeds at which somebody looks."""

    name: str
    looks: Sequence[int]
    candidates: int = 1
    breaks: bool = False
    """True if a fifth of the candidates' runs breaks."""
    is_left_out: bool = False
    """True if the plain interval leaves these runs out."""
    spreads: Sequence[float] = (1.0,)
    """Of the configurations, in turn, times NOISE."""


CASES = (
    Case("one look at 5 seeds", (5,)),
    Case("read at 3, 4 and 5", (3, 4, 5)),
    Case("5, 10, 20, 40 seeds", (5, 10, 20, 40)),
    Case("the same, of three candidates", (5, 10, 20, 40), 3),
    Case("the same, one of them three times as noisy", (5, 10, 20, 40), 3, spreads=(1.0, 3.0, 1.0, 1.0)),
    Case("breaks in one of five, 3 seeds", (3,), breaks=True),
    Case("breaks in one of five, 5 seeds", (5,), breaks=True),
    Case("breaks in one of five, 20 seeds", (20,), breaks=True),
    Case("the same at 5 seeds, left out where plain", (5,), breaks=True, is_left_out=True),
)


def drawn(random: np.random.Generator, case: Case, count: int) -> tuple[Array, Array]:
    """Return readings by draw, configuration and seed, and which of the runs broke."""
    shape = (count, 1 + case.candidates, max(case.looks))
    spreads = np.resize(case.spreads, 1 + case.candidates)[:, None]
    values = REFERENCE + NOISE * spreads * random.standard_normal(shape)
    broken = np.zeros(shape, bool)
    if case.breaks:
        values[:, 1:] += BREAKS / (1 - BREAKS) * (REFERENCE - SFT)
        broken[:, 1:] = random.random(broken[:, 1:].shape) < BREAKS
    return np.where(broken, SFT, values), broken


def plain(values: Array) -> Array:
    """Return which draws claim a candidate to be better by the paired t-interval; NaN: a run that is left out."""
    over = values[:, 1:] - values[:, :1]
    count = (~np.isnan(over)).sum(-1)
    quantiles = np.array([math.inf, math.inf, *_quantiles(ALPHA / over.shape[1], over.shape[-1] - 1)])
    with np.errstate(all="ignore"):
        middle = np.nansum(over, -1) / count
        sd = np.sqrt(np.nansum((over - middle[..., None]) ** 2, -1) / (count - 1))
        claims = middle > quantiles[count] * sd / np.sqrt(count)
    return np.asarray(claims.any(-1))


def _quantiles(error: float, most: int) -> list[float]:
    return [t_quantile(1 - error / 2, freedom) for freedom in range(1, most + 1)]


def by_rule(values: Array, broken: Array) -> tuple[Array, Array]:
    """Return which draws claim a candidate to be better as `tuner.confirm.result` does, and which do so without the
    doubt that it may break too often to keep its lead.
    """
    n, configurations = values.shape[-1], values.shape[1]
    count, mean = broken.sum(-1), values.mean(-1)
    middle = np.where(count < n, np.where(broken, 0.0, values).sum(-1) / np.maximum(n - count, 1), SFT)
    freedom = np.maximum(n - count - 1, 0).sum(-1)
    squares = np.where(broken, 0.0, values - middle[..., None]) ** 2
    share = count / n
    sd2 = squares.sum((-1, -2)) / np.maximum(freedom, 1)
    variance = (sd2[:, None] + share * (1 - share) * (middle - SFT) ** 2) / n
    quantiles = np.array([math.inf, *_quantiles(error_of_look(n) / (configurations - 1), n * configurations)])
    bounds = np.array([share_at_most(broke, n) for broke in range(n + 1)])[count]
    at_bound = SFT + (1 - bounds) * (middle - SFT)
    at_worst = np.where(count > 0, at_bound, mean)
    half = quantiles[freedom][:, None] * np.sqrt(variance[:, 1:] + variance[:, :1])
    claims = (mean[:, 1:] - mean[:, :1] > half) & (at_worst[:, 1:] > at_worst[:, :1])
    return np.asarray(claims.any(-1)), np.asarray((claims & (at_bound[:, 1:] > mean[:, :1])).any(-1))


def simulate(arguments: argparse.Namespace) -> None:
    """Print how often configurations that are no better are claimed to be."""
    found = simulated(arguments.draws)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{arguments.draws:,} draws; claimed to beat the reference, and no better:")
    for name, shares in found.items():
        numbers = (f"{title} {share:6.1%}" for title, share in shares.items())
        print(f"{name:44} {'   '.join(numbers)}")


def simulated(draws: int) -> dict[str, dict[str, float]]:
    """Return the shares of wrong claims in each case: by the plain interval, by the rules, and without a doubt."""
    found = {}
    for case in CASES:
        values, broken = drawn(np.random.default_rng(0), case, draws)
        claims = {name: np.zeros(draws, bool) for name in ("plain t", "as confirmed", "without a doubt")}
        for look in case.looks:
            read, broke = values[..., :look], broken[..., :look]
            claims["plain t"] |= plain(np.where(broke, np.nan, read) if case.is_left_out else read)
            if look == max(case.looks) or look >= CONFIRMING_SEEDS:  # a confirmation under way claims nothing
                certain, undoubted = by_rule(read, broke)
                claims["as confirmed"] |= certain
                claims["without a doubt"] |= undoubted
        found[case.name] = {name: float(each.mean()) for name, each in claims.items()}
    return found


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    trains = commands.add_parser("run", help="train what is missing")
    trains.add_argument("--episodes", type=int, default=640, help="length of a run (640)")
    trains.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds of each configuration ({SEEDS})")
    trains.add_argument("--workers", type=int, default=2, help="runs at a time (2)")
    trains.set_defaults(run=run)
    shows = commands.add_parser("show", help="draw studies, and count which claims hold")
    shows.add_argument("--studies", type=int, default=STUDIES, help=f"how many ({STUDIES})")
    shows.add_argument("--json", action="store_true", help="print one line of JSON instead")
    shows.set_defaults(run=show)
    draws = commands.add_parser("simulate", help="count wrong claims about equal configurations")
    draws.add_argument("--draws", type=int, default=20_000, help="how many confirmations (20000)")
    draws.add_argument("--json", action="store_true", help="print one line of JSON instead")
    draws.set_defaults(run=simulate)
    return run_command(parser)


if __name__ == "__main__":
    sys.exit(main())

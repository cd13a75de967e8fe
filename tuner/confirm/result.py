"""The result of confirming a study: each configuration's mean on fresh seeds, and the differences between them.

A run's reading is a mean over the test prompts, which are the same for all runs. So n counts seeds, and conclusions
hold for prompts like these. With n readings x of a configuration, and y of another one on the same seeds s,

    interval of a mean            mean(x) ± t(1 - α/2, n - 1) sd(x) / sqrt(n),      α = 5%
    interval of a difference      the same of x_s - y_s,                            α = 5% / m

where m is the number of differences compared (Bonferroni), so that all of a kind hold at once with 95%.
Each candidate is compared with the reference: m is the number of candidates. The highest mean is compared with every
other configuration: m is their number. If all of these intervals are above 0, it is called the best, which is wrong in
at most 5% of cases, however many looked good (Hsu 1984, multiple comparisons with the best).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.output import counted, decimals, fixed
from tuner.confirm.plan import due_step
from tuner.judge.results import StudyView
from tuner.judge.scoring import ends_within
from tuner.store import OnTest, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Status

ALPHA = 0.05
LEAST_SEEDS = 3
"""Fewest seeds for a verdict: with two the interval is nearly endless."""
LEAST_READ = 0.5
"""Configurations with fewer than this share of the most seeds rank last."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its t-interval (none for one seed)."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def is_above_0(self) -> bool:
        """True if the whole interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def text(self) -> str:
        """`2.01 [1.96, 2.07]`."""
        return self.with_places(places_of([self]))

    @property
    def signed(self) -> str:
        """The same of a difference: `+0.11 [0.06, 0.17]`."""
        return self.with_places(places_of([self]), signed=True)

    def with_places(self, places: int, *, signed: bool = False) -> str:
        """Return it with that many decimals, as in a column."""
        interval = "" if self.low is None else f" [{fixed(self.low, places)}, {fixed(self.high, places)}]"
        return f"{fixed(self.mean, places, signed=signed)}{interval}"

    @property
    def span(self) -> str:
        """`95% interval 1.96 to 2.07`, or `one seed`."""
        low, high = (fixed(end, places_of([self])) for end in (self.low, self.high))
        return "one seed" if self.low is None else f"95% interval {low} to {high}"


def places_of(intervals: Iterable[Interval | None]) -> int:
    """Return the decimals of means and their intervals: two digits of the shortest one."""
    known = [each for each in intervals if each is not None]
    lengths = [each.high - each.low for each in known if each.low is not None and each.high is not None]
    return decimals([each.mean for each in known], lengths)


def t_interval(values: Sequence[float], alpha: float = ALPHA, *, least: float = -math.inf) -> Interval | None:
    """Return the mean and its two-sided t-interval with error probability alpha, or None without values.

    `least`: lower bound; clips the interval.
    """
    if not values:
        return None
    from scipy import stats  # loads for half a second

    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Interval(mean, None, None, n)
    half = float(stats.t.ppf(1 - alpha / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, max(least, mean - half), mean + half, n)


def difference(one: Mapping[int, float], other: Mapping[int, float], among: int) -> Interval | None:
    """Return one - other paired by seed, corrected for `among` comparisons; None: no common seeds."""
    return t_interval([one[seed] - other[seed] for seed in one if seed in other], ALPHA / max(1, among))


@dataclass(frozen=True)
class Confirmed:
    """A configuration's results on fresh seeds."""

    trial: TrialRow
    """Its trial in the search."""
    length: int
    """Length of its runs in episodes."""
    rewards: Mapping[int, float]
    """Rewards by seed: on the test prompts, of the best checkpoint within the KL budget."""
    kls: Mapping[int, float]
    """KL of that checkpoint by seed, in nats per response."""
    episodes: Mapping[int, int]
    """Episode of that checkpoint by seed; 0: the SFT policy."""
    reward: Interval | None
    """None: no run was read yet."""
    kl: Interval | None
    over_reference: Interval | None = None
    """Reward minus the reference's; None for itself."""
    under_best: Interval | None = None
    """Best configuration's reward minus this one's; None for itself."""
    lost: tuple[int, ...] = ()
    """Seeds whose runs broke, or had nothing to show within the KL budget: they count as the SFT policy."""
    failed: tuple[int, ...] = ()
    """Seeds whose runs failed, which are left out."""
    stopped: tuple[int, ...] = ()
    """Seeds whose runs a person stopped, which are left out as partial."""
    open: tuple[int, ...] = ()
    """Seeds whose runs have not ended, or were not read."""
    ends_within: int = 0
    """Number of the runs that were read whose last policy is within the KL budget."""

    @property
    def name(self) -> str:
        """`trial 17`, or `the reference`."""
        return "the reference" if self.is_reference else f"trial {self.trial.number}"

    @property
    def label(self) -> str:
        """`trial 17`, or `reference (0)` with its trial's number."""
        return f"reference ({self.trial.number})" if self.is_reference else self.name

    @property
    def is_reference(self) -> bool:
        return self.trial.origin is Origin.REFERENCE


@dataclass(frozen=True)
class Confirmation:
    """Confirmed configurations of one length, highest mean first, those with few seeds last."""

    total_episodes: int
    prompts: int
    """Test prompts; 0: none were read yet."""
    baseline: OnTest | None
    """The SFT policy's result on the test prompts."""
    configurations: tuple[Confirmed, ...]

    @property
    def best(self) -> Confirmed | None:
        """The highest mean (certainty: see `verdict`); None: no run was read yet."""
        first = next(iter(self.configurations), None)
        return None if first is None or first.reward is None else first

    @property
    def seeds(self) -> int:
        """Seeds on which the best configuration was read."""
        best = self.best
        return 0 if best is None or best.reward is None else best.reward.n

    @property
    def is_decided(self) -> bool:
        """True if the best beats the reference, or, if it is the reference or there is none, all others."""
        best = self.best
        if best is None or self.seeds < LEAST_SEEDS:
            return False
        return not self.not_told_apart if best.over_reference is None else best.over_reference.is_above_0

    @property
    def reference(self) -> Confirmed | None:
        """None: the study has no reference, or it was not read."""
        return next((one for one in self.configurations if one.is_reference and one.reward is not None), None)

    @property
    def is_whole(self) -> bool:
        """True if every run was read or failed."""
        return not any(one.open for one in self.configurations)

    @property
    def not_told_apart(self) -> list[Confirmed]:
        """The other configurations that may be as good as the best."""
        others = (one for one in self.configurations if one is not self.best and one.reward is not None)
        return [one for one in others if one.under_best is None or not one.under_best.is_above_0]

    @property
    def verdict(self) -> str:
        """The better configuration and its certainty, in one or two sentences."""
        best = self.best
        if best is None:
            return "No confirming run has been evaluated on the test prompts yet."
        if self.seeds < LEAST_SEEDS:
            return (
                f"{best.name.capitalize()} has the highest mean, of {counted(self.seeds, 'seed')}: too few to separate "
                f"luck from merit. Confirm on at least {LEAST_SEEDS}."
            )
        tied = [one for one in self.not_told_apart if one.under_best is not None]
        unsure = f" The data do not distinguish it from {_with_differences(tied)}." if tied else ""
        if best.is_reference:
            are_ties = "is a tie" if len(tied) == 1 else "are ties"
            ties = f"; {_with_differences(tied)} {are_ties}" if tied else ""
            better = f"the configuration you started from (trial {best.trial.number}, the reference)"
            return f"Nothing better was found than {better}{ties}."
        over = best.over_reference
        if over is not None and not over.is_above_0:
            others = [one for one in tied if not one.is_reference]
            and_from = f", nor from {_with_differences(others)}" if others else ""
            return (
                f"{best.name.capitalize()} has the highest mean, but the data do not distinguish it from the reference "
                f"({over.signed} reward){and_from}. Confirm on more seeds before you rely on it."
            )
        if over is not None:
            better = "" if len(self.configurations) < 3 else " It is better than every other one that was confirmed."
            return f"{best.name.capitalize()} is better than the reference: {over.signed} reward.{unsure or better}"
        return f"{best.name.capitalize()} has the highest mean of those that were confirmed.{unsure}"


def _lead(lead: Interval | None) -> str:
    """Return how far another configuration is behind the best; on few seeds its mean may be the higher one."""
    if lead is None:
        return ""
    if lead.mean >= 0 or lead.low is None or lead.high is None:
        return f"behind by {lead.text}"
    return f"ahead by {Interval(-lead.mean, -lead.high, -lead.low, lead.n).text}"


def _with_differences(tied: Sequence[Confirmed]) -> str:
    return ", ".join(f"{one.name} ({_lead(one.under_best)})" for one in tied)


def confirmations(store: Store, view: StudyView) -> list[Confirmation]:
    """Return a study's confirmations by run length, shortest first."""

    def length_and_parent(run: TrialRow) -> tuple[int, int]:
        return int(run.config["total_episodes"] or 0), run.parent or 0

    tests = store.test_readings([*(run.id for run in view.confirming), *(trial.id for trial in view.trials[:1])])
    baseline = tests.get((view.trials[0].id, 0)) if view.trials else None
    parents = {trial.number: trial for trial in view.trials}
    by_length: dict[int, list[Confirmed]] = {}
    for (length, parent), runs in groupby(sorted(view.confirming, key=length_and_parent), length_and_parent):
        confirmed = _confirmed(parents[parent], length, list(runs), tests, view.spec)
        by_length.setdefault(length, []).append(confirmed)
    return [compared(length, confirmed, baseline) for length, confirmed in by_length.items()]


def longest_read(confirmations: Sequence[Confirmation], least_seeds: int = 1) -> Confirmation | None:
    """Return the confirmation of the longest runs whose best was read on at least `least_seeds` seeds, or None."""
    return next((one for one in reversed(confirmations) if one.seeds >= least_seeds), None)


def _confirmed(
    trial: TrialRow, length: int, runs: Sequence[TrialRow], tests: Mapping[tuple[int, int], OnTest], spec: StudySpec
) -> Confirmed:
    rewards: dict[int, float] = {}
    kls: dict[int, float] = {}
    episodes: dict[int, int] = {}
    lost, failed, stopped, unread = [], [], [], []
    for run in sorted(runs, key=lambda run: run.seed or 0):
        seed, step = run.seed or 0, due_step(run, spec)
        test = None if step is None else tests.get((run.id, step))
        if run.status is Status.FAILED:
            failed.append(seed)
        elif run.status is Status.STOPPED:
            stopped.append(seed)
        elif test is None or test.reward is None or test.kl is None:
            unread.append(seed)
        else:
            rewards[seed], kls[seed] = test.reward, test.kl
            episodes[seed] = test.step * PPOConfig.from_dict(run.config).batch_sizes(1).batch_size
            if step == 0:
                lost.append(seed)
    return Confirmed(
        trial,
        length,
        rewards,
        kls,
        episodes,
        t_interval(list(rewards.values())),
        t_interval(list(kls.values()), least=0.0),
        lost=tuple(lost),
        failed=tuple(failed),
        stopped=tuple(stopped),
        open=tuple(unread),
        ends_within=sum((run.seed or 0) in rewards and ends_within(run, spec) is True for run in runs),
    )


def compared(length: int, confirmed: Sequence[Confirmed], baseline: OnTest | None) -> Confirmation:
    """Return the confirmation of runs of `length` episodes: its configurations ranked and compared."""
    least = LEAST_READ * max((len(one.rewards) for one in confirmed), default=0)

    def rank(one: Confirmed) -> tuple[bool, float]:
        return len(one.rewards) >= least, -math.inf if one.reward is None else one.reward.mean

    ranked = sorted(confirmed, key=rank, reverse=True)
    read = [one for one in ranked if one.reward is not None]
    reference = next((one for one in read if one.is_reference), None)
    candidates = sum(not one.is_reference for one in read)
    configurations = []
    for one in ranked:
        over = under = None
        if reference is not None and one is not reference:
            over = difference(one.rewards, reference.rewards, candidates)
        if read and one is not read[0]:
            under = difference(read[0].rewards, one.rewards, len(read) - 1)
        configurations.append(replace(one, over_reference=over, under_best=under))
    prompts = 0 if baseline is None else baseline.prompts
    return Confirmation(length, prompts, baseline, tuple(configurations))


def confirmation_data(one: Confirmation) -> dict[str, Any]:
    """Return the JSON object of `confirm`."""
    return {
        "total_episodes": one.total_episodes,
        "prompts": one.prompts,
        "baseline": None if one.baseline is None else one.baseline.reward,
        "baseline_se": None if one.baseline is None else one.baseline.reward_se,
        "configurations": [_configuration_data(each) for each in one.configurations],
        "is_whole": one.is_whole,
        "best": None if one.best is None else one.best.trial.number,
        "not_told_apart": [each.trial.number for each in one.not_told_apart],
        "verdict": one.verdict,
    }


def _configuration_data(one: Confirmed) -> dict[str, Any]:
    intervals = ("reward", "kl", "over_reference", "under_best")
    return {
        "trial": one.trial.number,
        "is_reference": one.is_reference,
        **{name: None if (interval := getattr(one, name)) is None else asdict(interval) for name in intervals},
        "rewards": {str(seed): reward for seed, reward in one.rewards.items()},
        "kls": {str(seed): kl for seed, kl in one.kls.items()},
        "ends_within": one.ends_within,
        **{name: list(getattr(one, name)) for name in ("lost", "failed", "stopped", "open")},
    }


def runs_text(one: Confirmed) -> str:
    """Return short notes on a configuration's runs; empty if all went well."""
    parts = [
        f"{counted(len(one.lost), 'run')} with nothing within the budget" if one.lost else "",
        f"{len(one.failed)} failed" if one.failed else "",
        f"{len(one.stopped)} stopped by a person" if one.stopped else "",
        f"{len(one.open)} not evaluated yet" if one.open else "",
    ]
    return ", ".join(part for part in parts if part)

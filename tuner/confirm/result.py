"""The result of confirming a study: each configuration's mean on fresh seeds, and which one to launch.

`tuner.confirm.intervals` has the formulas.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.output import pluralize
from tuner.confirm.intervals import ALPHA, Interval, Readings, Spread, error_of_look, pooled, share_at_most, t_quantile
from tuner.confirm.plan import ALWAYS, due_step, label_of
from tuner.judge.results import StudyView
from tuner.judge.scoring import ends_within
from tuner.store import OnTest, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import WORKER_LOST, Origin, Status

LEAST_SEEDS = 3
"""Fewest seeds for a verdict: with two the interval is nearly endless."""
MOST_SEEDS = 40
"""Most seeds of a configuration that are ever advised."""
WORTH = 0.1
"""Least difference worth more seeds, as a share of what training gains."""
POWER = 0.8  # probability with which the advised seeds show such a difference
LEAST_READ = 0.5
"""Configurations with fewer than this share of the most seeds rank last."""


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
    reward: Interval | None = None
    """None: no run was read yet."""
    kl: Interval | None = None
    over_reference: Interval | None = None
    """Reward minus the reference's; None for itself."""
    over_baseline: Interval | None = None
    """Reward minus that of the study's baseline; None for itself, and where there is none."""
    under_best: Interval | None = None
    """Best configuration's reward minus this one's; None for itself."""
    lost: tuple[int, ...] = ()
    """Seeds whose runs broke, failed by themselves or had nothing in the KL budget: they count as the SFT policy."""
    failed: tuple[int, ...] = ()
    """Seeds whose runs failed for another reason, which are left out."""
    stopped: tuple[int, ...] = ()
    """Seeds whose runs a person stopped, which are left out as partial."""
    open: tuple[int, ...] = ()
    """Seeds whose runs have not ended, or were not read."""
    ends_within: int = 0
    """Number of the runs that were read whose last policy is within the KL budget."""

    @property
    def readings(self) -> Readings:
        return Readings(self.rewards, self.lost)

    @property
    def breaking(self) -> str:
        """`0 of 5 broke (95% bound 45%)`."""
        count, runs = len(self.lost), len(self.rewards)
        return f"{count} of {runs} broke (95% bound {share_at_most(count, runs):.0%})"

    @property
    def name(self) -> str:
        """`trial 17`, `the reference` or `the baseline`."""
        return f"the {self.trial.origin}" if self.trial.origin in ALWAYS else f"trial {self.trial.number}"

    @property
    def label(self) -> str:
        return label_of(self.trial)

    @property
    def is_reference(self) -> bool:
        return self.trial.origin is Origin.REFERENCE


@dataclass(frozen=True)
class Confirmation:
    """Confirmed configurations of one length, best first: those that beat the reference, those with few seeds last."""

    total_episodes: int
    prompts: int
    """Test prompts; 0: none were read yet."""
    sft: OnTest | None
    """The SFT policy's result on the test prompts."""
    configurations: tuple[Confirmed, ...]

    @property
    def read(self) -> list[Confirmed]:
        """The configurations of which a run was read."""
        return [one for one in self.configurations if one.rewards]

    @property
    def most(self) -> int:
        """Seeds of the configuration that was read on the most."""
        return max((len(one.rewards) for one in self.read), default=0)

    @property
    def spread(self) -> Spread:
        """The spread of rewards that the configurations share."""
        return pooled(one.readings for one in self.read)

    def lead(self, one: Confirmed, other: Confirmed | None) -> Interval | None:
        """Return a configuration's reward minus another's; None: they are one, or not both were read."""
        if other is None or one.trial.number == other.trial.number or not one.rewards or not other.rewards:
            return None
        error = error_of_look(self.most) / max(1, len(self.read) - 1)
        return self.spread.interval([one.readings, other.readings], error)

    def lead_of(self, number: int, other: int) -> Interval | None:
        """Return the lead of a trial's configuration over another trial's (see `lead`), both by number."""
        of = {one.trial.number: one for one in self.read}
        return self.lead(of[number], of.get(other)) if number in of else None

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
    def reference(self) -> Confirmed | None:
        """None: the study has no reference, or it was not read."""
        return next((one for one in self.configurations if one.is_reference and one.reward is not None), None)

    @property
    def is_whole(self) -> bool:
        """True if every run was read or failed."""
        return not any(one.open for one in self.configurations)

    @property
    def choice(self) -> Confirmed | None:
        """The configuration to launch: the best if it beats the reference, if that broke in a run, or if there is none;
        else the reference. None: not whole, too few seeds, or all of its runs broke.
        """
        best, reference = self.best, self.reference
        if best is None or not self.is_whole or self.seeds < LEAST_SEEDS:
            return None
        is_best = reference is None or bool(reference.lost) or beats(best, reference, best.over_reference)
        chosen = best if is_best or reference is None else reference
        return chosen if chosen.readings.sound else None

    @property
    def is_decided(self) -> bool:
        """True if the choice beats the reference, or, if it is the reference or there is none, all others."""
        choice, reference = self.choice, self.reference
        if choice is not None and reference is not None and choice is not reference:
            return beats(choice, reference, choice.over_reference)
        return choice is not None and choice is self.best and self.is_best_of_all

    @property
    def is_best_of_all(self) -> bool:
        """True if the best is better than all others, each of which was read."""
        return not self.not_told_apart and all(one.reward is not None for one in self.configurations)

    @property
    def not_told_apart(self) -> list[Confirmed]:
        """The other configurations that may be as good as the best."""
        best = self.best
        others = (one for one in self.configurations if one is not best and one.reward is not None)
        return [one for one in others if best is not None and not beats(best, one, one.under_best)]

    @property
    def rival(self) -> Confirmed | None:
        """The best of the configurations that were not chosen."""
        others = (one for one in self.configurations if one is not self.choice)
        return next((one for one in others if one.reward is not None), None)

    @property
    def verdict(self) -> str:
        """Decision and its reason, in a sentence."""
        best, choice, rival = self.best, self.choice, self.rival
        if best is None:
            return "No confirming run has been evaluated on the test prompts yet."
        if choice is None:
            left = sum(len(one.open) for one in self.configurations)
            if left:
                left_runs = f"{pluralize(left, 'confirming run')} {'has' if left == 1 else 'have'}"
                return f"Nothing yet: {left_runs} not been evaluated on the test prompts."
            if self.seeds >= LEAST_SEEDS:
                return "Nothing to launch: no confirming run has a sound checkpoint within the KL budget."
            return f"Nothing yet: {pluralize(self.seeds, 'fresh seed')} ran, and {LEAST_SEEDS} are needed."
        if choice.is_reference:
            why = "nothing else was confirmed"
            if rival is not None and rival.over_reference is not None:
                broke = f"; {rival.breaking}" if rival.lost else ""
                why = f"nothing beat it ({rival.name}: {rival.over_reference.signed}{broke})"
            return f"Keep the reference: {why}."
        over, tied, reference = choice.over_reference, self.not_told_apart, self.reference
        broke = f" ({reference.breaking})" if reference is not None and reference.lost else ""
        lead = "it has the highest mean" if over is None else f"{over.signed} over the reference{broke}"
        names = ", ".join(one.name for one in tied if not one.is_reference)
        others = ", and better than every other" if self.is_best_of_all and len(self.configurations) > 2 else ""
        return f"Launch {choice.name}: {lead}{f'; {names} may be as good' if names else others}."

    @property
    def may_break(self) -> float | None:
        """The share of runs in which the choice may break before it loses its lead over a reference that never did."""
        choice, reference = self.choice, self.reference
        if choice is None or reference is None or choice is reference or reference.lost or self.sft is None:
            return None
        sound, broken = statistics.fmean(choice.readings.sound), self.sft.reward or 0.0
        return (sound - reference.readings.mean) / (sound - broken) if sound > broken else None

    @property
    def highest_gain(self) -> float:
        """The highest reward over the choice that the data allow another configuration; NaN: unknown."""
        others = [one for one in self.configurations if one is not self.choice]
        if self.choice is self.reference:
            ends = [one.over_reference.high for one in others if one.over_reference is not None]
        else:
            under = (one.under_best for one in others if one.under_best is not None)
            ends = [None if each.low is None else -each.low for each in under]
        return max((end for end in ends if end is not None), default=math.nan)

    def seeds_to_show(self, gain: float) -> int | None:
        """Return the seeds, in doublings up to MOST_SEEDS, on which a gain would likely show, or None."""
        among, sd = max(1, len(self.read) - 1), self.spread.sd
        widest = max(one.readings.variance(sd) * len(one.rewards) for one in self.read)
        for seeds in sorted({min(self.seeds << doublings, MOST_SEEDS) for doublings in range(1, 6)}):
            if seeds <= self.seeds:
                continue
            freedom = len(self.read) * (seeds - 1)
            reach = t_quantile(1 - error_of_look(seeds) / (2 * among), freedom) + t_quantile(POWER, freedom)
            if reach * math.sqrt(2 * widest / seeds) <= gain:
                return seeds
        return None

    @property
    def worth(self) -> float:
        """Least difference worth more seeds, in reward; 0: unknown."""
        if self.best is None or self.best.reward is None or self.sft is None or self.sft.reward is None:
            return 0.0
        return max(0.0, WORTH * (self.best.reward.mean - self.sft.reward))


def beats(one: Confirmed, other: Confirmed, lead: Interval | None) -> bool:
    """Return True if a configuration is better than another: by its lead, and by how often each may break."""
    return lead is not None and lead.is_above_0 and one.readings.at_worst > other.readings.at_worst


def confirmations(store: Store, view: StudyView) -> list[Confirmation]:
    """Return a study's confirmations by run length, shortest first."""

    def length_and_parent(run: TrialRow) -> tuple[int, int]:
        return int(run.config["total_episodes"] or 0), run.parent or 0

    tests = store.test_readings([*(run.id for run in view.confirming), *(trial.id for trial in view.trials[:1])])
    sft = tests.get((view.trials[0].id, 0)) if view.trials else None
    parents = {trial.number: trial for trial in view.trials}
    by_length: dict[int, list[Confirmed]] = {}
    for (length, parent), runs in groupby(sorted(view.confirming, key=length_and_parent), length_and_parent):
        confirmed = _confirmed(parents[parent], length, list(runs), tests, sft, view.spec)
        by_length.setdefault(length, []).append(confirmed)
    return [compared(length, confirmed, sft) for length, confirmed in by_length.items()]


def longest_read(confirmations: Sequence[Confirmation]) -> Confirmation | None:
    """Return the confirmation of the longest runs of which one was read, or None."""
    return next((one for one in reversed(confirmations) if one.seeds), None)


def _confirmed(
    trial: TrialRow,
    length: int,
    runs: Sequence[TrialRow],
    tests: Mapping[tuple[int, int], OnTest],
    sft: OnTest | None,
    spec: StudySpec,
) -> Confirmed:
    rewards: dict[int, float] = {}
    kls: dict[int, float] = {}
    episodes: dict[int, int] = {}
    lost, failed, stopped, unread = [], [], [], []
    for run in sorted(runs, key=lambda run: run.seed or 0):
        seed, step = run.seed or 0, due_step(run, spec)
        test = None if step is None else tests.get((run.id, step))
        if run.status is Status.FAILED:
            if sft is None or (run.reason is not None and run.reason.rule == WORKER_LOST):
                failed.append(seed)
                continue
            step, test = 0, sft
        if run.status is Status.STOPPED:
            stopped.append(seed)
        elif test is None or test.reward is None or test.kl is None:
            unread.append(seed)
        else:
            rewards[seed], kls[seed] = test.reward, test.kl
            episodes[seed] = test.step * PPOConfig.from_dict(run.config).batch_sizes(1).batch_size
            if step == 0:
                lost.append(seed)
    within = sum((run.seed or 0) in rewards and ends_within(run, spec) is True for run in runs)
    one = Confirmed(trial, length, rewards, kls, episodes, ends_within=within)
    return replace(one, lost=tuple(lost), failed=tuple(failed), stopped=tuple(stopped), open=tuple(unread))


def compared(length: int, confirmed: Sequence[Confirmed], sft: OnTest | None) -> Confirmation:
    """Return the confirmation of runs of `length` episodes: its configurations ranked and compared."""
    prompts = 0 if sft is None else sft.prompts
    plain = Confirmation(length, prompts, sft, tuple(confirmed))
    reference, present = (next((one for one in plain.read if one.trial.origin is origin), None) for origin in ALWAYS)
    kls = pooled(Readings(one.kls, one.lost) for one in plain.read)
    filled = []
    for one in confirmed:
        reward = plain.spread.interval([one.readings], ALPHA) if one.rewards else None
        kl = kls.interval([Readings(one.kls, one.lost)], ALPHA, least=0.0) if one.kls else None
        over_reference, over_baseline = (plain.lead(one, other) for other in (reference, present))
        filled.append(replace(one, reward=reward, kl=kl, over_reference=over_reference, over_baseline=over_baseline))

    def rank(one: Confirmed) -> tuple[bool, bool, float]:
        is_enough = 0 < len(one.rewards) >= LEAST_READ * plain.most
        is_better = reference is not None and beats(one, reference, one.over_reference)
        return is_enough, is_better, one.readings.at_worst if one.rewards else -math.inf

    ranked = sorted(filled, key=rank, reverse=True)
    return replace(plain, configurations=tuple(replace(one, under_best=plain.lead(ranked[0], one)) for one in ranked))


def confirmation_data(one: Confirmation) -> dict[str, Any]:
    """Return the JSON object of `confirm`."""
    return {
        "total_episodes": one.total_episodes,
        "prompts": one.prompts,
        "sft_reward": None if one.sft is None else one.sft.reward,
        "sft_reward_se": None if one.sft is None else one.sft.reward_se,
        "configurations": [_configuration_data(each) for each in one.configurations],
        "is_whole": one.is_whole,
        "choice": None if one.choice is None else one.choice.trial.number,
        "best": None if one.best is None else one.best.trial.number,
        "not_told_apart": [each.trial.number for each in one.not_told_apart],
        "verdict": one.verdict,
    }


def _configuration_data(one: Confirmed) -> dict[str, Any]:
    intervals = ("reward", "kl", "over_reference", "over_baseline", "under_best")
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
        f"{pluralize(len(one.lost), 'run')} broke or had nothing within the budget" if one.lost else "",
        f"{len(one.failed)} lost to an outage" if one.failed else "",
        f"{len(one.stopped)} stopped by a person" if one.stopped else "",
        f"{len(one.open)} not evaluated yet" if one.open else "",
    ]
    return ", ".join(part for part in parts if part)

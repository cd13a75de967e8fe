"""Importance of hyperparameters for reward and for KL, and its uncertainty.

PED-ANOVA (Watanabe, Bansal and Hutter, 2023; as Optuna has it) measures for each hyperparameter how much its values
among the best trials differ from those among all. It gives a number for any data, so two checks accompany it: the
spread of the shares when trials are resampled (bootstrap), and the numbers for shuffled outcomes, which have no effect.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import optuna
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial, TrialState

from ppo_core.output import pluralize
from tuner.judge.scoring import is_finite
from tuner.search.optuna_trials import OptunaReport, frozen
from tuner.store import TrialRow
from tuner.study.space import for_sampler
from tuner.study.spec import StudySpec
from tuner.study.status import Status

Outcome = Literal["reward", "KL"]
MEANING = (
    "Importance is by PED-ANOVA: how much the values of the best quarter of the trials (at least five) differ from "
    "those of all trials. It shows which values go with good outcomes, not why."
)
LEAST = 10
"""Fewest trials for which importances are given: shares of fewer are chance."""
BEST_SHARE, LEAST_BEST = 0.25, 5  # the best quarter of trials, and at least five, is compared with all
RESAMPLES = 40
"""Bootstrap resamples, and shuffled outcomes."""
MOST = 500
"""Most trials that are read: more hardly change the shares, and take a minute."""
LOW, HIGH = 0.1, 0.9  # quantiles of the resamples between which a share likely lies
COLUMNS = (
    "share: this hyperparameter's part of the total importance.",
    f"likely: where the share falls in {HIGH - LOW:.0%} of bootstrap resamples of the trials, widened to contain the "
    "share itself. Resampling adds noise, which pulls large shares down and small shares up: near 0% and 100% the "
    "interval lies mostly to one side. It shows how unstable the share is; it is not a confidence interval.",
    f"chance: how often shuffled outcomes, where nothing matters, score as high; at least {1 / (1 + RESAMPLES):.0%}, "
    f"as {RESAMPLES} are drawn and the real outcome counts as one.",
)
"""Description of a table of importances' columns, one line each."""
CHANCE = 0.025  # largest share of shuffled outcomes that may reach a number called more than chance


@dataclass(frozen=True)
class Importance:
    """Importance of one hyperparameter."""

    name: str
    share: float
    """Share of all hyperparameters' importance, 0 to 1."""
    low: float
    high: float
    """Range of the share in the middle 80% of resamples, widened to contain it; not a confidence interval: noise pulls
    shares in resamples away from 0 and 1."""
    chance: float
    """Share of shuffled outcomes that make it matter as much; small: more than chance."""

    @property
    def is_sure(self) -> bool:
        return self.chance <= CHANCE


def usable(trials: Sequence[TrialRow], spec: StudySpec) -> list[TrialRow]:
    """Return the trials that completed or were stopped with a value and a KL at the end, and were not forked."""
    return [
        row
        for row in trials
        if row.status in (Status.COMPLETED, Status.STOPPED)
        and row.informs_sampler
        and is_finite(row.value)
        and is_finite(row.end_kl)
        and for_sampler(spec.search, row.params)[0]
    ]


def refusal(trials: Sequence[TrialRow], spec: StudySpec) -> str:
    """Return why no importances can be given, and what is missing; empty if they can."""
    if not spec.search:
        return "This study lists its trials and searches nothing, so nothing can be ranked: compare the trials instead."
    count = len(usable(trials, spec))
    if count >= LEAST:
        return ""
    ends = f"{pluralize(count, 'trial')} ran to the end or {'was' if count == 1 else 'were'} stopped with a value"
    more = f"{LEAST - count} more {'is' if LEAST - count == 1 else 'are'} needed"
    return f"{ends}; importance needs {LEAST}, so {more}."


def importances(
    trials: Sequence[TrialRow], spec: StudySpec, resamples: int = RESAMPLES, seed: int = 0
) -> dict[Outcome, list[Importance]]:
    """Return the hyperparameters' importance for a high reward and a low KL, the largest first, by `usable` trials.

    Of more than `MOST`, as many spread evenly over them are read. The same trials and seed give the same numbers.
    """
    if len(trials) > MOST:
        trials = [trials[index] for index in np.linspace(0, len(trials) - 1, MOST).astype(int)]
    reports = [OptunaReport(TrialState.COMPLETE, row.value or 0.0) for row in trials]
    encoded = [for_sampler(spec.search, row.params) for row in trials]
    observed = [frozen(report, each) for report, each in zip(reports, encoded, strict=True)]
    losses: dict[Outcome, np.ndarray] = {
        "reward": np.array([-(row.value or 0.0) for row in trials]),
        "KL": np.array([row.end_kl or 0.0 for row in trials]),
    }
    random = np.random.default_rng(seed)
    whole = _study(observed)
    measured = {outcome: _divergences(whole, loss) for outcome, loss in losses.items()}
    resampled_shares: dict[Outcome, list[np.ndarray]] = {outcome: [] for outcome in losses}
    shuffled: dict[Outcome, list[dict[str, float]]] = {outcome: [] for outcome in losses}
    for _ in range(resamples):
        picks, order = random.integers(len(observed), size=len(observed)), random.permutation(len(observed))
        resampled = _study([observed[i] for i in picks])
        for outcome, loss in losses.items():
            resampled_shares[outcome].append(_shares(_divergences(resampled, loss[picks]), measured[outcome]))
            shuffled[outcome].append(_divergences(whole, loss[order]))
    return {
        outcome: _with_spread(measured[outcome], resampled_shares[outcome], shuffled[outcome]) for outcome in losses
    }


def _with_spread(
    measured: dict[str, float], resampled_shares: Sequence[np.ndarray], shuffled: Sequence[dict[str, float]]
) -> list[Importance]:
    shares = _shares(measured, measured)
    lows, highs = np.quantile(resampled_shares, [LOW, HIGH], axis=0)
    importances = []
    for name, share, low, high in zip(measured, shares, lows, highs, strict=True):
        as_high = sum(values.get(name, 0.0) >= measured[name] for values in shuffled)
        chance = (1 + as_high) / (1 + len(shuffled))
        importances.append(Importance(name, float(share), float(min(low, share)), float(max(high, share)), chance))
    return sorted(importances, key=lambda item: (-item.share, item.name))


def certainty(importances: Sequence[Importance], count: int, label: Callable[[str], str] = str) -> str:
    """Return in words how certain this is at `count` usable trials; `label` names a hyperparameter."""
    sure = [label(item.name) for item in importances if item.is_sure]
    read = min(count, MOST)
    which = pluralize(read, "trial") if read == count else f"{read} of {count:,} trials, spread evenly over the study,"
    size = f"With {which} and {pluralize(len(importances), 'searched hyperparameter')}"
    if not sure:
        return f"{size}, none stands out from chance: do not rely on this order."
    return (
        f"{size}, {', '.join(sure)} {'stands' if len(sure) == 1 else 'stand'} out from chance; the rest may be noise. "
        f"One without any effect would still stand out in 1 of {1 / CHANCE:.0f} such studies."
    )


def _study(trials: Sequence[FrozenTrial]) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    study.add_trials(trials)
    return study


def _divergences(study: optuna.Study, loss: np.ndarray) -> dict[str, float]:
    """Return PED-ANOVA's number by hyperparameter; a low `loss` is good."""
    share = min(0.5, max(BEST_SHARE, LEAST_BEST / len(loss)))
    with warnings.catch_warnings():
        # About few trials, which `certainty` tells, and about the target's direction, which is intended.
        warnings.simplefilter("ignore")
        evaluator = PedAnovaImportanceEvaluator(target_quantile=share)
        return evaluator.evaluate(study, target=lambda trial: float(loss[trial.number]))


def _shares(divergences: Mapping[str, float], names: Collection[str]) -> np.ndarray:
    values = np.array([divergences.get(name, 0.0) for name in names])
    total = values.sum()
    return values / total if total > 0 else np.full(len(names), 1 / max(1, len(names)))

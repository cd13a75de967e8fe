"""A study's answer for a KL budget: the trial to launch, the evidence for it, and its launch command.

Every command, page and export that recommends a launch uses `of_study`. The answer is what was confirmed on fresh
seeds, unless the search has since found a better trial, not yet confirmed; under a KL budget other than the study's
nothing is confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import is_within
from ppo_core.output import KL_UNIT, counted, plus_minus, short
from tuner.confirm.plan import whole_run
from tuner.confirm.result import LEAST_SEEDS, Confirmation, Confirmed, confirmations, longest_read
from tuner.control import forks
from tuner.control.forks import ValueCheckpoint
from tuner.judge import results
from tuner.judge.paired import over
from tuner.judge.results import End, Measured, StudyView
from tuner.store import OnTest, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin


class Badge(StrEnum):
    """Certainty of a study's answer."""

    ONE_SEED = "one seed"
    CONFIRMED = "confirmed"
    NOT_DISTINGUISHABLE = "not distinguishable"
    NEWER = "newer and not confirmed"

    @property
    def meaning(self) -> str:
        """Sentence for tooltips and docs."""
        return _MEANINGS[self]


_MEANINGS = {
    Badge.ONE_SEED: "The best trial of the search, which ran on one seed. Confirm it before you rely on it.",
    Badge.CONFIRMED: "The best configuration on fresh seeds and the test prompts.",
    Badge.NOT_DISTINGUISHABLE: "The highest mean on fresh seeds, but others may be as good.",
    Badge.NEWER: "A better trial than those that were confirmed, on one seed. Confirm it before you rely on it.",
}


@dataclass(frozen=True)
class Answer:
    """The recommendation for a KL budget."""

    study: str
    trial: TrialRow
    """Valued under the budget."""
    kl_budget: float
    """In nats per response."""
    checkpoint: ValueCheckpoint | None
    """Source of the trial's value; None: it has none."""
    kl: Measured | None
    """Eval KL of that checkpoint, in nats per response."""
    end: End
    test: OnTest | str
    """The checkpoint's result on the test prompts, or why there is none."""
    badge: Badge
    confirmed: Confirmed | None
    """The configuration's result on fresh seeds; None: not confirmed for this budget."""
    confirmation: Confirmation | None
    """The longest confirmation with enough seeds, under the study's own KL budget, or None."""
    seeds: int
    """Fresh seeds read so far, even if too few."""
    newer_by: str
    """A newer trial's lead in the search, as a clause, or empty."""
    own_budget: float
    """The study's own KL budget, for which the confirmation holds."""
    chose: str
    """Basis of the choice, if not confirmed."""
    launch: tuple[str, ...]
    """Words of the launch command, without the storage's flags."""

    @property
    def number(self) -> int:
        return self.trial.number

    @property
    def name(self) -> str:
        """`trial 17`, or `trial 0, the reference`."""
        return f"trial {self.number}{', the reference' if self.trial.origin is Origin.REFERENCE else ''}"

    @property
    def confirm(self) -> tuple[str, ...]:
        """Words of the command that raises certainty; empty: it is confirmed, or this is not the study's own budget."""
        if self.badge is Badge.CONFIRMED or self.kl_budget != self.own_budget:
            return ()
        found = self.confirmation
        if self.badge is Badge.NOT_DISTINGUISHABLE and found is not None:
            length = () if found.total_episodes == self.trial.config.get("total_episodes") else found.total_episodes
            more = ("--total-episodes", str(length)) if length else ()
            return ("confirm", self.study, "--seeds", str(2 * found.seeds), *more)
        return ("confirm", self.study)

    @property
    def reading(self) -> str:
        """Its reward and KL in a sentence: on fresh seeds if confirmed, else those of its checkpoint."""
        one, budget = self.confirmed, f"budget {short(self.kl_budget)}"
        if one is not None and one.reward is not None and one.kl is not None:
            return (
                f"Reward {one.reward.text} on the test prompts at a KL of {one.kl.text} {KL_UNIT} ({budget}): the mean "
                f"of {counted(one.reward.n, 'fresh seed')} and its 95% interval."
            )
        at = "" if self.kl is None else f" at a KL of {plus_minus(self.kl.mean, self.kl.se)} {KL_UNIT}"
        return f"Eval reward {plus_minus(self.trial.value, self.trial.value_se)}{at} ({budget})."

    @property
    def certainty(self) -> str:
        """Its certainty, in one to three sentences."""
        found = self.confirmation
        if self.badge in (Badge.CONFIRMED, Badge.NOT_DISTINGUISHABLE) and found is not None:
            so_far = "" if found.is_whole else ", so far"
            return f"On fresh seeds, {found.total_episodes:,} episodes each{so_far}: {found.verdict}"
        if self.badge is Badge.NEWER and found is not None and found.best is not None:
            was = found.best
            own, other = (plus_minus(row.value, row.value_se) for row in (self.trial, was.trial))
            reward = "" if was.reward is None else f" ({was.reward.text} on {counted(was.reward.n, 'fresh seed')})"
            return (
                f"It is better in the search than what ran on fresh seeds, {was.label}{reward}: {own} against {other} "
                f"on the eval prompts, one seed each{self.newer_by}. It is not confirmed itself."
            )
        said = f"{self.chose} chose trial {self.number}; it is not confirmed on fresh seeds"
        if self.kl_budget == self.own_budget:
            few = f": {counted(self.seeds, 'fresh seed')} ran, and {LEAST_SEEDS} are needed" if self.seeds else ""
            return f"{said}{few}."
        if found is None or found.best is None:
            return f"{said} for this KL budget."
        return (
            f"{said} for this KL budget: what ran on fresh seeds is {found.best.label}, for the study's own of "
            f"{short(self.own_budget)} {KL_UNIT}."
        )

    @property
    def cautions(self) -> tuple[str, ...]:
        """Warnings on the trial's end, and on KL on the test prompts, a sentence each."""
        return tuple(self._cautions())

    def _cautions(self) -> Iterator[str]:
        one, budget = self.confirmed, f"the KL budget of {short(self.kl_budget)}"
        if one is not None and one.reward is not None:
            if one.ends_within < one.reward.n:
                until = forks.stop_of(self.launch)
                stop = "" if until is None else f", and the command stops at the last of these, episode {until}"
                yield (
                    f"{one.ends_within} of {counted(one.reward.n, 'run')} ended within {budget}: the readings are of "
                    f"each run's best checkpoint within it{stop}. Where the launch ends over it, use best_model."
                )
            if one.kl is not None and one.kl.mean > self.kl_budget:
                yield f"On the test prompts the mean KL of {one.kl.mean:.2f} is over {budget}."
            yield f"It ran on fresh seeds at {one.length:,} episodes; nothing is known of other lengths."
            return
        yield self._end()
        if isinstance(self.test, OnTest) and not is_within(self.test.kl, self.test.kl_se, self.kl_budget):
            yield f"On the test prompts the checkpoint's KL is {_sum(self.test.kl, self.test.kl_se, self.kl_budget)}."

    def _end(self) -> str:
        """State in words of the trial's end: the length trained, and its KL against the budget."""
        end, trial = self.end, self.trial
        kl = "unknown" if end.kl is None else f"{plus_minus(end.kl.mean, end.kl.se)} {KL_UNIT}"
        until = forks.stop_of(self.launch)
        stop = "" if until is None else f" The command stops at the checkpoint, episode {until}."
        if end.is_within:
            return f"It ends at KL {kl}, within the budget.{stop}"
        if not end.is_whole:
            how = {"paused": "paused by the strategy" if trial.is_at_rung else "paused by a person"}
            status = how.get(trial.shown_status, trial.shown_status)
            of = short(trial.config.get("total_episodes"))
            return f"It was not trained to its end: {status} at episode {trial.episodes} of {of}, KL {kl}.{stop}"
        if end.kl is None:
            return f"At its end its KL is unknown, so only the checkpoint counts.{stop}"
        mean, se, budget = end.kl.mean, end.kl.se, short(self.kl_budget)
        error = "" if se is None else f" ± {se:.2f}"
        over = f"over {budget}" if mean > self.kl_budget else f"{mean:.2f} + {se:.2f} is over {budget}"
        return f"It ends at KL {mean:.2f}{error}; {over}, so only the checkpoint counts.{stop}"


def _sum(kl: float | None, se: float | None, budget: float) -> str:
    """Return a KL over the budget as text: `3.84, over 3`, or if only its error exceeds it, `2.97 + 0.09, over 3`."""
    if kl is None:
        return "unknown"
    error = f" + {se:.2f}" if se is not None and kl <= budget else ""
    return f"{kl:.2f}{error}, over {short(budget)} {KL_UNIT}"


def of_study(store: Store, view: StudyView) -> Answer | None:
    """Return a study's answer under the view's KL budget; None: no trial is within it, and nothing is confirmed."""
    own = StudySpec.from_dict(view.row.spec, f'study "{view.row.name}"')
    every = confirmations(store, replace(view, spec=own))
    found = longest_read(every, LEAST_SEEDS)
    best, holds = view.best(), found if view.spec.kl_budget == own.kl_budget else None
    confirmed = None if holds is None else holds.best
    if holds is None or confirmed is None:
        trial, badge = best, Badge.ONE_SEED
    elif best is not None and _is_newer(view, best, holds, confirmed):
        trial, badge, confirmed = best, Badge.NEWER, None
    else:
        trial, badge = confirmed.trial, Badge.CONFIRMED if holds.is_decided else Badge.NOT_DISTINGUISHABLE
    if trial is None:
        return None
    checkpoint, end = forks.value_checkpoint(store, view.row, trial), results.end_of(store, trial, view.spec)
    if confirmed is None:
        words = ["train", "--from", view.row.name, str(trial.number)] if checkpoint is None else checkpoint.again
    else:
        words = _launch_confirmed(view.row.name, confirmed)
    if view.spec.kl_budget != own.kl_budget:
        words = [*words, "--kl_budget", short(view.spec.kl_budget, 6)]
    return Answer(
        study=view.row.name,
        trial=trial,
        kl_budget=view.spec.kl_budget,
        checkpoint=checkpoint,
        kl=results.value_kl(store, trial),
        end=end,
        test=results.on_test(store, view, trial),
        badge=badge,
        confirmed=confirmed,
        confirmation=found,
        seeds=0 if (read := longest_read(every)) is None else read.seeds,
        newer_by=_newer_by(store, holds, trial) if badge is Badge.NEWER else "",
        own_budget=own.kl_budget,
        chose="One run of each trial" if own.listed else "One search on one seed",
        launch=tuple(words),
    )


def _is_newer(view: StudyView, best: TrialRow, found: Confirmation, confirmed: Confirmed) -> bool:
    """Return True if the search's best trial is unconfirmed, and better in the search than the confirmed one."""
    own = whole_run(view.trials, best)
    if any(whole_run(view.trials, one.trial) == own for one in found.configurations):
        return False
    value = confirmed.trial.value
    return value is None or (best.value is not None and best.value > value)


def _newer_by(store: Store, found: Confirmation | None, trial: TrialRow) -> str:
    lead = None if found is None or found.best is None else over(store, found.best.trial, trial)
    return "" if lead is None else f" ({lead.verdict})"


def _launch_confirmed(study: str, one: Confirmed) -> list[str]:
    """Return the command words that train a configuration as its confirming runs were trained.

    If not all of them ended within the budget, it stops at the latest of their best checkpoints, which were the ones
    read.
    """
    words, length = ["train", "--from", study, str(one.trial.number)], one.trial.config.get("total_episodes")
    if length != one.length:
        words += ["--total_episodes", str(one.length)]
    if one.reward is None or one.ends_within >= one.reward.n:
        return words
    last = max(one.episodes.values())
    whole = PPOConfig.from_dict({**one.trial.config, "total_episodes": one.length}).whole_episodes()
    return [*words, forks.STOP, str(last)] if 0 < last < whole else words


def answer_data(one: Answer, launch: str) -> dict[str, Any]:
    """Return the answer for JSON; `launch` is the command with the storage's flags."""
    checkpoint, confirmed = one.checkpoint, one.confirmed
    test = one.test if isinstance(one.test, OnTest) else None
    return {
        "trial": one.number,
        "is_reference": one.trial.origin is Origin.REFERENCE,
        "kl_budget": one.kl_budget,
        "badge": one.badge.value,
        "reward": one.trial.value,
        "reward_se": one.trial.value_se,
        "kl": None if one.kl is None else one.kl.mean,
        "kl_se": None if one.kl is None else one.kl.se,
        "step": None if checkpoint is None else checkpoint.step,
        "episode": None if checkpoint is None else checkpoint.episode,
        "end_kl": None if one.end.kl is None else one.end.kl.mean,
        "ends_within_budget": one.end.is_within,
        "test_reward": None if test is None else test.reward,
        "test_kl": None if test is None else test.kl,
        "confirmed": None
        if confirmed is None
        else {
            "total_episodes": confirmed.length,
            "reward": None if confirmed.reward is None else asdict(confirmed.reward),
            "kl": None if confirmed.kl is None else asdict(confirmed.kl),
            "ends_within": confirmed.ends_within,
        },
        "certainty": one.certainty,
        "cautions": list(one.cautions),
        "launch": launch,
    }

"""A study's answer for a KL budget: the trial to launch, the evidence for it, and its launch command.

Every command, page and export that recommends a launch uses `of_study`. The answer is what was confirmed on fresh
seeds, unless the search has since found a better trial, not yet confirmed; under a KL budget other than the study's
nothing is confirmed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.config.kl_budget import is_within
from ppo_core.output import KL_UNIT, counted, fixed, measured, plus_minus, short
from tuner.confirm.plan import DEFAULT_TOP, candidates, whole_run
from tuner.confirm.result import LEAST_SEEDS, Confirmation, Confirmed, confirmations, longest_read, places_of
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
    NOT_DISTINGUISHABLE = "tied on fresh seeds"
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
    top: int
    """Number of the search's best configurations that include all of the confirmation's."""
    newer_by: str
    """A newer trial's lead in the search, as a clause, or empty."""
    own_budget: float
    """The study's own KL budget, for which the confirmation holds."""
    chose: str
    """Basis of the choice, if not confirmed."""
    launch: tuple[str, ...]
    """Words of the launch command, without the storage's flags."""
    is_finished: bool
    """True once the search has ended; only then can it be confirmed."""

    @property
    def number(self) -> int:
        return self.trial.number

    @property
    def name(self) -> str:
        """`trial 17`, or `trial 0, the reference`."""
        return f"trial {self.number}{', the reference' if self.trial.origin is Origin.REFERENCE else ''}"

    @property
    def confirm(self) -> tuple[str, ...]:
        """Words of the command that raises certainty; empty: confirmed, unfinished, or another KL budget."""
        if not self.is_finished or self.badge is Badge.CONFIRMED or self.kl_budget != self.own_budget:
            return ()
        words = ["confirm", self.study]
        done = self.confirmation
        if self.badge is Badge.NOT_DISTINGUISHABLE and done is not None:
            words += ["--top", str(self.top)] if self.top > DEFAULT_TOP else []
            words += ["--seeds", str(2 * done.seeds)]
            if done.total_episodes != self.trial.config.get("total_episodes"):
                words += ["--total-episodes", str(done.total_episodes)]
        return tuple(words)

    @property
    def reading(self) -> str:
        """Its reward and KL in a sentence: on fresh seeds if confirmed, else those of its checkpoint."""
        confirmed, budget = self.confirmed, f"budget {short(self.kl_budget)}"
        if confirmed is not None and confirmed.reward is not None and confirmed.kl is not None:
            reward, kl = confirmed.reward, confirmed.kl
            return (
                f"Reward {reward.text} on the test prompts at a KL of {kl.text} {KL_UNIT} ({budget}): the mean "
                f"of {counted(reward.n, 'fresh seed')} and its 95% interval."
            )
        at_kl = "" if self.kl is None else f" at a KL of {plus_minus(self.kl.mean, self.kl.se)} {KL_UNIT}"
        return f"Eval reward {plus_minus(self.trial.value, self.trial.value_se)}{at_kl} ({budget})."

    @property
    def certainty(self) -> str:
        """Its certainty, in one to three sentences."""
        done = self.confirmation
        before = None if done is None else done.best
        if self.badge in (Badge.CONFIRMED, Badge.NOT_DISTINGUISHABLE) and done is not None:
            so_far = "" if done.is_whole else ", so far"
            return f"On fresh seeds, {done.total_episodes:,} episodes each{so_far}: {done.verdict}"
        if self.badge is Badge.NEWER and before is not None:
            value, earlier = (plus_minus(row.value, row.value_se) for row in (self.trial, before.trial))
            mean = before.reward
            reward = "" if mean is None else f" ({mean.text} on {counted(mean.n, 'fresh seed')})"
            return (
                f"It is better in the search than what ran on fresh seeds, {before.label}{reward}: {value} against "
                f"{earlier} on the eval prompts, one seed each{self.newer_by}. It is not confirmed itself."
            )
        choice = f"{self.chose} chose trial {self.number}; it is not confirmed on fresh seeds"
        if self.kl_budget == self.own_budget:
            few = f": {counted(self.seeds, 'fresh seed')} ran, and {LEAST_SEEDS} are needed" if self.seeds else ""
            return f"{choice}{few}."
        if before is None:
            return f"{choice} for this KL budget."
        return (
            f"{choice} for this KL budget: what ran on fresh seeds is {before.label}, for the study's own of "
            f"{short(self.own_budget)} {KL_UNIT}."
        )

    @property
    def cautions(self) -> tuple[str, ...]:
        """Warnings on the trial's end, and on KL on the test prompts, a sentence each."""
        confirmed, budget = self.confirmed, f"the KL budget of {short(self.kl_budget)}"
        if confirmed is None or confirmed.reward is None:
            cautions = [self._end()]
            if isinstance(self.test, OnTest) and not is_within(self.test.kl, self.test.kl_se, self.kl_budget):
                kl = _over(self.test.kl, self.test.kl_se, self.kl_budget)
                cautions.append(f"On the test prompts the checkpoint's KL is {kl}.")
            return tuple(cautions)
        cautions, kl_at = [], partial(fixed, places=places_of([confirmed.kl]))
        if confirmed.ends_within < confirmed.reward.n:
            until = forks.stop_of(self.launch)
            stop = "" if until is None else f", and the command stops at the last of these, episode {until}"
            cautions.append(
                f"{confirmed.ends_within} of {counted(confirmed.reward.n, 'run')} ended within {budget}: the readings "
                f"are of each run's best checkpoint within it{stop}. Where the launch ends over it, use best_model."
            )
        if confirmed.kl is not None and confirmed.kl.mean > self.kl_budget:
            cautions.append(f"On the test prompts the mean KL of {kl_at(confirmed.kl.mean)} is over {budget}.")
        elif confirmed.kl is not None and confirmed.kl.high is not None and confirmed.kl.high > self.kl_budget:
            within = "" if max(confirmed.kls.values()) > self.kl_budget else ", though no run was over it"
            cautions.append(
                f"Its KL may be over {budget}: the interval of its mean reaches {kl_at(confirmed.kl.high)}{within}."
            )
        cautions.append(f"It ran on fresh seeds at {confirmed.length:,} episodes; nothing is known of other lengths.")
        return tuple(cautions)

    def _end(self) -> str:
        """Return a sentence on the trial's end: how far it was trained, and its KL against the budget."""
        end, trial = self.end, self.trial
        kl = "unknown" if end.kl is None else f"{plus_minus(end.kl.mean, end.kl.se)} {KL_UNIT}"
        until = forks.stop_of(self.launch)
        stop = "" if until is None else f" The command stops at the checkpoint, episode {until}."
        if end.is_within:
            return f"It ends at KL {kl}, within the budget.{stop}"
        if not end.is_whole:
            status, total = trial.shown_status, short(trial.config.get("total_episodes"))
            return f"It was not trained to its end: {status} at episode {trial.episodes} of {total}, KL {kl}.{stop}"
        if end.kl is None:
            return f"At its end its KL is unknown, so only the checkpoint counts.{stop}"
        mean, se, budget = end.kl.mean, end.kl.se, short(self.kl_budget)
        over = f"over {budget}" if mean > self.kl_budget else f"{_sum(mean, se)} is over {budget}"
        return f"It ends at KL {plus_minus(mean, se)}; {over}, so only the checkpoint counts.{stop}"


def _over(kl: float | None, se: float | None, budget: float) -> str:
    """Return a KL over the budget as text: `3.84, over 3`, or if only its error exceeds it, `2.970 + 0.090, over 3`."""
    if kl is None:
        return "unknown"
    return f"{measured(kl) if kl > budget else _sum(kl, se)}, over {short(budget)} {KL_UNIT}"


def _sum(kl: float, se: float | None) -> str:
    return plus_minus(kl, se).replace("±", "+")


def of_study(store: Store, view: StudyView) -> Answer | None:
    """Return a study's answer under the view's KL budget; None: no trial is within it, and nothing is confirmed."""
    own = StudySpec.from_stored(view.row.spec, f'study "{view.row.name}"')
    runs = confirmations(store, replace(view, spec=own))
    longest = longest_read(runs, LEAST_SEEDS)
    best, holds = view.best(), longest if view.spec.kl_budget == own.kl_budget else None
    confirmed = None if holds is None else holds.best
    if holds is None or confirmed is None:
        trial, badge = best, Badge.ONE_SEED
    elif best is not None and _is_newer(view, best, holds, confirmed):
        trial, badge, confirmed = best, Badge.NEWER, None
    else:
        trial, badge = confirmed.trial, Badge.CONFIRMED if holds.is_decided else Badge.NOT_DISTINGUISHABLE
    if trial is None:
        return None
    checkpoint = forks.value_checkpoint(store, view.row, trial)
    lead = over(store, holds.best.trial, trial) if badge is Badge.NEWER and holds is not None and holds.best else None
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
        end=results.end_of(store, trial, view.spec),
        test=results.on_test(store, view, trial),
        badge=badge,
        confirmed=confirmed,
        confirmation=longest,
        seeds=0 if (read := longest_read(runs)) is None else read.seeds,
        top=0 if longest is None else _top(view, own, longest),
        newer_by="" if lead is None else f" ({lead.verdict})",
        own_budget=own.kl_budget,
        chose="One run of each trial" if own.listed else "One search on one seed",
        launch=tuple(words),
        is_finished=view.state == "finished",
    )


def _is_newer(view: StudyView, best: TrialRow, done: Confirmation, confirmed: Confirmed) -> bool:
    """Return True if the search's best trial is unconfirmed, and better in the search than the confirmed one."""
    configuration = whole_run(view.trials, best)
    if any(whole_run(view.trials, one.trial) == configuration for one in done.configurations):
        return False
    value = confirmed.trial.value
    return value is None or (best.value is not None and best.value > value)


def _top(view: StudyView, spec: StudySpec, done: Confirmation) -> int:
    """Return the number of the search's best configurations that include all of a confirmation's."""
    confirmed = {one.trial.number for one in done.configurations}
    ranked = enumerate(candidates((*view.trials, *view.confirming), spec), start=1)
    return max((place for place, trial in ranked if trial.number in confirmed), default=0)


def _launch_confirmed(study: str, confirmed: Confirmed) -> list[str]:
    """Return the command words that train a configuration as its confirming runs were trained.

    If not all of them ended within the budget, it stops at the latest of their best checkpoints, which were the ones
    read.
    """
    config, words = confirmed.trial.config, ["train", "--from", study, str(confirmed.trial.number)]
    if config.get("total_episodes") != confirmed.length:
        words += ["--total_episodes", str(confirmed.length)]
    if confirmed.reward is not None and confirmed.ends_within < confirmed.reward.n:
        last = max(confirmed.episodes.values())
        if 0 < last < PPOConfig.from_dict({**config, "total_episodes": confirmed.length}).whole_episodes():
            words += [forks.STOP, str(last)]
    return words


def answer_data(answer: Answer, launch: str) -> dict[str, Any]:
    """Return the answer for JSON; `launch` is the command with the storage's flags."""
    checkpoint, confirmed = answer.checkpoint, answer.confirmed
    test = answer.test if isinstance(answer.test, OnTest) else None
    confirmation = (
        None
        if confirmed is None
        else {
            "total_episodes": confirmed.length,
            "reward": None if confirmed.reward is None else asdict(confirmed.reward),
            "kl": None if confirmed.kl is None else asdict(confirmed.kl),
            "ends_within": confirmed.ends_within,
        }
    )
    return {
        "trial": answer.number,
        "is_reference": answer.trial.origin is Origin.REFERENCE,
        "kl_budget": answer.kl_budget,
        "badge": answer.badge.value,
        "reward": answer.trial.value,
        "reward_se": answer.trial.value_se,
        **results.with_error("kl", answer.kl),
        "step": None if checkpoint is None else checkpoint.step,
        "episode": None if checkpoint is None else checkpoint.episode,
        "end_kl": None if answer.end.kl is None else answer.end.kl.mean,
        "ends_within_budget": answer.end.is_within,
        "test_reward": None if test is None else test.reward,
        "test_kl": None if test is None else test.kl,
        "confirmed": confirmation,
        "certainty": answer.certainty,
        "cautions": list(answer.cautions),
        "launch": launch,
    }

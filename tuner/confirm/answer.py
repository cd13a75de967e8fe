"""A study's answer for a KL budget: what to do, the evidence, gains, at most one doubt, and the launch command.

Every command, page and export that recommends a launch uses `study_answer`, and prints its lines. The answer is what a
whole confirmation on fresh seeds chose (`tuner.confirm.result`): a configuration that beats the reference, else the
reference. Without one, or under another KL budget than the study's, it is the best trial of the search, the best few
read once more (`tuner.judge.best`). A trial that the search found later is a doubt before it is confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from ppo_core.config.kl_budget import is_within
from ppo_core.output import decimals, fixed, measured, nats, pluralize, plus_minus, short
from tuner.confirm import result
from tuner.confirm.headline import Headline, headlines
from tuner.confirm.intervals import Interval, share_at_most
from tuner.confirm.plan import ALWAYS, DEFAULT_SEEDS, DEFAULT_TOP, candidates, is_within_budget, whole_run
from tuner.judge import forks, results
from tuner.judge.best import standing, twice_text
from tuner.judge.diagnose import course_of, hacked
from tuner.judge.forks import ValueCheckpoint
from tuner.judge.paired import Difference, improvement, reward_difference
from tuner.judge.results import Measured, StudyView
from tuner.judge.scoring import ends_within
from tuner.store import OnTest, Store, TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Status


class Badge(StrEnum):
    """Certainty of a study's answer."""

    ONE_SEED = "one seed"
    CONFIRMED = "confirmed"
    TIE = "a tie"

    @property
    def meaning(self) -> str:
        """Sentence for tooltips and docs."""
        return _MEANINGS[self]


_MEANINGS = {
    Badge.ONE_SEED: "The best trial of the search, which ran on one seed. Confirm it before you rely on it.",
    Badge.CONFIRMED: "Better than the reference on fresh seeds and test prompts; or the reference, better than all.",
    Badge.TIE: "Nothing was better on fresh seeds, so the reference is kept; without one, or if it broke, others may "
    "be as good.",
}


@dataclass(frozen=True)
class Gain:
    """The answer's reward minus that of the reference or the baseline; None for what is not known."""

    over: Origin
    trial: int
    mean: float | None = None
    se: float | None = None
    """Standard error over the eval prompts, of one seed; None if it is confirmed."""
    low: float | None = None
    high: float | None = None
    """Interval over fresh seeds, if it is confirmed."""

    @property
    def text(self) -> str:
        """`over the baseline (trial 1): +0.83 [0.60, 1.10]`, or `+0.83 ± 0.05` with the standard error."""
        value = plus_minus(self.mean, self.se, signed=True)
        if self.mean is None:
            value = "not known"
        elif self.low is not None:
            value = Interval(self.mean, self.low, self.high, 0).signed
        return f"over the {self.over} (trial {self.trial}): {value}"


@dataclass(frozen=True)
class Answer:
    """The recommendation for a KL budget."""

    study: str
    trial: TrialRow
    """Valued under the budget."""
    kl_budget: float
    """In nats per response."""
    first_budget: float
    """The study's first, which its trials were made for."""
    checkpoint: ValueCheckpoint | None
    """Source of the trial's value; None: it has none."""
    reward: Measured | None
    """Eval reward of that checkpoint: of its only reading, or the mean of two."""
    kl: Measured | None
    """Its eval KL likewise, in nats per response."""
    over_sft: Difference | None
    """The trial's value over the SFT policy's; None: not known."""
    has_learned: bool
    """False if the study is finished, nothing is confirmed, and that is no more than noise: nothing to launch."""
    ends_within: bool | None
    """True if the configuration itself ends within the budget; None: its trial was not trained to its end."""
    test: OnTest | str
    """The checkpoint's result on the test prompts, or why there is none."""
    badge: Badge
    title: str
    """`the answer`; `the leader` while the search may still find a better one."""
    confirmation: result.Confirmation | None
    """The longest whole confirmation, under the study's own KL budget, or None."""
    confirmed: result.Confirmed | None
    """The configuration's result on fresh seeds; None: not confirmed for this budget."""
    decision: str
    gains: tuple[Gain, ...]
    """Over the reference and the baseline, in a study with a baseline; else empty: the decision states the only one."""
    doubt: str
    """Reason that could change the decision, in a sentence; empty: none known."""
    remedy: tuple[str, ...]
    """Words of the command that settles the doubt, without the storage's flags; empty: there is none."""
    launch: tuple[str, ...]
    """Words of the launch command, without the storage's flags."""

    @property
    def number(self) -> int:
        return self.trial.number

    @property
    def name(self) -> str:
        return _name(self.trial)

    @property
    def evidence(self) -> str:
        """Its reward and KL in a sentence: on fresh seeds if confirmed, else those of its checkpoint."""
        confirmed, budget = self.confirmed, f"of {nats(self.kl_budget)}"
        if self.kl_budget != self.first_budget:
            budget += f" (trials were trained for the first budget, {short(self.first_budget)})"
        if confirmed is not None and confirmed.reward is not None and confirmed.kl is not None:
            reward, kl = confirmed.reward, confirmed.kl
            return (
                f"On {pluralize(reward.n, 'fresh seed')}: reward {reward.text} at KL {kl.text} {budget}; "
                f"{confirmed.breaking}."
            )
        at_kl = "" if self.kl is None else f" at KL {plus_minus(self.kl.mean, self.kl.se)} {budget}"
        value = "unknown" if self.reward is None else plus_minus(self.reward.mean, self.reward.se)
        over_sft = "" if self.over_sft is None or self.gains else f"; {self.over_sft.text} over the SFT policy"
        return f"Best in budget, one seed{twice_text(self.trial)}: eval reward {value}{at_kl}{over_sft}."

    @property
    def gained(self) -> str:
        """Its gains in a sentence; empty without any."""
        text = "; ".join(gain.text for gain in self.gains)
        return f"{text[:1].upper()}{text[1:]}." if text else ""


def _name(trial: TrialRow) -> str:
    """Return `trial 17`, `trial 0, the reference` or `trial 1, the baseline`."""
    return f"trial {trial.number}{f', the {trial.origin}' if trial.origin in ALWAYS else ''}"


def study_answer(store: Store, view: StudyView) -> Answer | None:
    """Return a study's answer under the view's KL budget; None: no trial is within it, and nothing is confirmed."""
    own = StudySpec.from_stored(view.row.spec, f'study "{view.row.name}"')
    runs = result.confirmations(store, replace(view, spec=own))
    done, is_own = decided(runs), view.is_own_budget
    confirmed = done.choice if done is not None and is_own else None
    trial = view.best() if confirmed is None else confirmed.trial
    if trial is None:
        return None
    over_sft = improvement(store, trial)
    has_learned = done is not None or view.state != "finished" or over_sft is None or over_sft.is_gain
    if done is not None and confirmed is not None:
        badge, decision = Badge.CONFIRMED if done.is_decided else Badge.TIE, done.verdict
        doubts = _of_confirmed(store, view, done, confirmed)
    else:
        badge, decision = Badge.ONE_SEED, f"Launch {_name(trial)}, which is not confirmed."
        if view.state != "finished":
            decision = f"Nothing yet: {_name(trial)} leads."
        elif not has_learned:
            decision = f"Launch nothing: {_name(trial)}, the best, gained nothing over the SFT policy."
        doubts = _of_one_seed(store, view, trial, result.longest_read(runs) if is_own else None, is_own=is_own)
        if not has_learned:
            text = "Its gain is within the noise. To see what to change:"
            doubts = iter([(text, ("diagnose", view.row.name, str(trial.number)))])
    doubt, remedy = next(doubts, ("", ()))
    stands = standing(trial)
    return Answer(
        study=view.row.name,
        trial=trial,
        kl_budget=view.spec.kl_budget,
        first_budget=own.first_budget,
        checkpoint=forks.value_checkpoint(store, view.row, trial),
        reward=None if stands is None else Measured(stands.reward, trial.value_se),
        kl=results.value_kl(store, trial),
        over_sft=over_sft,
        has_learned=has_learned,
        ends_within=ends_within(trial, view.spec),
        test=results.on_test(store, view, trial),
        badge=badge,
        title="the answer" if confirmed is not None or view.state == "finished" else "the leader",
        confirmation=done,
        confirmed=confirmed,
        decision=decision,
        gains=tuple(_gains(store, view, trial, confirmed)),
        doubt=doubt,
        remedy=remedy,
        launch=launch_of(store, view, trial),
    )


def _gains(store: Store, view: StudyView, trial: TrialRow, confirmed: result.Confirmed | None) -> Iterator[Gain]:
    """Yield an answer's gains where there is a baseline; what broke or is over the budget counts as the SFT policy."""
    others = [row for row in view.trials if row.origin in ALWAYS]
    if Origin.BASELINE not in (row.origin for row in others):
        return
    for row in (row for row in others if row.number != trial.number):
        if confirmed is not None:
            found = confirmed.over_reference if row.origin is Origin.REFERENCE else confirmed.over_baseline
            ends = {} if found is None else {"mean": found.mean, "low": found.low, "high": found.high}
            yield Gain(row.origin, row.number, **ends)
            continue
        is_known = row.status.is_final and row.status is not Status.FAILED
        gain = reward_difference(store, row, trial) if is_within_budget(row, view.spec) else improvement(store, trial)
        yield Gain(row.origin, row.number, *((gain.mean, gain.se) if is_known and gain is not None else ()))


def decided(runs: list[result.Confirmation]) -> result.Confirmation | None:
    """Return the confirmation of the longest runs that chose a configuration, or None."""
    return next((one for one in reversed(runs) if one.choice is not None), None)


def headline_of(store: Store, view: StudyView) -> Headline | None:
    """Return the number of a study's answer under its own KL budget, without all that is said of it."""
    done = decided(result.confirmations(store, view))
    trial = view.best() if done is None or done.choice is None else done.choice.trial
    return None if trial is None else headlines(store, view, [trial])[trial.number]


Doubt = tuple[str, tuple[str, ...]]  # A sentence, and the words of the command that settles it, if any


def _of_confirmed(store: Store, view: StudyView, done: result.Confirmation, one: result.Confirmed) -> Iterator[Doubt]:
    """Yield the doubts on a confirmed configuration, the gravest first."""
    budget, runs = view.spec.kl_budget, len(one.kls)
    if over := sum(kl > budget for kl in one.kls.values()):
        most = share_at_most(over, runs)
        yield f"KL is over the budget in {over} of {pluralize(runs, 'run')} (95% bound {most:.0%}).", ()
    if one.lost:
        yield f"{one.breaking}.", ()
    course = course_of(store, one.trial, view)
    if (finding := hacked(course)).verdict == "repeated":
        yield f"Reward hacking, also on fresh seeds: {finding.worse[0]}. Read its samples.", _samples(view, one.trial)
    best = view.best()
    if best is not None and _is_newer(view, best, done, one):
        values = " against ".join(fixed(each and each.reward, 3) for each in map(standing, (best, one.trial)))
        words = _confirm(view, done, done.seeds, best)
        yield f"Trial {best.number} is newer and scored higher in the search ({values}), but is not confirmed.", words
    if (lost := done.may_break) is not None and lost < share_at_most(len(one.lost), runs):
        yield f"If more than {lost:.0%} of its runs broke, it would lose its lead.", ()
    if not done.is_decided and (gain := done.worth) and gain < done.highest_gain:
        least = f"{fixed(gain, decimals([gain], [gain]))} ({result.WORTH:.0%} of training's gain)"
        text = f"seeds are too few to detect {least}"
        seeds = done.seeds_to_show(gain)
        if seeds is None:
            yield f"{result.MOST_SEEDS} {text}.", ()
        else:
            yield f"{done.seeds} {text}; {seeds} should do.", _confirm(view, done, seeds)


def _of_one_seed(
    store: Store, view: StudyView, trial: TrialRow, read: result.Confirmation | None, *, is_own: bool
) -> Iterator[Doubt]:
    """Yield the doubts on a trial that nothing confirmed, the gravest first."""
    name, test, kl_budget = view.row.name, results.on_test(store, view, trial), view.spec.kl_budget
    is_over = view.state == "finished"
    confirm = ("confirm", name) if is_own and is_over else ()
    if isinstance(test, OnTest) and not is_within(test.kl, test.kl_se, kl_budget):
        is_known_over = test.kl is not None and test.kl > kl_budget  # else by its error alone
        kl = measured(test.kl) if is_known_over else plus_minus(test.kl, test.kl_se).replace("±", "+")
        said = "unknown" if test.kl is None else f"{kl}, over {nats(kl_budget)}"
        yield f"On the test prompts its KL is {said}.", confirm
    if (finding := hacked(course_of(store, trial, view))).verdict == "suspect":
        yield f"A sign of reward hacking: {finding.worse[0]}. Read its samples.", _samples(view, trial)
    if not is_over:
        words = {"unfinished": ("run", name), "paused": ("resume", name)}.get(view.state, ())
        yield "The search is not finished.", words
    if not is_own:
        yield "Nothing is confirmed for this KL budget.", ()
    if read is not None:
        yield read.verdict, confirm if read.is_whole else ("run", name)
    yield "The highest of many values on one seed is partly luck: confirm it.", confirm


def _samples(view: StudyView, trial: TrialRow) -> tuple[str, ...]:
    return ("show", view.row.name, str(trial.number))


def _is_newer(view: StudyView, best: TrialRow, done: result.Confirmation, confirmed: result.Confirmed) -> bool:
    """Return True if the search's best trial is unconfirmed, and better in the search than the confirmed one."""
    configuration = whole_run(view.trials, best)
    if any(whole_run(view.trials, one.trial) == configuration for one in done.configurations):
        return False
    ours, theirs = standing(confirmed.trial), standing(best)
    return ours is None or (theirs is not None and theirs.reward > ours.reward)


def _confirm(view: StudyView, done: result.Confirmation, seeds: int, newer: TrialRow | None = None) -> tuple[str, ...]:
    """Return the command words that run what was confirmed, or only a newer trial, on so many seeds."""
    numbers = {one.trial.number for one in done.configurations} if newer is None else {newer.number}
    ranked = enumerate(candidates((*view.trials, *view.confirming), view.spec), start=1)
    top = max((rank for rank, trial in ranked if trial.number in numbers), default=0)
    given = {
        "--top": top if newer or top > DEFAULT_TOP else None,
        "--seeds": seeds if seeds != DEFAULT_SEEDS else None,
        "--total-episodes": done.total_episodes if done.total_episodes != view.spec.total_episodes else None,
    }
    flags = (word for name, value in given.items() if value is not None for word in (name, str(value)))
    return ("confirm", view.row.name, *flags)


def launch_of(store: Store, view: StudyView, trial: TrialRow) -> tuple[str, ...]:
    """Return the words of the command that trains a trial's configuration under the view's KL budget.

    It runs whole, at the length that it was confirmed at if it was. `train` evaluates as the study's runs did, and its
    `best_model` is the checkpoint that a study would read: with the seed of such a run, the same one.
    """
    one = headlines(store, view, [trial])[trial.number].confirmed
    words = ["train", "--from", view.row.name, str(trial.number)]
    if one is not None and one.length != trial.config.get("total_episodes"):
        words += ["--total_episodes", str(one.length)]
    return (*words, *(() if view.is_own_budget else ("--kl_budget", short(view.spec.kl_budget, 6))))


def answer_data(answer: Answer, launch: str, remedy: str | None) -> dict[str, Any]:
    """Return the answer for JSON; `launch` and `remedy` are the commands with the storage's flags."""
    checkpoint, confirmed = answer.checkpoint, answer.confirmed
    test = answer.test if isinstance(answer.test, OnTest) else None
    confirmation = confirmed and {
        "total_episodes": confirmed.length,
        "reward": confirmed.reward and asdict(confirmed.reward),
        "kl": confirmed.kl and asdict(confirmed.kl),
        "ends_within": confirmed.ends_within,
        "breaks_at_most": share_at_most(len(confirmed.lost), len(confirmed.rewards)),
    }
    return {
        "trial": answer.number,
        "is_reference": answer.trial.origin is Origin.REFERENCE,
        "badge": answer.badge.value,
        **results.with_error("reward", answer.reward),
        **results.with_error("improvement", answer.over_sft),
        **results.with_error("kl", answer.kl),
        "step": checkpoint and checkpoint.step,
        "episode": checkpoint and checkpoint.episode,
        "end_kl": answer.trial.end_kl,
        "ends_within_budget": answer.ends_within,
        "test_reward": test and test.reward,
        "test_kl": test and test.kl,
        "confirmed": confirmation,
        "kl_budget": answer.kl_budget,
        "decision": answer.decision,
        "evidence": answer.evidence,
        "has_learned": answer.has_learned,
        "gains": [asdict(gain) for gain in answer.gains],
        "doubt": answer.doubt or None,
        "remedy": remedy,
        "launch": launch if answer.has_learned else None,
    }

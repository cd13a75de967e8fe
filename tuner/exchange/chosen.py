"""Choose a study's configuration to hand to another trainer, with its facts. Never imports torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ppo_core import __version__
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.output import KL_UNIT, plus_minus, short
from tuner.control import forks
from tuner.environment import to_copy
from tuner.judge import results
from tuner.judge.answer import Answer, of_study
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow
from tuner.study.status import Role


@dataclass(frozen=True)
class Chosen:
    """A configuration to launch."""

    study: str
    trial: TrialRow
    config: PPOConfig
    facts: tuple[str, ...]
    """Lines on its origin and results."""
    kl_budget: float
    """The study's, in nats per response."""
    stop_at_episode: int | None
    """Episode to stop at, that of the checkpoint; None: the run's end."""
    last_kl_coef: float | None
    """β at the end of the trial; None: never reported."""


def choose(store: Store, view: StudyView, number: int | None) -> Chosen | None:
    """Return the configuration of trial `number`, or of the study's answer; None if there is no answer.

    Raises:
        StudyError: there is no such trial, or its stored configuration is not whole.
        ConfigError: its stored configuration is not allowed in this version.
    """
    found = of_study(store, view)
    if number is not None and (found is None or found.number != number):
        found, trial = None, store.trial(view.row, number)
    elif found is None:
        return None
    else:
        trial = found.trial
    confirmed = None if found is None else found.confirmed
    values = dict(trial.config) | ({} if confirmed is None else {"total_episodes": confirmed.length})
    config = PPOConfig.from_dict(values, f'trial {trial.number} of study "{view.row.name}"')
    facts = (
        f'Study "{view.row.name}", task {view.spec.task}, trial {trial.number}, by PPO Tuner {__version__}.',
        *(_of_trial(store, view, trial, config) if found is None else _of_answer(store, view, found, config)),
        *_fork(view.row.name, trial),
    )
    at = forks.value_checkpoint(store, view.row, trial)
    words = at.again if found is None and at is not None else [] if found is None else found.launch
    return Chosen(
        view.row.name, trial, config, facts, view.spec.kl_budget, forks.stop_of(words), _last_kl_coef(store, trial)
    )


def _of_answer(store: Store, view: StudyView, found: Answer, config: PPOConfig) -> Iterator[str]:
    yield f"It is what the study says to launch ({found.badge}). {found.reading}"
    yield found.certainty
    yield from found.cautions
    if found.confirmed is None:
        yield from _checkpoint(store, view, found.trial, config)
    yield f"The same here: {to_copy(found.launch)}"


def _of_trial(store: Store, view: StudyView, trial: TrialRow, config: PPOConfig) -> Iterator[str]:
    budget = f"the KL budget is {short(view.spec.kl_budget)} {KL_UNIT}"
    if trial.value is None or not math.isfinite(trial.value):
        yield f"It has no value yet (status {trial.shown_status}); {budget}."
        return
    kl = results.value_kl(store, trial)
    kl_text = "unknown" if kl is None else f"{plus_minus(kl.mean, kl.se)} {KL_UNIT}"
    yield f"Eval reward {plus_minus(trial.value, trial.value_se)}, eval KL {kl_text}; {budget}."
    yield from _checkpoint(store, view, trial, config)
    found = forks.value_checkpoint(store, view.row, trial)
    if found is not None and 0 < found.episode < config.whole_episodes():
        yield f"The same here: {to_copy(found.again)}"


def _checkpoint(store: Store, view: StudyView, trial: TrialRow, config: PPOConfig) -> Iterator[str]:
    """Yield lines on the checkpoint's place in the run, if not its end, and on how far the trial was trained."""
    answer, whole = forks.value_checkpoint(store, view.row, trial), config.whole_episodes()
    batch, is_whole = config.batch_sizes(1).batch_size, results.end_of(store, trial, view.spec).is_whole
    if not is_whole:
        yield (
            f"It was trained for {trial.episodes} of {whole} episodes ({trial.shown_status}), so how the whole run "
            "ends is not known."
        )
    if answer is None or answer.episode >= (whole if is_whole else trial.episodes):
        return
    if answer.episode == 0:
        yield "That is the SFT policy: no checkpoint of the trial was better within the KL budget."
        return
    yield (
        f"That was evaluated after {answer.episode} of {whole} episodes (iteration {answer.episode // batch} of "
        f"{config.num_iterations()}), before its end. The rates follow the whole length: keep the length, and save and "
        "stop there."
    )


def _fork(study: str, trial: TrialRow) -> Iterator[str]:
    if trial.role is Role.FORK:
        yield (
            f"It is a fork: it resumed from a checkpoint of trial {trial.parent} (step {trial.fork_step}). This file "
            "has the values after that, so a trainer that starts with them trains another run; to train both parts "
            f"here: {to_copy(['train', '--from', study, str(trial.number)])}"
        )


def _last_kl_coef(store: Store, trial: TrialRow) -> float | None:
    rows = store.steps([trial.id], ("objective/kl_coef",))
    found = [row["objective/kl_coef"] for row in rows if row["objective/kl_coef"] is not None]
    return float(found[-1]) if found and math.isfinite(found[-1]) else None

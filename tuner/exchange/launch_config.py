"""Choose a study's configuration to launch, and state its facts. Never imports torch."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppo_core import __version__
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.output import KL_UNIT, nats
from tuner.confirm.answer import Answer, launch_of, of_study
from tuner.confirm.headline import headlines
from tuner.judge import forks
from tuner.judge.forks import ValueCheckpoint
from tuner.judge.results import StudyView
from tuner.store import Store, TrialRow
from tuner.store.commands import command
from tuner.study.status import Role, Status


@dataclass(frozen=True)
class Readings:
    """Values that a run moved by itself; None: never reported."""

    kl_coef: float | None = None
    """Median of β after its first quarter: at the end β may just be pushing the KL back."""
    lr: float | None = None
    """Median of the policy's learning rate after its first quarter, in which the rate is found."""
    return_std: float | None = None
    """Standard deviation of the returns at its end, in reward."""
    lam: float | None = None
    """GAE λ at its end."""
    penalty_unit: float | None = None
    """Worth of a penalty of 1 at its end, in reward."""


@dataclass(frozen=True)
class LaunchConfig:
    """A configuration to launch."""

    trial: TrialRow
    config: PPOConfig
    facts: tuple[str, ...]
    kl_budget: float
    """The study's, in nats per response."""
    readings: Readings


def launch_config(store: Store, view: StudyView, number: int | None) -> LaunchConfig | None:
    """Return the configuration of trial `number`, or of the study's answer; None if there is no answer.

    Raises:
        StudyError: there is no such trial, or its stored configuration is not whole.
        ConfigError: its stored configuration is not allowed in this version.
    """
    answer = of_study(store, view)
    if number is not None and (answer is None or answer.number != number):
        answer, trial = None, store.trial(view.row, number)
    elif answer is None:
        return None
    else:
        trial = answer.trial
    values = dict(trial.config)
    if answer is not None and answer.confirmed is not None:
        values["total_episodes"] = answer.confirmed.length
    config = PPOConfig.from_dict(values, f'trial {trial.number} of study "{view.row.name}"')
    return LaunchConfig(
        trial,
        config,
        tuple(_facts(store, view, trial, config, answer)),
        view.spec.kl_budget,
        _readings(store, _run(view, trial, config)),
    )


def _facts(store: Store, view: StudyView, trial: TrialRow, config: PPOConfig, answer: Answer | None) -> Iterator[str]:
    yield f'Study "{view.row.name}", task {view.spec.task}, trial {trial.number}, by PPO Tuner {__version__}.'
    has_value, whole = trial.value is not None and math.isfinite(trial.value), config.whole_episodes()
    if answer is not None:
        yield from filter(None, (answer.decision, answer.evidence, answer.gained, answer.doubt))
    else:
        number = headlines(store, view, [trial])[trial.number]
        result = f"Reward {number.text()} at KL {number.kl_text()} {KL_UNIT}, {number.label}"
        if not has_value:
            result = f"It has no value yet (status {trial.shown_status})"
        yield f"{result}; the KL budget is {nats(view.spec.kl_budget)}."
    if has_value and (answer is None or answer.confirmed is None):
        yield from _checkpoint_facts(trial, config, forks.value_checkpoint(store, view.row, trial))
    elif answer is not None and answer.confirmed is not None and max(answer.confirmed.episodes.values()) < whole:
        yield (
            f"Its runs' best checkpoints, which were read, came before their end of {whole} episodes: evaluate on the "
            "way, and keep the best one within the KL budget."
        )
    if has_value or answer is not None:
        yield f"The same here: {command(launch_of(store, view, trial), store)}"
    if trial.role is Role.FORK:
        yield (
            f"It is a fork: it resumed from a checkpoint of trial {trial.parent} (step {trial.fork_step}). This file "
            "has the values after that, so a trainer that starts with them trains another run; to train both parts "
            f"here: {command(['train', '--from', view.row.name, str(trial.number)], store)}"
        )


def _checkpoint_facts(trial: TrialRow, config: PPOConfig, checkpoint: ValueCheckpoint | None) -> Iterator[str]:
    """Yield lines on the checkpoint's place in the run, if not its end, and on the trial's progress."""
    whole = config.whole_episodes()
    is_whole = trial.status is Status.COMPLETED
    if not is_whole:
        yield (
            f"It was trained for {trial.episodes} of {whole} episodes ({trial.shown_status}), so how the whole run "
            "ends is not known."
        )
    if checkpoint is None or checkpoint.episode >= (whole if is_whole else trial.episodes):
        return
    if checkpoint.episode == 0:
        yield "That is the SFT policy: no checkpoint of the trial was better within the KL budget."
        return
    yield (
        f"That was evaluated after {checkpoint.episode} of {whole} episodes (iteration {checkpoint.step} of "
        f"{config.num_iterations()}), before its end. The rates follow the whole length: keep the length, and save and "
        "stop there."
    )


def _run(view: StudyView, trial: TrialRow, config: PPOConfig) -> TrialRow:
    """Return the trial, or the longest run that confirmed it where `config` has the length of these."""
    if trial.config["total_episodes"] == config.total_episodes:
        return trial
    own = (row for row in view.confirming if row.parent == trial.number)
    return max(
        (row for row in own if row.config["total_episodes"] == config.total_episodes), key=lambda row: row.episodes
    )


def settled(values: Sequence[float]) -> float:
    """Return the median of a run's values after its first quarter."""
    return statistics.median(values[len(values) // 4 :])


def _readings(store: Store, run: TrialRow) -> Readings:
    metrics = ("objective/kl_coef", "lr", "val/return_std", "policy/lam", "objective/penalty_unit")
    rows = store.steps([run.id], metrics)
    coefs, rates, stds, lams, units = ([row[metric] for row in rows if row[metric] is not None] for metric in metrics)
    learning = [rate for rate in rates if rate > 0]  # 0 while only the critic learns
    coef, rate = (settled(values) if values else None for values in (coefs, learning))
    std, lam, unit = (values[-1] if values else None for values in (stds, lams, units))
    return Readings(coef, rate, std, lam, unit)

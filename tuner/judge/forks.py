"""Forks: trials that start from another trial's checkpoint with some values changed. Never imports torch.

A fork's folder begins with a copy of its parent's checkpoint, so it resumes like any interrupted trial, but with
another config. Each hyperparameter declares if a checkpoint fixes it; `PPOTrainer.restore` documents how the others
take effect. Counted from the beginning, a fork is a run in stages: its parent's (`ppo_core.config.stages`), then its
own. The guard remembers the parent's curve, and only its patience restarts: the changed values get steps of their own.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ppo_core import checkpoint
from ppo_core.checkpoint import EPISODE
from ppo_core.config.declare import HyperValue
from ppo_core.config.hyperparameters import HYPERPARAMETERS, PPOConfig, require_name
from ppo_core.config.stages import Stage
from ppo_core.errors import CheckpointError, ConfigError
from tuner.files import folder as study_folder
from tuner.judge.guard import GUARD, GuardState
from tuner.store import NewTrial, Store, StudyRow, TrialRow
from tuner.study.status import Role

CHANGEABLE = tuple(name for name, declared in HYPERPARAMETERS.items() if not declared.fixed_by_checkpoint)
"""Hyperparameters that a fork may change."""


def check(config: Mapping[str, HyperValue], changes: Mapping[str, object], episode: int) -> dict[str, HyperValue]:
    """Return the config of a fork, at `episode`, of a trial with `config`.

    Raises:
        ConfigError: a name is unknown or fixed by the checkpoint, a value is not allowed, nothing is changed, or the
            fork would have no episode left.
    """
    before = PPOConfig.from_dict(config)
    values = {name: require_name(name, "fork").coerce(value) for name, value in changes.items()}
    if before.keeps_kl_step and values.keys() & {"kl_coef", "learning_rate"}:  # a run given either keeps no pace
        target = None if "kl_coef" in values else before.kl_target
        no_pace = {"lr_controller": "schedule", "kl_controller": None, "kl_step": None, "kl_target": target}
        values = {**no_pace, **values}
    changed = {name: value for name, value in values.items() if value != getattr(before, name)}
    if not changed:
        raise ConfigError("a fork must change at least one value, or it would repeat its parent")
    for name in changed:
        why = HYPERPARAMETERS[name].fixed_by_checkpoint
        if why:
            raise ConfigError(f"{name} = {values[name]!r} is not allowed: a fork cannot change it, since {why}")
    after = PPOConfig.from_dict({**config, **changed})
    was, would_be = (one.batch_sizes(world_size=1).batch_size for one in (before, after))
    if was != would_be:
        why = HYPERPARAMETERS["batch_size"].fixed_by_checkpoint
        raise ConfigError(
            f"per_device_train_batch_size = {after.per_device_train_batch_size} is not allowed in a fork: with "
            f"gradient_accumulation_steps it makes batch_size {would_be} instead of {was}; a fork cannot change that, "
            f"since {why}"
        )
    if after.whole_episodes() <= episode:
        raise ConfigError(
            f"total_episodes = {after.total_episodes} leaves a fork at episode {episode} nothing to do: fork at an "
            f"earlier one, or set total_episodes over {episode}"
        )
    return after.to_dict()


def choose(parent_folder: Path, at_episode: int | None) -> tuple[Path, int, int]:
    """Return the checkpoint to fork at, with its step and episode: the one at an episode, or the newest undamaged one.

    Raises:
        ConfigError: there is none; the message names the episodes of those that are kept.
    """
    kept = by_episode(parent_folder)
    if at_episode is not None and at_episode not in kept:
        episodes = ", ".join(map(str, sorted(kept))) or "none"
        raise ConfigError(f"trial {parent_folder.name} keeps no checkpoint at episode {at_episode}; kept: {episodes}")
    damage = ""
    for episode in sorted(kept, reverse=True) if at_episode is None else [at_episode]:
        try:
            checkpoint.verify(kept[episode])
        except CheckpointError as error:
            damage = f": {error}"
            continue
        return kept[episode], checkpoint.step_of(kept[episode]), episode
    raise ConfigError(f"trial {parent_folder.name} has no checkpoint that a fork could start from{damage}")


def fork_files(source: Path, fork_folder: Path) -> Path:
    """Copy the parent's checkpoint `source` into a fork's folder, and return the copy.

    May be repeated: leftovers are replaced. An interrupted copy does not count as a checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the copy cannot be written.
    """
    extra = checkpoint.read_manifest(source)["extra"]
    if GUARD in extra:
        extra = {**extra, GUARD: GuardState.from_dict(extra[GUARD]).with_new_patience().to_dict()}
    for left in list(fork_folder.glob("step-*")):
        checkpoint.remove(left)
    target = fork_folder / source.name
    checkpoint.copy(source, target, extra=extra)
    return target


def by_episode(folder: Path) -> dict[int, Path]:
    """Return a trial's finished checkpoints by ascending episode, from their manifests alone."""
    paths = {}
    for path in checkpoint.complete(folder):
        with suppress(CheckpointError, KeyError):
            paths[int(checkpoint.read_manifest(path)["extra"][EPISODE])] = path
    return paths


def stages(rows: Sequence[TrialRow], trial: TrialRow | NewTrial) -> tuple[Stage, ...]:
    """Return the stages of a trial, stored or to be added, before its own values apply; empty: from the start.

    A confirming run has those of the trial it confirms, with its own seed and length. `rows` hold its ancestors.
    """
    if trial.parent is None or trial.role is Role.SEARCH:
        return ()
    parent = next(row for row in rows if row.number == trial.parent)
    earlier = stages(rows, parent)
    if trial.role is Role.CONFIRM:
        changes = {name: trial.config[name] for name in ("seed", "total_episodes")}
        return tuple(replace(stage, values={**stage.values, **changes}) for stage in earlier)
    episode = (trial.fork_step or 0) * PPOConfig.from_dict(parent.config).batch_sizes(world_size=1).batch_size
    if earlier and earlier[-1].until_episode == episode:  # the parent was forked where it began
        return earlier
    return (*earlier, Stage(parent.config, episode, parent.number))


def find(study: StudyRow, trial: int, step: int) -> Path | str:
    """Return a trial's checkpoint of a step in the study's folder, or why it is not there."""
    if study.folder is None:
        return "the store does not say where the study's checkpoints are"
    folder = study_folder.own_folder(study)
    if folder is None:
        return "the study's folder of checkpoints is not on this machine"
    path = checkpoint.step_folder(folder / str(trial), step)
    if (path / checkpoint.MANIFEST).exists():
        return path
    return (
        "of a trial only the newest checkpoints, its best within the study's KL budget and those on the study's front "
        "are kept"
    )


def kept_by_episode(study: StudyRow, trial: int) -> dict[int, Path]:
    folder = study_folder.own_folder(study)
    return {} if folder is None else by_episode(folder / str(trial))


@dataclass(frozen=True)
class ValueCheckpoint:
    """The checkpoint that gave a trial's value."""

    step: int
    episode: int
    where: Path | str
    """Where it is, or why it is not kept here."""


def value_checkpoint(store: Store, study: StudyRow, trial: TrialRow) -> ValueCheckpoint | None:
    """Return the checkpoint that a trial's value comes from; None: it has no value."""
    for row in store.steps([trial.id], ("eval/reward",), evaluations_only=True):
        if row["step"] == trial.value_step:
            step = int(row["step"])
            return ValueCheckpoint(step, int(row["episode"]), find(study, trial.number, step))
    return None

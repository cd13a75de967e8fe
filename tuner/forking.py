"""Forks: going on from another trial's checkpoint with some values changed. Never imports torch.

A fork's folder begins with a copy of its parent's checkpoint, so that it is taken up like any interrupted trial, only
with another config. Which values a checkpoint fixes stands at their declarations; what the others do from there on is
said at `PPOTrainer.restore`.

The guard goes on with what it remembers of the parent (first readings, highest KL, evidence), since the fork's curve
up to there is its parent's. Only its patience begins anew: the changed values are given their own steps to mend what
the old ones broke.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ppo_core import checkpoint
from ppo_core.checkpoint import EPISODE
from ppo_core.declare import HyperValue
from ppo_core.errors import CheckpointError, ConfigError, nearest
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig, require_name
from tuner.guard import GuardState

GUARD = "guard"
"""Key of a manifest's `extra` that holds the guard's state."""

CHANGEABLE = tuple(name for name, declared in HYPERPARAMETERS.items() if not declared.fixed_by_checkpoint)
"""The hyperparameters that a fork may change."""


def check(config: Mapping[str, HyperValue], changes: Mapping[str, object], episode: int) -> dict[str, HyperValue]:
    """Return the config of a fork, at `episode`, of a trial with `config`.

    Raises:
        ConfigError: a name is unknown or fixed by the checkpoint, a value is not allowed, nothing is changed, or the
            fork would have no episode left.
    """
    before = PPOConfig.from_dict(config)
    values = {name: require_name(name, "fork").coerce(value) for name, value in changes.items()}
    changed = {name: value for name, value in values.items() if value != getattr(before, name)}
    if not changed:
        raise ConfigError("a fork changes at least one value; with none it would be its parent again")
    for name in changed:
        why = HYPERPARAMETERS[name].fixed_by_checkpoint
        if why:
            hint = nearest(name, CHANGEABLE)
            raise ConfigError(f"{name} = {values[name]!r} is not allowed: a fork cannot change it, since {why}{hint}")
    after = PPOConfig.from_dict({**config, **changed})
    _require_same_batch(before, after)
    _require_episodes_left(after, episode)
    return after.to_dict()


def choose(parent_folder: Path, at_episode: int | None) -> tuple[Path, int, int]:
    """Return the checkpoint to fork at, with its step and episode: the newest undamaged one, or the one at an episode.

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
    raise ConfigError(f"trial {parent_folder.name} keeps no checkpoint that a fork could begin at{damage}")


def fork_files(source: Path, fork_folder: Path) -> Path:
    """Copy the checkpoint `source` of the parent into a fork's folder, and return where it is there.

    May be done again: what an earlier attempt left in the fork's folder is replaced. One that is cut short leaves
    nothing that counts as a checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the copy cannot be written.
    """
    manifest = checkpoint.read_manifest(source)
    extra = manifest["extra"]
    if GUARD in extra:
        extra = {**extra, GUARD: _with_new_patience(GuardState.from_dict(extra[GUARD])).to_dict()}
    for left in list(fork_folder.glob("step-*")):
        checkpoint.remove(left)
    target = fork_folder / source.name

    def fetch(name: str, path: Path) -> None:
        shutil.copyfile(source / name, path)

    checkpoint.copy(manifest, fetch, target, extra=extra)
    return target


def _with_new_patience(state: GuardState) -> GuardState:
    return replace(state, broken={})


def by_episode(folder: Path) -> dict[int, Path]:
    """Return a trial's finished checkpoints by episode, by their manifests alone."""
    found = {}
    for path in checkpoint.complete(folder):
        with suppress(CheckpointError, KeyError):
            found[int(checkpoint.read_manifest(path)["extra"][EPISODE])] = path
    return found


def _require_same_batch(before: PPOConfig, after: PPOConfig) -> None:
    """Raise ConfigError where the values that state batch_size together now state another."""
    was, now = (config.batch_sizes(world_size=1).batch_size for config in (before, after))
    if was != now:
        why = HYPERPARAMETERS["batch_size"].fixed_by_checkpoint
        raise ConfigError(
            f"per_device_train_batch_size = {after.per_device_train_batch_size} is not allowed in a fork: with "
            f"gradient_accumulation_steps it makes batch_size {now} instead of {was}; a fork cannot change that, "
            f"since {why}"
        )


def _require_episodes_left(config: PPOConfig, episode: int) -> None:
    whole = config.num_iterations() * config.batch_sizes(world_size=1).batch_size
    if whole <= episode:
        raise ConfigError(
            f"total_episodes = {config.total_episodes} leaves a fork at episode {episode} nothing to do: fork at an "
            f"earlier one, or set total_episodes over {episode}"
        )

"""Reading a YAML that was written for TRL's PPO, as it is.

A file is TRL's if it holds a field that only TRL has. Fields it does not state have TRL's defaults, the critic is TRL's
(a network of its own, begun as the reward model, at the policy's learning rate), and each key it holds is
accounted for in one line. What depends on the number of iterations waits until that is known: see `Cadences`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppo_core.command import trl_fields
from ppo_core.command.config_files import SETTINGS, hyperparameter
from ppo_core.command.settings import Settings
from ppo_core.command.trl_translation import NULL_SAYS, REWARD_MODEL, TRANSLATORS, Reading
from ppo_core.declaration import HyperValue
from ppo_core.errors import ConfigError, nearest
from ppo_core.hyperparameters import HYPERPARAMETERS, PPOConfig

Kind = Literal["as it is", "translated", "not TRL's PPO's", "no meaning here"]


@dataclass(frozen=True)
class Told:
    """What became of one key of the file."""

    key: str
    kind: Kind
    text: str


@dataclass(frozen=True)
class Cadences:
    """What TRL counts in iterations or epochs, from which our episodes follow once the run's length is known."""

    epochs: float | None
    """Passes over the training prompts; None where the file states total_episodes."""
    generations: int
    """How often TRL samples completions in a run; here evaluations."""
    warmup_steps: float
    """Iterations; below 1 a share of them."""
    save_steps: float | None
    """Iterations between checkpoints, below 1 a share of them; None: no such cadence."""

    def total_episodes(self, prompts: int) -> int | None:
        """Return the run's length for that many training prompts, or None where the file states it."""
        return None if self.epochs is None else max(1, int(self.epochs * prompts))

    def values(self, config: PPOConfig) -> dict[str, HyperValue]:
        """Return the hyperparameters that follow from the length of `config`'s run."""
        batch, iterations = config.batch_sizes(1).batch_size, config.num_iterations()
        every = max(1, iterations // self.generations) if self.generations else iterations
        values: dict[str, HyperValue] = {"eval_every_episodes": every * batch}
        if self.warmup_steps and config.lr_scheduler_type != "constant":
            share = self.warmup_steps if self.warmup_steps < 1 else self.warmup_steps / iterations
            values["warmup_ratio"] = min(share, 1 - 1 / (iterations + 1))
        return values

    def save_every_episodes(self, config: PPOConfig) -> int | None:
        """Return the episodes between checkpoints of `config`'s run, or None without such a cadence."""
        if self.save_steps is None:
            return None
        steps = self.save_steps if self.save_steps >= 1 else self.save_steps * config.num_iterations()
        return max(1, round(steps)) * config.batch_sizes(1).batch_size


@dataclass(frozen=True)
class TrlFile:
    """A file of TRL's in our words."""

    settings: Settings
    values: Mapping[str, HyperValue]
    cadences: Cadences
    told: tuple[Told, ...]
    """One for each key of the file, in its order."""

    def for_task(self, prompts: int, *, has_reward_model: bool) -> dict[str, HyperValue]:
        """Return the values on a task with so many training prompts, with or without a reward model."""
        values = dict(self.values)
        total = self.cadences.total_episodes(prompts)
        if total is not None:
            values["total_episodes"] = total
        if values["value_model_path"] == REWARD_MODEL and not has_reward_model:
            values["value_model_path"] = None
        return values

    def for_length(self, config: PPOConfig) -> dict[str, HyperValue]:
        """Return what follows from the length and the rate of `config`'s run: cadences, and the shared rate."""
        return {"value_learning_rate": config.learning_rate, **self.cadences.values(config)}


def is_trl(content: Mapping[str, Any]) -> bool:
    """Return whether a config file's content has a field that only TRL has."""
    only_trl = set(trl_fields.FIELDS) - set(HYPERPARAMETERS) - set(SETTINGS)
    return bool(only_trl & set(content)) or ("stop_token" in content and content["stop_token"] is None)


def read(content: Mapping[str, Any], where: str) -> TrlFile:
    """Return what a file of TRL's says; `where` names it in errors.

    Raises:
        ConfigError: an unknown key, or a value that is not allowed; the message names the key.
    """
    reading = Reading(where, dict(content))
    told = tuple(_told(reading, key, value) for key, value in content.items())
    return TrlFile(
        Settings(**reading.settings, prompt_splits=reading.prompts or None),
        reading.values,
        Cadences(reading.epochs, reading.generations, reading.warmup_steps, reading.save_steps),
        told,
    )


def lines(told: tuple[Told, ...]) -> list[str]:
    """Return what is said of a file's keys: those read as they are on one line, every other on its own."""
    same = [item.key for item in told if item.kind == "as it is"]
    head = [f"read as they are: {', '.join(same)}"] if same else []
    return head + [f"{item.key}: {item.text}" for item in told if item.kind != "as it is"]


def _told(reading: Reading, key: str, value: Any) -> Told:
    if key in trl_fields.IGNORED_BY_TRL:
        if key in ("max_grad_norm", "gradient_checkpointing") and value is not None:
            reading.values[key] = hyperparameter(key, value, reading.where)
        return Told(key, "not TRL's PPO's", trl_fields.IGNORED_BY_TRL[key])
    if key in trl_fields.MEANINGLESS:
        return Told(key, "no meaning here", f"left out: {trl_fields.MEANINGLESS[key]}")
    if key in TRANSLATORS:
        text = "left as TRL's default" if value is None and key not in NULL_SAYS else TRANSLATORS[key](reading, value)
        return Told(key, "translated", text)
    if key in HYPERPARAMETERS:
        if value is not None or HYPERPARAMETERS[key].optional:
            reading.values[key] = hyperparameter(key, value, reading.where)
        remark = _remark(reading, key)
        return Told(key, "not TRL's PPO's", remark) if remark else Told(key, "as it is", str(value))
    raise ConfigError(
        f'{reading.where}: unknown field "{key}" beside TRL\'s{nearest(key, (*trl_fields.FIELDS, *HYPERPARAMETERS))}'
    )


def _remark(reading: Reading, key: str) -> str:
    """Return where a field of the same name does something else here, or nothing."""
    content = reading.content
    if key == "num_mini_batches" and reading.values[key] != 1 and content.get("gradient_accumulation_steps", 1) != 1:
        return "TRL's PPO with gradient_accumulation_steps over 1 did not step once a mini-batch; here it does"
    if key == "missing_eos_penalty" and content[key] and content.get("stop_token") is None:
        return "TRL's PPO looks for EOS anywhere in a response; here one that no stop token ends pays it"
    return ""

"""A run's hyperparameters: what follows from their values, which contradict each other, and which do nothing.

`ppo_core.config.fields` declares them. Never imports torch.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ppo_core.config import batch_sizes
from ppo_core.config.batch_sizes import BatchSizes
from ppo_core.config.checks import listed
from ppo_core.config.declare import Hyperparameter, HyperValue, read_declarations
from ppo_core.config.fields import PPOFields
from ppo_core.errors import ConfigError, nearest
from ppo_core.output import pluralize

FEW_ITERATIONS = 20
"""Iterations from which on recorded runs that keep their pace hold their KL: nine in ten with 20 and 25, one in three
with 10 (docs/benchmarks.md)."""
MOST_KL_STEP = 0.1
"""Highest default of kl_step."""
LEAST_LAM = 0.95
"""Lowest default of lam: TRL's."""
REWARD_MODEL = "reward_model"
"""Value of value_model_path for a critic that begins as the task's reward model."""


@dataclass(frozen=True)
class PPOConfig(PPOFields):
    """One PPO run's hyperparameters, checked.

    Raises:
        ConfigError: a value of the wrong type or out of its valid range, or a rule across fields that is broken.
    """

    def __post_init__(self) -> None:
        for name, declaration in HYPERPARAMETERS.items():
            object.__setattr__(self, name, declaration.coerce(getattr(self, name)))
        _check(self)
        if None in (self.gradient_accumulation_steps, self.per_device_train_batch_size):
            # With both, the batch depends on the number of processes.
            batch = self.batch_sizes(world_size=1).batch_size
            batch_sizes.require_divides("num_generations", self.num_generations, "batch_size", batch)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config") -> "PPOConfig":
        """Return the config of `values` over the defaults; an unknown key raises an error with the nearest name."""
        for name in values:
            require_name(name, where)
        return cls(**values)

    def to_dict(self) -> dict[str, HyperValue]:
        """Return every field by name."""
        return dataclasses.asdict(self)

    def changed(self) -> dict[str, HyperValue]:
        """Return the values other than the declared defaults, by name."""
        return {name: value for name, value in self.to_dict().items() if value != HYPERPARAMETERS[name].default}

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Return the whole batch hierarchy for `world_size` processes, or raise ConfigError if it does not divide."""
        return batch_sizes.resolve(world_size, vars(self))

    def spread_over(self, world_size: int) -> "PPOConfig":
        """Return the same run with a batch size that counts no processes; ConfigError if they cannot share it."""
        sizes = self.batch_sizes(world_size)
        if world_size == 1:
            return self
        return dataclasses.replace(self, batch_size=sizes.batch_size, gradient_accumulation_steps=None)

    def share_of(self, world_size: int) -> "PPOConfig":
        """Return a run of one process's share of this one, which takes the same memory on a device."""
        sizes = self.batch_sizes(world_size)
        if world_size == 1:
            return self
        return dataclasses.replace(
            self,
            total_episodes=self.num_iterations(world_size) * sizes.local_batch_size,
            batch_size=sizes.local_batch_size,
            mini_batch_size=sizes.local_mini_batch_size,
            num_mini_batches=None,
            gradient_accumulation_steps=None,
        )

    def shards_weights(self, world_size: int) -> bool:
        """Return True if each of `world_size` processes holds a share of the weights."""
        return self.use_fsdp and world_size > 1

    def num_iterations(self, world_size: int = 1) -> int:
        """Return the number of rollout batches: total_episodes / batch_size, rounded up."""
        return math.ceil(self.total_episodes / self.batch_sizes(world_size).batch_size)

    def whole_episodes(self, world_size: int = 1) -> int:
        """Return the number of episodes: total_episodes, rounded up to whole rollout batches."""
        return self.num_iterations(world_size) * self.batch_sizes(world_size).batch_size

    @property
    def eval_interval(self) -> int:
        """Episodes between evaluations, with the default filled in."""
        return self.eval_every_episodes or max(1, self.total_episodes // 10)

    @property
    def horizon(self) -> int:
        """Episodes of the adaptive controller's horizon, with the default filled in."""
        return self.kl_horizon or max(1, self.total_episodes // 10)

    @property
    def keeps_kl_step(self) -> bool:
        """True if the run keeps its own pace: the policy's learning rate follows the KL step, and β holds the KL."""
        return self.lr_controller == "kl_step"

    def wanted_kl_step(self, world_size: int = 1) -> float:
        """Return the KL step of a run that keeps it, in nats per response, with the default filled in."""
        assert self.kl_target is not None
        share = default_kl_step(self.num_iterations(world_size) - self.critic_warmup)
        return (share if self.kl_step is None else self.kl_step) * self.kl_target

    @property
    def evaluates_in_float32(self) -> bool:
        """True if evaluations read in float32 what passes in bfloat16 do: from frozen weights, a layer at a time."""
        rules_out = self.load_in_4bit or self.lora_modules_to_save is not None
        return self.use_peft and not rules_out and "flash" not in (self.attn_implementation or "")

    @property
    def has_critic(self) -> bool:
        """True if advantages come from a critic; the critic-free baselines have none."""
        return self.advantage_estimator == "gae"

    @property
    def whitens_advantages(self) -> bool:
        """True if advantages are whitened, with the default filled in."""
        return self.has_critic if self.whiten_advantages is None else self.whiten_advantages

    @property
    def scales_advantages(self) -> bool:
        """True if advantages have a spread of about 1 in any unit of the reward."""
        return self.whitens_advantages or self.advantage_estimator == "grpo"

    @property
    def has_unitless_beta(self) -> bool:
        """True if β weighs the KL, a term of the loss, against advantages that have a spread of about 1."""
        return self.use_kl_loss and self.scales_advantages

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop strings, one by one: a text, or, where it begins with [, a JSON list of texts."""
        given = self.stop_strings or ""
        texts = listed(given) or [] if given.startswith("[") else [given]
        return tuple(texts) if all(texts) else ()


def default_kl_step(iterations: int) -> float:
    """Return the KL step of a run whose policy learns in so many iterations, as a share of the KL target."""
    return min(MOST_KL_STEP, 1 / max(1, iterations))


def default_lam(length: float) -> float:
    """Return the λ of a run whose first responses have this mean length, in tokens."""
    return max(LEAST_LAM, 1 - 1 / length)


HYPERPARAMETERS: Mapping[str, Hyperparameter] = MappingProxyType(read_declarations(PPOConfig))


def require_name(name: str, where: str) -> Hyperparameter:
    """Return the hyperparameter `name`, or raise ConfigError with the nearest valid one."""
    if name not in HYPERPARAMETERS:
        hint = nearest(name, HYPERPARAMETERS) or "; ppo-tuner train --help lists them"
        raise ConfigError(f'{where}: unknown hyperparameter "{name}"{hint}')
    return HYPERPARAMETERS[name]


_NEEDS_CRITIC = ("value_learning_rate", "value_lr_scheduler_type", "value_warmup_ratio", "value_max_grad_norm",
                 "cliprange_value", "vf_coef", "critic_warmup", "value_model", "value_model_path", "lam",
                 "value_lam", "gamma", "normalize_values")  # fmt: skip
_MEMORY = ("local_rollout_forward_batch_size", "per_device_train_batch_size", "gradient_checkpointing", "use_fsdp",
           "fsdp_reshard_after_forward")  # fmt: skip
_NEEDS_LORA = ("lora_r", "lora_alpha", "lora_target_modules", "use_rslora", "lora_modules_to_save")


def _check(config: PPOConfig) -> None:
    """Raise ConfigError if two values of `config` contradict each other."""
    value_schedule = config.value_lr_scheduler_type or config.lr_scheduler_type
    for network, schedule in (("", config.lr_scheduler_type), ("value_", value_schedule)):
        if schedule == "constant" and getattr(config, f"{network}warmup_ratio"):
            raise ConfigError(
                f'{network}lr_scheduler_type = "constant" has no warm-up; use "constant_with_warmup", or '
                f"{network}warmup_ratio = 0"
            )
    if config.keeps_kl_step and config.kl_target is None:
        raise ConfigError('lr_controller = "kl_step" needs kl_target: the step is a share of it')
    if config.keeps_kl_step and config.learning_rate == 0:
        raise ConfigError('learning_rate = 0 is not allowed with lr_controller = "kl_step", which only multiplies it')
    goes_with = "hold" if config.keeps_kl_step else "adaptive"
    if config.kl_controller not in (None, goes_with):
        raise ConfigError(
            f'kl_controller = "{config.kl_controller}" is not allowed with lr_controller = "{config.lr_controller}"; '
            f'expected "{goes_with}"'
        )
    if config.dual_clip is not None and config.dual_clip <= 1 + (config.cliprange_high or config.cliprange):
        raise ConfigError(
            f"dual_clip = {config.dual_clip:g} is not allowed beside the clip range; expected a number over "
            f"{1 + (config.cliprange_high or config.cliprange):g}, where the ratio is clipped already"
        )
    if config.has_critic:
        if config.critic_warmup >= config.num_iterations() and config.critic_warmup:
            raise ConfigError(
                f"critic_warmup = {config.critic_warmup} leaves the policy no iteration to learn in: the run has "
                f"{config.num_iterations()}"
            )
    elif config.num_generations < 2:
        raise ConfigError(
            f"num_generations = {config.num_generations} is not allowed with advantage_estimator = "
            f'"{config.advantage_estimator}": at least 2, since a response is compared with its prompt\'s others'
        )
    elif config.critic_warmup:
        raise ConfigError(
            f'critic_warmup needs a critic; advantage_estimator = "{config.advantage_estimator}" has none'
        )
    if config.load_in_4bit and not config.use_peft:
        raise ConfigError("load_in_4bit = true needs use_peft = true: 4-bit weights are frozen, adapters learn")
    for name, other, why in (
        ("use_peft", True, "adapters learn on weights that the reference holds whole"),
        ("optim", "adamw_8bit", "it is sharded"),
    ):
        if config.use_fsdp and getattr(config, name) == other:
            raise ConfigError(f"use_fsdp is not allowed beside {name} = {str(other).lower()}: {why}")
    if config.value_model_path is not None and config.value_model == "shared":
        raise ConfigError('value_model_path needs value_model = "separate": a shared critic is a head on the policy')
    if config.stop_strings is not None and not config.stop_texts:
        given = config.stop_strings
        raise ConfigError(
            f'stop_strings = {given!r} is not allowed; expected a string, or a JSON list of strings such as ["\\n"]'
        )


MAKES_INERT = ("advantage_estimator", "value_model", "kl_target", "lr_controller", "use_peft", "overlong_buffer")
"""Hyperparameters that can make others ineffective; `inert` reads these."""


def inert(name: str, fixed: Mapping[str, HyperValue]) -> str | None:
    """Return why searching `name` would have no effect with the `fixed` values, or None."""
    if fixed.get("advantage_estimator", "gae") != "gae" and name in _NEEDS_CRITIC:
        return f'advantage_estimator = "{fixed["advantage_estimator"]}" has no critic'
    if name == "vf_coef" and fixed.get("value_model", "shared") == "separate":
        return "with a separate critic AdamW cancels the weight of its loss; search value_learning_rate instead"
    if name in ("kl_controller", "kl_horizon") and fixed.get("kl_target") is None:
        return "it belongs to a β that moves; set kl_target"
    if fixed.get("lr_controller") == "kl_step":
        if name in ("kl_coef", "kl_horizon", "normalize_kl_coef"):
            return 'with lr_controller = "kl_step" β begins and moves by itself'
        if name == "learning_rate":
            return 'with lr_controller = "kl_step" the rate follows the KL step, and only its search begins there'
    elif name == "kl_step":
        return 'it belongs to lr_controller = "kl_step"'
    if name in _NEEDS_LORA and not fixed.get("use_peft", False):
        return "there are no adapters; set use_peft = true"
    policy_schedule = str(fixed.get("lr_scheduler_type", "linear"))
    schedules = (policy_schedule, str(fixed.get("value_lr_scheduler_type") or policy_schedule))
    if name == "min_lr_rate" and all(schedule.startswith("constant") for schedule in schedules):
        return "a constant learning rate never falls"
    if name == "overlong_penalty" and fixed.get("overlong_buffer") is None:
        return "it belongs to overlong_buffer; set that"
    if name in _MEMORY:
        return "it decides memory, not the experiment"
    return None


def cautions(config: PPOConfig) -> list[str]:
    """Return warnings on allowed values that will have hardly any effect or not reach their aim, one line each."""
    lines = []
    for name in ("kl_coef", "kl_step"):
        value, why = getattr(config, name), inert(name, config.to_dict())
        if why and value != HYPERPARAMETERS[name].default:
            lines.append(f"{name} = {value:g} does nothing: {why}")
    is_adaptive = config.kl_target is not None and not config.keeps_kl_step
    if is_adaptive and config.kl_coef == 0:
        lines.append("kl_target does nothing with kl_coef = 0: an adaptive β is only ever multiplied, so it stays 0")
    if is_adaptive and config.horizon > config.total_episodes:
        lines.append(
            f"kl_horizon = {config.horizon} is longer than the run ({pluralize(config.total_episodes, 'episode')}), so "
            f"β can move by at most {20 * config.total_episodes / config.horizon:.2g}% towards kl_target"
        )
    sizes = config.batch_sizes(world_size=1) if config.gradient_accumulation_steps is None else None
    if sizes is not None and config.keeps_kl_step and config.num_iterations() < FEW_ITERATIONS:
        lines.append(
            f"a run of {pluralize(config.num_iterations(), 'iteration')} may end far from its kl_target: give it "
            f"{FEW_ITERATIONS} or more, by more total_episodes ({config.total_episodes}) or a smaller batch_size "
            f"({sizes.batch_size})"
        )
    if sizes is not None and config.num_ppo_epochs == 1 and sizes.num_mini_batches == 1:
        lines.append("with one PPO epoch and one mini-batch the ratio is always 1, so cliprange does nothing")
    if config.use_kl_loss and config.kl_estimator == "k1":
        lines.append(
            "as a loss k1's gradient is zero on average, so β would hold nothing; use kl_estimator k2 or k3 with "
            "use_kl_loss"
        )
    return lines

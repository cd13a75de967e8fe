"""What holds across hyperparameters: values that contradict each other, and values that do nothing."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ppo_core.batch_sizes import divisors_near
from ppo_core.declare import HyperValue
from ppo_core.errors import ConfigError

if TYPE_CHECKING:
    from ppo_core.hyperparameters import PPOConfig

_NEEDS_CRITIC = ("value_learning_rate", "value_lr_scheduler_type", "value_warmup_ratio", "value_max_grad_norm",
                 "cliprange_value", "vf_coef", "critic_warmup", "value_model", "value_model_path", "lam")  # fmt: skip
_NEEDS_LORA = ("lora_r", "lora_alpha", "lora_target_modules")


def check(config: "PPOConfig") -> None:
    """Raise ConfigError where two values of `config` contradict each other."""
    for kind, ratio in (("lr_scheduler_type", "warmup_ratio"), ("value_lr_scheduler_type", "value_warmup_ratio")):
        if getattr(config, kind) == "constant" and getattr(config, ratio):
            raise ConfigError(f'{kind} = "constant" has no warm-up; use "constant_with_warmup", or {ratio} = 0')
    if config.value_lr_scheduler_type is None and config.lr_scheduler_type == "constant" and config.value_warmup_ratio:
        raise ConfigError(
            'lr_scheduler_type = "constant" has no warm-up, for the critic neither; set value_lr_scheduler_type = '
            '"constant_with_warmup", or value_warmup_ratio = 0'
        )
    if config.dual_clip is not None and config.dual_clip <= 1 + (config.cliprange_high or config.cliprange):
        raise ConfigError(
            f"dual_clip = {config.dual_clip:g} is not allowed beside the clip range: over "
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
    if config.value_model_path is not None and config.value_model == "shared":
        raise ConfigError('value_model_path needs value_model = "separate": a shared critic is a head on the policy')
    texts(config.stop_strings)


def check_batch(config: "PPOConfig", batch_size: int) -> None:
    """Raise ConfigError where the rollout batch of `batch_size` episodes cannot hold whole groups of responses."""
    if batch_size % config.num_generations:
        near = " or ".join(map(str, divisors_near(config.num_generations, batch_size)))
        raise ConfigError(
            f"num_generations = {config.num_generations} does not divide batch_size = {batch_size}; the nearest that "
            f"do: {near}"
        )


def texts(stop_strings: str | None) -> tuple[str, ...]:
    """Return the stop strings one by one; one text that begins with [ is read as a JSON list.

    Raises:
        ConfigError: that list is no list of texts, or a text is empty.
    """
    if stop_strings is None:
        return ()
    found: object = [stop_strings]
    if stop_strings.startswith("["):
        try:
            found = json.loads(stop_strings)
        except ValueError:
            found = None
    if isinstance(found, list) and found and all(isinstance(text, str) and text for text in found):
        return tuple(found)
    raise ConfigError(
        f'stop_strings = {stop_strings!r} is not allowed: a text, or a JSON list of texts such as ["\\n"]'
    )


def inert(name: str, fixed: Mapping[str, HyperValue]) -> str | None:
    """Return why searching `name` would do nothing beside the `fixed` values, or None where it does something."""
    if fixed.get("advantage_estimator", "gae") != "gae" and name in _NEEDS_CRITIC:
        return f'advantage_estimator = "{fixed["advantage_estimator"]}" has no critic'
    if name == "vf_coef" and fixed.get("value_model", "shared") == "separate":
        return "with a separate critic AdamW cancels the weight of its loss; search value_learning_rate instead"
    if name == "kl_horizon" and fixed.get("kl_target", None) is None:
        return "the horizon belongs to an adaptive β; set kl_target"
    if name in _NEEDS_LORA and not fixed.get("use_peft", False):
        return "there are no adapters; set use_peft = true"
    if name == "overlong_penalty" and fixed.get("overlong_buffer") is None:
        return "it belongs to overlong_buffer; set that"
    if name in ("local_rollout_forward_batch_size", "per_device_train_batch_size", "gradient_checkpointing"):
        return "it decides memory, not the experiment"
    return None


def cautions(config: "PPOConfig") -> list[str]:
    """Return what is allowed but will hardly do what it says, one line each."""
    lines = []
    if config.kl_target is not None and config.horizon > config.total_episodes:
        lines.append(
            f"kl_horizon = {config.horizon} is longer than the run ({config.total_episodes} episodes), so β can move "
            f"by at most {20 * config.total_episodes / config.horizon:.2g}% towards kl_target"
        )
    sizes = config.batch_sizes(world_size=1) if config.gradient_accumulation_steps is None else None
    if sizes is not None and config.num_ppo_epochs == 1 and sizes.num_mini_batches == 1:
        lines.append("with one PPO epoch and one mini-batch the ratio is always 1, so cliprange does nothing")
    if config.use_kl_loss and config.kl_estimator == "k1":
        lines.append(
            "as a loss k1's gradient is zero on average, so β would hold nothing; use kl_estimator k2 or k3 with "
            "use_kl_loss"
        )
    return lines

"""Every PPO hyperparameter, declared once.

One `Hyper` declaration per field feeds validation, the command line, the search space, the dashboard's
labels and the docs; the fields stand by group in this package's files and come together in `PPOConfig`.
`valid` is mathematics and can never be left; `search` is advice for a 1B to 7B model, which a task or a
study may replace. This package never imports torch.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ppo_core import batch_sizes
from ppo_core.batch_sizes import BatchSizes
from ppo_core.declare import Hyperparameter, HyperValue, read_declarations, with_help
from ppo_core.errors import ConfigError, nearest
from ppo_core.hyperparameters import rules
from ppo_core.hyperparameters.batches import Batches
from ppo_core.hyperparameters.kl import KLControl
from ppo_core.hyperparameters.losses import Losses
from ppo_core.hyperparameters.networks import Networks
from ppo_core.hyperparameters.optimization import Optimization
from ppo_core.hyperparameters.rewards import Rewards
from ppo_core.hyperparameters.run import RunLength
from ppo_core.hyperparameters.sampling import Sampling


@with_help
@dataclass(frozen=True)
class PPOConfig(
    Networks, Sampling, Rewards, KLControl, Losses, Batches, Optimization, RunLength
):  # the last base's fields come first
    """One PPO run's hyperparameters, under TRL's names where TRL has the field.

    A plain dataclass, not a child of `transformers.TrainingArguments`, whose hundred fields mostly
    do nothing in an online RL loop. Where to find what users look for there:

    | TrainingArguments              | here                                                         |
    |--------------------------------|--------------------------------------------------------------|
    | num_train_epochs, max_steps    | `total_episodes` (passes over one rollout: `num_ppo_epochs`)  |
    | per_device_train_batch_size    | the same: rows of one forward and backward pass              |
    | gradient_accumulation_steps    | the same, or derived from `batch_size`; see `batch_sizes`     |
    | warmup_steps                   | `warmup_ratio`                                               |
    | optim                          | AdamW always; its betas, `adam_epsilon`, `weight_decay` as there |
    | bf16, gradient_checkpointing   | the same                                                     |
    | eval_strategy, eval_steps      | `eval_every_episodes`                                        |
    | save_steps, save_total_limit   | arguments of the commands; `PPOTrainer.save` between steps   |
    | output_dir, report_to, logging | not hyperparameters: arguments of the commands               |
    | no_cuda, use_cpu, local_rank   | accelerate finds the device                                  |

    Raises:
        ConfigError: a value of the wrong type or out of its valid range, or a rule across fields
            that is broken. The message names the field, the value and what is allowed.
    """

    def __post_init__(self) -> None:
        for name, declaration in HYPERPARAMETERS.items():
            object.__setattr__(self, name, declaration.coerce(getattr(self, name)))
        rules.check(self)
        if None in (self.gradient_accumulation_steps, self.per_device_train_batch_size):
            # With both, the batch depends on the number of processes.
            rules.check_batch(self, self.batch_sizes(world_size=1).batch_size)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config") -> "PPOConfig":
        """Return the config of `values` over the defaults; an unknown key is an error naming the nearest."""
        for name in values:
            require_name(name, where)
        return cls(**values)

    def to_dict(self) -> dict[str, HyperValue]:
        """Return every field by name."""
        return dataclasses.asdict(self)

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Return the whole batch hierarchy for `world_size` processes.

        Raises:
            ConfigError: something does not divide; the message names the nearest sizes that do.
        """
        return batch_sizes.resolve(
            world_size,
            batch_size=self.batch_size,
            mini_batch_size=self.mini_batch_size,
            num_mini_batches=self.num_mini_batches,
            per_device=self.per_device_train_batch_size,
            accumulation=self.gradient_accumulation_steps,
        )

    def num_iterations(self, world_size: int = 1) -> int:
        """Return how many rollout batches the run has: total_episodes / batch_size, rounded up."""
        return math.ceil(self.total_episodes / self.batch_sizes(world_size).batch_size)

    @property
    def eval_interval(self) -> int:
        """Episodes between evaluations, with the default filled in."""
        return self.eval_every_episodes or max(1, self.total_episodes // 4)

    @property
    def horizon(self) -> int:
        """Episodes of the adaptive controller's horizon, with the default filled in."""
        return self.kl_horizon or max(1, self.total_episodes // 10)

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a critic; the critic-free baselines have none."""
        return self.advantage_estimator == "gae"

    @property
    def whitens_advantages(self) -> bool:
        """Whether advantages are whitened, with the default filled in."""
        return self.has_critic if self.whiten_advantages is None else self.whiten_advantages

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop strings, one by one."""
        return rules.texts(self.stop_strings)


HYPERPARAMETERS: Mapping[str, Hyperparameter] = MappingProxyType(read_declarations(PPOConfig))
"""Every hyperparameter by name, in the order of `PPOConfig`."""


def require_name(name: str, where: str) -> Hyperparameter:
    """Return the hyperparameter `name`, or raise ConfigError with the nearest valid one."""
    if name not in HYPERPARAMETERS:
        raise ConfigError(f'{where}: unknown hyperparameter "{name}"{nearest(name, HYPERPARAMETERS)}')
    return HYPERPARAMETERS[name]

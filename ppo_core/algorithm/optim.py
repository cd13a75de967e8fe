"""One AdamW for the policy and one for the critic, each with its own rate, schedule and gradient clip.

Weight decay applies to matrices alone: biases and norms' weights are in a group without it. A schedule is each
iteration's factor on the peak rate (like TRL, one step per rollout batch).
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from ppo_core.config.fields import Schedule
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.world import World
from ppo_core.models import fsdp as sharding
from ppo_core.models import quantized
from ppo_core.models.policy import ActorCritic

BUCKET = 2**24
"""Numbers in a message: adapters have hundreds of small gradients, and many messages cost more than their sums."""


class Optimizers:
    """A run's optimizers. Critic-free runs have none for the critic."""

    def __init__(self, network: ActorCritic, config: PPOConfig) -> None:
        policy, value = network.policy_parameters(), network.value_parameters()
        # LayerNorm, RMSNorm and similar classes: every architecture has its own
        modules = [module for module in network.modules() if "norm" in type(module).__name__.lower()]
        norms = {parameter for module in modules for parameter in module.parameters(recurse=False)}
        self._network = network
        self._skips = config.skip_nonfinite_updates
        self._optim = config.optim
        self._names = {parameter: name for name, parameter in network.trained().items()}
        self.policy = _adamw(policy, norms, config.learning_rate, config)
        self.value = _adamw(value, norms, config.value_learning_rate, config) if value else None
        self._parameters = (policy, value)
        self._clips = (config.max_grad_norm, config.value_max_grad_norm or config.max_grad_norm)

    @property
    def both(self) -> list[Optimizer]:
        """The existing optimizers, the policy's first."""
        return [self.policy] if self.value is None else [self.policy, self.value]

    def set_rates(self, policy: float, value: float) -> None:
        """Set the coming iteration's learning rates, schedule included."""
        for optimizer, rate in zip(self.both, (policy, value), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate

    def clear(self) -> None:
        """Set all gradients to None, which frees their memory."""
        for optimizer in self.both:
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def add_up_gradients(self, world: World) -> None:
        """Sum the gradients of all processes; those of sharded weights were summed in the backward pass."""
        if world.size == 1:
            return
        buckets, count = defaultdict[int, list[Tensor]](list), 0
        for grad in (each.grad for each in self._names if not isinstance(each, DTensor)):
            if grad is not None:
                buckets[count // BUCKET].append(grad)
                count += grad.numel()
        for bucket in buckets.values():
            total = world.sum(torch.cat([grad.flatten() for grad in bucket]))
            for grad, part in zip(bucket, total.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(part.view_as(grad))

    def step(self, *, policy_learns: bool = True) -> dict[str, Tensor] | None:
        """Clip, step and clear; without `policy_learns` the policy is unchanged.

        Return the networks' gradient norms before clipping, scalars; None: one was not finite, so the step is skipped.
        """
        networks = zip(("policy_norm", "value_norm"), self.both, self._parameters, self._clips, strict=False)
        learning = [network for network in networks if policy_learns or network[1] is not self.policy]
        norms = {name: sharding.clip_grad_norm(parameters, clip) for name, _, parameters, clip in learning}
        skipped = self._skips and not bool(torch.stack(list(norms.values())).isfinite().all())
        if not skipped:
            for _, optimizer, _, _ in learning:
                optimizer.step()
        sharding.drop_gathered(self._network)
        self.clear()
        return None if skipped else norms

    @property
    def moment_bytes(self) -> int:
        """Size of AdamW's two moments of all trainable weights."""
        return sum(quantized.moment_bytes(p, self._optim) for p in self._names)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return AdamW's state by weight name; sharded state is gathered in rank 0 (`sharding.to_first`)."""
        return {
            self._names[parameter]: {key: sharding.to_first(value) for key, value in optimizer.state[parameter].items()}
            for optimizer in self.both
            for parameter in self._of(optimizer)
            if parameter in optimizer.state
        }

    def require_own(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise ValueError if a checkpoint's moments belong to other weights."""
        unknown = state.keys() - self._names.values()
        if unknown:
            raise ValueError(f"it holds the moments of other weights, such as {min(unknown)}")

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a checkpoint's moments (see `require_own`); betas, epsilon and weight decay stay this run's."""
        for optimizer in self.both:
            own = optimizer.state_dict()
            own["state"] = {
                number: {key: sharding.like(value, parameter) for key, value in state[self._names[parameter]].items()}
                for number, parameter in enumerate(self._of(optimizer))
                if self._names[parameter] in state
            }
            optimizer.load_state_dict(own)

    @staticmethod
    def _of(optimizer: Optimizer) -> list[nn.Parameter]:
        """Return an optimizer's weights in the order of its state's numbers."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _adamw(parameters: list[nn.Parameter], norms: set[nn.Parameter], rate: float, config: PPOConfig) -> Optimizer:
    """Return an optimizer with groups of decayed and other weights, with sharded ones in groups of their own."""
    decayed = {p for p in parameters if p.ndim > 1} - norms
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in parameters if (p in decayed) == decays and isinstance(p, DTensor) == is_sharded],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for is_sharded in (False, True)
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.optim == "adamw_8bit":
        return quantized.adamw_8bit(groups, **options)
    return AdamW(groups, **options, fused=True)


def lr_factor(kind: Schedule, iteration: int, total: int, warmup_ratio: float, min_lr_rate: float = 0.0) -> float:
    """Return the factor in [0, 1] for `iteration` of 0 to total - 1, and 0 before iteration 0.

    The warm-up rises linearly and never wastes an iteration at 0; `constant` has none. `linear` and `cosine` then fall
    from 1 towards `min_lr_rate`, which they would reach one iteration after the last, scaled as in transformers'
    cosine_with_min_lr. After a critic warm-up of n iterations the policy is at (iteration - n, total - n).
    """
    if iteration < 0:
        return 0.0
    warmup = 0 if kind == "constant" else round(warmup_ratio * total)
    if iteration < warmup:
        return (iteration + 1) / (warmup + 1)
    progress = (iteration - warmup) / max(1, total - warmup)
    falls = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return min_lr_rate + (1 - min_lr_rate) * falls.get(kind, 1.0)

"""One AdamW for the policy and one for the critic, each with its own rate and gradient clip."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ppo_core.hyperparameters import PPOConfig
from ppo_core.policy import ActorCritic


@dataclass(frozen=True)
class StepNorms:
    """Gradient norms of one optimizer step before clipping (0 where a network does not learn), as scalars."""

    policy: Tensor
    value: Tensor
    skipped: bool = False
    """Left out, since a norm was not finite."""


class Optimizers:
    """The optimizers of a run. A critic-free run has none for the critic."""

    def __init__(self, network: ActorCritic, config: PPOConfig) -> None:
        self.policy = _adamw(network.policy_parameters(), config.learning_rate, config)
        parameters = network.value_parameters()
        self.value = _adamw(parameters, config.value_learning_rate, config) if parameters else None
        self._clips = (config.max_grad_norm, config.value_max_grad_norm or config.max_grad_norm)
        self._skips = config.skip_nonfinite_updates

    @property
    def both(self) -> list[AdamW]:
        """The optimizers that there are, the policy's first."""
        return [self.policy] if self.value is None else [self.policy, self.value]

    def set_rates(self, policy: float, value: float) -> None:
        """Set both learning rates for the coming iteration."""
        for optimizer, rate in zip(self.both, (policy, value), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate

    def clear(self) -> None:
        """Drop all gradients."""
        for optimizer in self.both:
            optimizer.zero_grad(set_to_none=True)

    def step(self, *, policy_learns: bool = True) -> StepNorms:
        """Clip, step and clear; during the critic's warm-up the policy stays as it is."""
        learning = self.both if policy_learns else self.both[1:]
        clips = dict(zip(map(id, self.both), self._clips, strict=False))
        norms = {id(o): nn.utils.clip_grad_norm_(_parameters(o), clips[id(o)]) for o in learning}
        skipped = self._skips and not bool(torch.isfinite(torch.stack(list(norms.values()))).all())
        if not skipped:
            for optimizer in learning:
                optimizer.step()
        self.clear()
        none = torch.zeros(())
        value = none if self.value is None else norms[id(self.value)]
        return StepNorms(norms.get(id(self.policy), none), value, skipped)

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Return what a checkpoint keeps."""
        return {name: o.state_dict() for name, o in zip(("policy", "value"), self.both, strict=False)}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        """Take over a checkpoint's moments; betas, epsilon and weight decay stay this run's own."""
        for name, optimizer in zip(("policy", "value"), self.both, strict=False):
            own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(state[name])
            for group, options in zip(optimizer.param_groups, own, strict=True):
                group.update(options)


def _adamw(parameters: list[nn.Parameter], rate: float, config: PPOConfig) -> AdamW:
    return AdamW(
        parameters,
        lr=rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _parameters(optimizer: AdamW) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]

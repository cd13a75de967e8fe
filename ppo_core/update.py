"""The PPO epochs over one rollout batch: shuffle, mini-batches, micro-batches, optimizer steps."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ppo_core.experience import Experience
from ppo_core.hyperparameters import PPOConfig
from ppo_core.policy import ActorCritic, entropy, token_logprobs
from ppo_core.ppo_loss import policy_loss, value_loss
from ppo_core.randomness import mini_batch_order


@dataclass
class Optimizers:
    """One AdamW for the policy and one for the critic, each with its own rate and gradient clip."""

    policy: AdamW
    value: AdamW

    @classmethod
    def build(cls, network: ActorCritic, config: PPOConfig) -> "Optimizers":
        """Return fresh optimizers on the network's parameters."""

        def adamw(parameters: list[nn.Parameter], rate: float) -> AdamW:
            return AdamW(parameters, lr=rate, eps=config.adam_epsilon, weight_decay=config.weight_decay, fused=True)

        return cls(
            adamw(network.policy_parameters(), config.learning_rate),
            adamw(network.value_parameters(), config.value_learning_rate),
        )

    def set_rates(self, policy: float, value: float) -> None:
        """Set both learning rates for the coming iteration."""
        for group in self.policy.param_groups:
            group["lr"] = policy
        for group in self.value.param_groups:
            group["lr"] = value

    def step(self, max_grad_norm: float) -> tuple[float, float]:
        """Clip, step and clear both; return the (policy, value) gradient norms before clipping."""
        norms = []
        for optimizer in (self.policy, self.value):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(float(nn.utils.clip_grad_norm_(parameters, max_grad_norm)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norms[0], norms[1]


@dataclass
class UpdateStatistics:
    """Sums over the tokens of all optimizer steps of one iteration, and over the steps."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0

    def add(self, **values: float) -> None:
        """Add to the sums."""
        for name, value in values.items():
            self.sums[name] += value

    def metrics(self) -> dict[str, float]:
        """Return the declared metrics, each a mean over the tokens (norms: over the steps) that went in."""
        tokens = max(self.sums["tokens"], 1)
        ratio = self.sums["ratio"] / tokens
        return {
            "policy/approxkl_avg": self.sums["approx_kl"] / tokens,
            "policy/clipfrac_avg": self.sums["clipped"] / tokens,
            "loss/policy_avg": self.sums["policy_loss"] / tokens,
            "loss/value_avg": self.sums["value_loss"] / tokens,
            "val/clipfrac_avg": self.sums["value_clipped"] / tokens,
            "val/ratio": ratio,
            "val/ratio_var": self.sums["ratio_squared"] / tokens - ratio**2,
            "policy/grad_norm": self.sums["policy_norm"] / max(self.steps, 1),
            "value/grad_norm": self.sums["value_norm"] / max(self.steps, 1),
        }


def ppo_epochs(
    network: ActorCritic, optimizers: Optimizers, experience: Experience, config: PPOConfig, iteration: int
) -> UpdateStatistics:
    """Learn from one rollout batch: num_ppo_epochs x num_mini_batches optimizer steps."""
    sizes = config.batch_sizes(world_size=1)
    statistics = UpdateStatistics()
    for epoch in range(config.num_ppo_epochs):
        order = torch.tensor(mini_batch_order(config.seed, iteration, epoch, sizes.batch_size))
        for rows in order.split(sizes.mini_batch_size):
            _accumulate(network, experience, rows.split(sizes.per_device_train_batch_size), config, statistics)
            policy_norm, value_norm = optimizers.step(config.max_grad_norm)
            statistics.add(policy_norm=policy_norm, value_norm=value_norm)
            statistics.steps += 1
    return statistics


def _accumulate(
    network: ActorCritic,
    experience: Experience,
    micros: Sequence[Tensor],
    config: PPOConfig,
    statistics: UpdateStatistics,
) -> None:
    """Add the mini-batch's gradients, micro-batch by micro-batch, each normalised by the whole mini-batch's tokens."""
    tokens = experience.sequences.response_mask[torch.cat(list(micros))].sum()
    for micro in micros:
        sequences = experience.sequences.rows(micro)
        mask = sequences.response_mask
        width = mask.shape[1]
        logprobs, values = network(sequences, config.temperature)
        policy = policy_loss(
            token_logprobs(logprobs, sequences.response_ids),
            experience.logprobs[micro, :width],
            experience.advantages[micro, :width],
            mask,
            config.cliprange,
        )
        value = value_loss(
            values,
            experience.values[micro, :width],
            experience.returns[micro, :width],
            mask,
            config.cliprange_value or float("inf"),
        )
        loss = policy.loss + config.vf_coef * value.loss
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (entropy(logprobs) * mask).sum()
        (loss / tokens).backward()
        statistics.add(
            tokens=float(mask.sum()),
            policy_loss=float(policy.loss.detach()),
            value_loss=float(value.loss.detach()),
            clipped=float(policy.clipped),
            value_clipped=float(value.clipped),
            approx_kl=float(policy.approx_kl),
            ratio=float(policy.ratio),
            ratio_squared=float(policy.ratio_squared),
        )

"""The PPO epochs over one rollout batch: shuffle, mini-batches, micro-batches, optimizer steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ppo_core.algorithm.experience import Experience
from ppo_core.algorithm.kl import kl_loss
from ppo_core.algorithm.optim import Optimizers
from ppo_core.algorithm.ppo_loss import policy_loss, value_loss
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed.world import World, add_up
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic, response_states, token_readings
from ppo_core.randomness import mini_batch_order

Sums = dict[str, Tensor]


def add_to(total: Sums, values: Sums) -> None:
    """Add scalars by name; a new name begins at 0."""
    for name, value in values.items():
        total[name] = total[name] + value if name in total else value


@dataclass
class UpdateStatistics:
    """Sums over the tokens of all optimizer steps of one iteration, and over the steps.

    They stay tensors until the end: reading one from a GPU would wait for it.
    """

    steps_an_epoch: int
    sums: Sums = field(default_factory=dict)
    steps: int = 0
    policy_steps: int = 0
    """Those in which the policy learned."""
    skipped: int = 0
    was_cut: bool = False
    """True if the policy had gone too far, so that its updates ended early."""

    def metrics(self) -> dict[str, float]:
        """Return the declared metrics, each a mean over the counted tokens (norms: over the steps)."""
        sums = {name: float(value) for name, value in self.sums.items()}
        taken = max(self.steps - self.skipped, 1)
        metrics = {
            "policy/epochs": self.policy_steps / self.steps_an_epoch,
            "policy/skipped_steps": float(self.skipped),
            "policy/grad_norm": sums.get("policy_norm", 0.0) / max(self.policy_steps - self.skipped, 1),
        }
        if "policy_tokens" in sums:
            means = {name: value / max(sums["policy_tokens"], 1) for name, value in sums.items()}
            metrics |= {
                "policy/approxkl_avg": means["approx_kl"],
                "policy/clipfrac_avg": means["clipped"],
                "loss/policy_avg": means["loss"],
                "val/ratio": means["ratio"],
                "val/ratio_var": max(means["ratio_squared"] - means["ratio"] ** 2, 0.0),
            }
            if "kl_loss" in means:
                metrics["loss/kl_avg"] = means["kl_loss"]
        if "value_tokens" in sums:
            tokens = max(sums["value_tokens"], 1)
            metrics |= {
                "loss/value_avg": sums["value_loss"] / tokens,
                "val/clipfrac_avg": sums["value_clipped"] / tokens,
                "value/grad_norm": sums["value_norm"] / taken,
            }
        return metrics


def ppo_epochs(
    network: ActorCritic,
    optimizers: Optimizers,
    experience: Experience,
    config: PPOConfig,
    iteration: int,
    chunk: ChunkRows,
    world: World,
    most_kl: float = math.inf,
) -> UpdateStatistics:
    """Learn from one rollout batch: num_ppo_epochs x num_mini_batches optimizer steps, or fewer if the policy is cut.

    `experience` holds this process's rows. A mini-batch is drawn from the rows of all processes and spread over them
    again; losses are divided by its tokens, gradients and statistics are summed over all.

    A mini-batch that, before its own step, already shows a KL over `most_kl` from the policy that sampled the batch, in
    nats per response, is the first that the policy does not learn from. A separate critic learns from all.
    """
    sizes = config.batch_sizes(world.size)
    experience = experience.of_all(world)
    gradients = _Gradients(network, optimizers, experience, config, iteration >= config.critic_warmup)
    statistics = UpdateStatistics(sizes.num_mini_batches)
    for epoch in range(config.num_ppo_epochs):
        order = torch.tensor(mini_batch_order(config.seed, iteration, epoch, sizes.batch_size))
        for rows in order.to(experience.advantages.device).split(sizes.mini_batch_size):
            tokens = experience.sequences.response_mask[rows].sum()
            local_rows = rows.split(sizes.local_mini_batch_size)[world.rank]
            sums = add_up(world, chunk.run(partial(gradients.of, local_rows, tokens), most=len(local_rows)))
            if most_kl < math.inf and gradients.policy_learns and float(sums["approx_kl"]) > most_kl * len(rows):
                statistics.was_cut = True
                if network.critic is None:
                    optimizers.clear()
                    return statistics
                gradients.policy_learns = False
                sums = {name: value for name, value in sums.items() if name.startswith("value")}
            optimizers.add_up_gradients(world)
            norms = optimizers.step(policy_learns=gradients.policy_learns)
            statistics.steps += 1
            statistics.policy_steps += gradients.policy_learns
            if norms is None:
                statistics.skipped += 1  # its other numbers may be NaN
            else:
                add_to(statistics.sums, sums | norms)
    return statistics


@dataclass
class _Gradients:
    """Sums the gradients of one optimizer step, micro-batch by micro-batch."""

    network: ActorCritic
    optimizers: Optimizers
    experience: Experience
    config: PPOConfig
    policy_learns: bool

    def of(self, rows: Tensor, tokens: Tensor, size: int) -> Sums:
        """Return the sums over the mini-batch `rows`, of `tokens` tokens, `size` rows of similar length at a time."""
        self.optimizers.clear()  # drop the remains of an attempt that ran out of memory
        if size < len(rows):
            rows = rows[self.experience.sequences.attention_mask[rows].sum(-1).argsort(stable=True)]
        total: Sums = {}
        with self.network.learning():
            for index in rows.split(size):
                micro = self.experience.rows(index)
                for sums in self._own_critic(micro, tokens) if self.network.critic else self._one_trunk(micro, tokens):
                    add_to(total, sums)
        return total

    def _one_trunk(self, micro: Experience, tokens: Tensor) -> Iterator[Sums]:
        """Add the gradients of a policy with the critic's head on it, or without a critic, in one pass."""
        losses = []
        with self.network.precision():
            with torch.set_grad_enabled(self.policy_learns):
                states = response_states(self.network.passes, micro.sequences)
            if self.policy_learns:
                loss, sums = self._policy_loss(micro, states)
                losses.append(loss)
                yield sums
            if self.network.value_head is not None:
                loss, sums = self._value_loss(micro, states)
                losses.append(loss)
                yield sums
        self.network.backward(torch.stack(losses).sum() / tokens)

    def _own_critic(self, micro: Experience, tokens: Tensor) -> Iterator[Sums]:
        """Add the gradients of two networks one after the other, to hold the activations of only one."""
        if self.policy_learns:
            with self.network.precision():
                loss, sums = self._policy_loss(micro, response_states(self.network.passes, micro.sequences))
            self.network.backward(loss / tokens)
            yield sums
        with self.network.precision():
            loss, sums = self._value_loss(micro, None)
        self.network.backward(loss / tokens)
        yield sums

    def _policy_loss(self, micro: Experience, states: Tensor) -> tuple[Tensor, Sums]:
        config, mask = self.config, micro.sequences.response_mask
        logprobs, entropies = token_readings(
            self.network.head, states, micro.sequences, config.temperature, with_entropy=micro.entropy_coef > 0
        )
        clips = {
            name: getattr(config, name) for name in ("cliprange", "cliprange_high", "dual_clip", "log_ratio_clamp")
        }
        policy = policy_loss(logprobs, micro.logprobs, micro.advantages, mask, **clips)
        loss = policy.loss
        sums = {"policy_tokens": mask.sum()} | {name: each.detach() for name, each in vars(policy).items()}
        if entropies is not None:
            loss = loss - micro.entropy_coef * (entropies * mask).sum()
        if config.use_kl_loss:
            kl = kl_loss(logprobs, micro.ref_logprobs, mask, config.kl_estimator, config.kl_clamp)
            loss = loss + micro.kl_loss_coef * kl
            sums["kl_loss"] = kl.detach()
        return loss, sums

    def _value_loss(self, micro: Experience, states: Tensor | None) -> tuple[Tensor, Sums]:
        assert micro.values is not None and micro.returns is not None
        mask, mean, std = micro.sequences.response_mask, self.network.value_mean, self.network.value_std
        values = self.network.standard_values(states, micro.sequences)
        old, returns = ((column - mean) / std for column in (micro.values, micro.returns))
        value = value_loss(values, old, returns, mask, self.config.cliprange_value)
        in_reward = value.loss.detach() * std**2
        sums = {"value_tokens": mask.sum(), "value_loss": in_reward, "value_clipped": value.clipped}
        return self.config.vf_coef * value.loss, sums

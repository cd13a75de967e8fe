"""From rollouts to training data: log-probs, values, KL, rewards, advantages and returns."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ppo_core.algorithm.advantages import broadcast, distribution, gae, grpo, masked_var, masked_whiten, rloo
from ppo_core.algorithm.kl import kl_gap, sampled_kl
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Scored
from ppo_core.distributed.world import ONE_PROCESS, World
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic, LanguageHead, compare, response_states
from ppo_core.sampling.generation import Rollouts
from ppo_core.sampling.sequences import Sequences

# Shaping scores: normalised, clipped, and charged for overlong responses.
#
# Shapes: scores [B]; dense rewards and `mask` [B, T], where the mask is 1 on response tokens. Means and deviations
# are kept in float64 whatever the scores' type.
#
# Sources: Chan, Golub & LeVeque 1983 (merging means and sums of squares); trlx `scale_reward` (running or reference);
# Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13 (the overlong cost).

Moved = TypeVar("Moved")
Normalization = Literal["none", "running", "reference"]
NO_SPREAD = 1e-8
"""Standard deviations up to this, relative to the mean if that is over 1, are rounding, not spread."""


class StatisticsState(TypedDict):
    """`RewardStatistics` in JSON."""

    count: int
    mean: float
    squares: float


class RewardStatistics:
    """Mean and standard deviation of scores: `running` over all so far, `reference` over the first batch, or unused.

    A batch (of all processes, in rank order) is counted before it is shaped, so the first one is shaped by itself.
    Scores without spread (all equal, or only one) are shifted to 0 and not scaled: dividing by almost nothing would
    blow up the first score that differs. A reference batch without spread therefore never changes the scale.
    """

    def __init__(self, mode: Normalization, world: World = ONE_PROCESS) -> None:
        self.mode = mode
        self._world = world
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        """Sum of squared distances from the mean."""

    @property
    def mean(self) -> float:
        """Mean of the counted scores; 0 before any."""
        return self._mean

    @property
    def std(self) -> float:
        """Standard deviation (of the population) of the counted scores; 0 before any."""
        return math.sqrt(self._squares / self._count) if self._count else 0.0

    @property
    def scale(self) -> float:
        """Divisor of scores."""
        spread = self.std
        return spread if spread > NO_SPREAD * max(1.0, abs(self._mean)) else 1.0

    def update(self, scores: Tensor) -> None:
        """Count a batch of scores [B], unless the mode uses none, or has its reference already."""
        if self.mode == "none" or scores.numel() == 0 or (self.mode == "reference" and self._count):
            return
        batch = self._world.gather(scores.detach()).cpu().double()  # some accelerators have no float64
        count, mean = batch.numel(), float(batch.mean())
        squares = float(((batch - mean) ** 2).sum())
        total, apart = self._count + count, mean - self._mean
        self._squares += squares + apart**2 * self._count * count / total
        self._mean += apart * count / total
        self._count = total

    def shape(self, scores: Tensor) -> Tensor:
        """Count a batch of scores [B] and return it as (score - mean) / std."""
        self.update(scores)
        if self.mode == "none":
            return scores
        return ((scores.detach().cpu().double() - self._mean) / self.scale).to(scores)

    def shape_dense(self, rewards: Tensor, mask: Tensor) -> Tensor:
        """Count the responses' sums, and return dense rewards [B, T] whose sums are shaped as by `shape`.

        Every token is divided by the deviation of the sums, which keeps tokens' relative worth; the shift, which
        belongs to the response and not to a token, is put on its last token.
        """
        if self.mode == "none":
            return rewards * mask
        self.update((rewards * mask).detach().cpu().double().sum(-1))
        shift = torch.full(rewards.shape[:1], -self._mean / self.scale, dtype=rewards.dtype, device=rewards.device)
        return on_last_token(rewards * mask / self.scale, shift, mask)

    def state_dict(self) -> StatisticsState:
        """Return the state for a checkpoint: plain numbers that JSON stores without loss."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore from a `state_dict`."""
        self._count, self._mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])


def on_last_token(rewards: Tensor, amounts: Tensor, mask: Tensor) -> Tensor:
    """Return rewards [B, T] with the amounts [B] added at each response's last token; empty responses are skipped."""
    lengths = mask.sum(-1).long()
    last = (lengths - 1).clamp(min=0).unsqueeze(-1)
    return rewards.scatter_add(1, last, (amounts.to(rewards) * (lengths > 0)).unsqueeze(-1))


def clip_scores(scores: Tensor, cliprange_reward: float | None) -> Tensor:
    """Return scores [B] clipped to ± cliprange_reward (None: unchanged).

    For dense rewards, the clip's change of a response's sum belongs on its last token (`on_last_token`).
    """
    return scores if cliprange_reward is None else scores.clamp(-cliprange_reward, cliprange_reward)


def overlong_cost(lengths: Tensor, response_length: int, buffer: int, penalty: float) -> Tensor:
    """Return the penalties for responses of these lengths [B], to subtract from their scores; float [B].

    0                                                        up to response_length - buffer tokens
    penalty (length - (response_length - buffer)) / buffer   from there to response_length
    penalty                                                  beyond
    """
    return penalty * ((lengths.float() - (response_length - buffer)) / buffer).clamp(0, 1)


@dataclass(frozen=True)
class PolicyReading:
    """Policy, critic and reference on given responses, per token [B, T] and 0 where masked."""

    logprobs: Tensor
    ref_logprobs: Tensor
    kl_exact: Tensor
    entropy: Tensor
    values: Tensor | None
    """None without a critic."""


@dataclass(frozen=True)
class Experience:
    """One rollout batch for learning. Per token [B, T] and 0 where masked."""

    sequences: Sequences
    logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    values: Tensor | None
    returns: Tensor | None
    """With `values`, None without a critic."""
    kl_loss_coef: float = 0.0
    """β if the KL is a term of the loss; 0 if it is in the rewards."""

    def rows(self, index: Tensor) -> "Experience":
        """Return the rows `index` [K], without outer columns that are empty in all of them."""
        sequences = self.sequences.rows(index)
        width = sequences.response_width

        def cropped(values: Tensor) -> Tensor:
            return values[index, :width]

        return Experience(
            sequences,
            cropped(self.logprobs),
            cropped(self.ref_logprobs),
            cropped(self.advantages),
            None if self.values is None else cropped(self.values),
            None if self.returns is None else cropped(self.returns),
            self.kl_loss_coef,
        )

    def of_all(self, world: World) -> "Experience":
        """Return the rows of all processes, in the order of ranks, padded to the widest.

        A mini-batch then has the same rows however the rollout batch was spread. This is small beside the activations
        of one pass: some 40 bytes a token.
        """
        if world.size == 1:
            return self
        device = self.advantages.device
        parts = world.gather_objects([moved(self, torch.device("cpu"))])
        sequences = Sequences.cat([part.sequences for part in parts])

        def joined(name: str) -> Any:
            tensors = [getattr(part, name) for part in parts]
            if tensors[0] is None:
                return None
            return torch.cat([pad(tensor, (0, sequences.response_width - tensor.shape[1])) for tensor in tensors])

        columns = {name: joined(name) for name in ("logprobs", "ref_logprobs", "advantages", "values", "returns")}
        return moved(replace(self, sequences=sequences, **columns), device)


def moved(value: Moved, device: torch.device) -> Moved:
    """Return a dataclass with its tensors, and those of the dataclasses in it, on a device."""
    changed: dict[str, Any] = {}
    for item in fields(value):  # type: ignore[arg-type]
        part = getattr(value, item.name)
        if isinstance(part, Tensor):
            changed[item.name] = part.to(device)
        elif is_dataclass(part):
            changed[item.name] = moved(part, device)
    return replace(value, **changed)  # type: ignore[type-var]


@torch.no_grad()
def read_policy(
    network: ActorCritic,
    reference: PreTrainedModel,
    sequences: Sequences,
    temperature: float,
    chunk: ChunkRows,
    *,
    with_values: bool = True,
) -> PolicyReading:
    """Return all readings with one pass of each trunk, some rows of similar length at a time."""
    reads_values = with_values and network.value_head is not None
    ref_head = LanguageHead.of(reference)
    order = sequences.by_length()

    def read(rows: Sequences) -> list[Tensor]:
        states = response_states(network.policy, rows)
        compared = compare((network.head, states), (ref_head, response_states(reference, rows)), rows, temperature)
        readings = [compared.logprobs, compared.ref_logprobs, compared.kl_exact, compared.entropy]
        if reads_values:
            readings.append(network.values(states, rows) * rows.response_mask)
        missing = sequences.response_width - rows.response_width
        return [pad(reading, (0, missing)) for reading in readings]

    def attempt(rows: int) -> list[Tensor]:
        parts = [read(sequences.rows(index)) for index in order.split(rows)]
        return [torch.cat(column)[order.argsort()] for column in zip(*parts, strict=True)]

    with network.precision():
        readings = chunk.run(attempt, most=len(order))
    logprobs, ref_logprobs, kl_exact, entropy, *values = readings
    return PolicyReading(logprobs, ref_logprobs, kl_exact, entropy, values[0] if values else None)


def token_kl(config: PPOConfig, reading: PolicyReading, mask: Tensor) -> Tensor:
    """Return the sampled KL for β to weigh, in nats per token [B, T], 0 where masked."""
    return sampled_kl(reading.logprobs, reading.ref_logprobs, config.kl_estimator, config.kl_clamp) * mask


def build_experience(
    config: PPOConfig,
    rollouts: Rollouts,
    reading: PolicyReading,
    kl: Tensor,
    token_scores: Tensor,
    kl_coef: float,
    world: World = ONE_PROCESS,
) -> Experience:
    """Return the batch's advantages and returns.

    `kl` [B, T] is `token_kl`, which is weighed by β and subtracted here; `token_scores` [B, T] are the shaped scores.
    """
    mask = rollouts.sequences.response_mask
    rewards = token_scores * mask
    if not config.use_kl_loss:
        rewards = rewards - kl_coef * kl
    if config.whiten_rewards:
        rewards = masked_whiten(rewards, mask, shift_mean=False, world=world)
    returns = None
    if reading.values is not None:
        advantages, returns = gae(rewards, reading.values, mask, config.gamma, config.lam)
    else:
        compared = (rloo if config.advantage_estimator == "rloo" else grpo)(rewards.sum(-1), config.num_generations)
        advantages = broadcast(compared, mask)
    if config.whitens_advantages:
        advantages = masked_whiten(advantages, mask, world=world)
    return Experience(
        rollouts.sequences,
        reading.logprobs,
        reading.ref_logprobs,
        advantages,
        reading.values,
        returns,
        kl_coef if config.use_kl_loss else 0.0,
    )


def token_scores(config: PPOConfig, statistics: RewardStatistics, scored: Scored, rollouts: Rollouts) -> Tensor:
    """Return the shaped scores [B, T]: normalised, then clipped, then less the penalties.

    A response's score is on its last token, but dense rewards stay on theirs.
    """
    mask = rollouts.sequences.response_mask
    none = torch.zeros_like(mask)
    totals = torch.tensor(scored.totals, dtype=mask.dtype, device=mask.device)
    if scored.dense is None:
        rewards = on_last_token(none, clip_scores(statistics.shape(totals), config.cliprange_reward), mask)
    else:
        shaped = statistics.shape_dense(_padded(scored.dense, mask), mask)
        sums = shaped.sum(-1)
        rewards = on_last_token(shaped, clip_scores(sums, config.cliprange_reward) - sums, mask)
    costs = torch.zeros_like(totals)
    if config.missing_eos_penalty is not None:
        costs = costs + config.missing_eos_penalty * ~rollouts.ended
    if config.overlong_buffer is not None:
        lengths = rollouts.lengths
        costs = costs + overlong_cost(lengths, config.response_length, config.overlong_buffer, config.overlong_penalty)
    return on_last_token(rewards, -costs, mask)


def score_spread(config: PPOConfig, token_scores: Tensor, world: World = ONE_PROCESS) -> float:
    """Return the standard deviation of the batch's shaped scores, in units of what β weighs the KL against.

    As a term of the loss, β weighs it against advantages; where these are scaled to 1, so is the result.
    """
    spread = float(world.gather(token_scores.sum(-1)).cpu().double().std(correction=0))
    is_scaled = config.whitens_advantages or config.advantage_estimator == "grpo"
    return 1.0 if config.use_kl_loss and is_scaled and spread > 0 else spread


def _padded(dense: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """Return the responses' token rewards as [B, T]."""
    width = mask.shape[1]
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in dense], dtype=mask.dtype, device=mask.device)


# Metrics of one rollout batch, over all processes; means are over existing response tokens.


def rollout_metrics(
    config: PPOConfig,
    rollouts: Rollouts,
    reading: PolicyReading,
    kl: Tensor,
    scores: Tensor,
    kl_coef: float,
    world: World = ONE_PROCESS,
) -> dict[str, float]:
    """Return the declared metrics of the rollouts; `kl` [B, T] is `token_kl`, `scores` [B] are the raw ones."""
    mask = rollouts.sequences.response_mask
    tokens, lengths = world.sum(mask.sum()), world.gather(rollouts.lengths)
    scores, ended = world.gather(scores), world.gather(rollouts.ended)
    in_reward = 0.0 if config.use_kl_loss else kl_coef  # as a loss term the KL is not part of the reward
    kls = world.gather(kl.sum(-1))
    penalty = -in_reward * kls
    rewards = scores + penalty
    gap, noise = kl_gap(reading.logprobs, reading.ref_logprobs, reading.kl_exact, mask, world)
    mismatch = world.gather(((rollouts.sampler_logprobs - reading.logprobs).abs() * mask).amax(-1))
    values = {
        "objective/kl": kls.mean(),
        "objective/kl_exact": world.gather(reading.kl_exact.sum(-1)).mean(),
        "objective/kl_per_token": world.sum(kl.sum()) / tokens,
        "objective/kl_exact_per_token": world.sum(reading.kl_exact.sum()) / tokens,
        "objective/scores": scores.mean(),
        "objective/scores_std": scores.std(correction=0),
        "objective/non_score_reward": penalty.mean(),
        "objective/rlhf_reward": rewards.mean(),
        "objective/rlhf_reward_std": rewards.std(correction=0),
        "objective/entropy": -world.gather(reading.logprobs.sum(-1)).mean(),
        "policy/entropy_avg": world.sum(reading.entropy.sum()) / tokens,
        "sampler/mismatch": mismatch.max(),
        "sampler/kl_gap": gap,
        "sampler/kl_gap_noise": noise,
        "response/length_mean": lengths.mean(),
        "response/length_min": lengths.min(),
        "response/length_max": lengths.max(),
        "response/truncated_share": (~ended).float().mean(),
        "val/num_eos_tokens": ended.sum(),
    }
    metrics = dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))
    for name, sample in (("objective/scores", scores), ("objective/rlhf_reward", rewards)):
        metrics |= {f"{name}_{suffix}": value for suffix, value in distribution(sample).items()}
    return metrics | {
        "objective/kl_coef": kl_coef,
        "response/repetition": mean_of_all(repetition(rollouts.sequences), world),
    }


def part_metrics(
    parts: Mapping[str, Sequence[float]], prefix: str = "", world: World = ONE_PROCESS
) -> dict[str, float]:
    """Return each reward part's mean, if there are several."""
    if len(parts) < 2:
        return {}
    return {f"{prefix}reward/{name}": mean_of_all(values, world) for name, values in parts.items()}


def critic_metrics(experience: Experience, world: World = ONE_PROCESS) -> dict[str, float]:
    """Return the explained variance of the rollout's initial values; empty without a critic."""
    if experience.values is None or experience.returns is None:
        return {}
    mask, returns = experience.sequences.response_mask, experience.returns
    unexplained = masked_var(returns - experience.values, mask, world)
    return {"val/var_explained": float(1 - unexplained / masked_var(returns, mask, world).clamp(min=1e-8))}


def repetition(sequences: Sequences) -> list[float]:
    """Return the share of each response's tokens that occurred earlier in it."""
    shares = []
    for ids, mask in zip(sequences.response_ids.tolist(), sequences.response_mask.tolist(), strict=True):
        used = [token for token, on in zip(ids, mask, strict=True) if on]
        shares.append(1 - len(set(used)) / max(1, len(used)))
    return shares


def mean_of_all(values: Sequence[float], world: World) -> float:
    """Return the mean over all processes' numbers."""
    everywhere = world.gather_objects(values)
    return float(sum(everywhere) / len(everywhere))

"""The networks: a transformers causal LM with a critic, and the one forward pass that all training uses.

The trunk runs once per batch and gives hidden states; the language head is then applied to the response
tokens alone, a bounded number of logits at a time, so that those of a whole rollout are never held.
Shapes: B rows, T response columns, N response tokens of a batch (the mask's ones), H hidden, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ppo_core.models.casts import CastWeights
from ppo_core.models.memory import room_for_logits
from ppo_core.models.sequences import Sequences, TokenSets, position_ids

logger = logging.getLogger(__name__)

LOGITS_AT_ONCE = 2**25
"""Logits that may always be held at once, in addition to those of one backward pass (128 MiB in float32)."""

SavePolicy = Callable[..., Any]
"""Saves the policy to a folder for transformers or peft; for sharded weights it is given `state_dict`."""

TRUNK = "sharded_trunk"
"""Name under which a model with sharded weights runs its trunk (`ppo_core.models.fsdp`)."""

FILTERED = -1e9
"""Logit of a token left out by top-k or top-p: its exp is exactly 0, and no product with it is NaN."""


def exact_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) in nats, shape [...], of log-probabilities over the vocabulary, shape [..., V].

    A token of probability 0 under p adds nothing, even if it is also 0 under q (0 log 0 = 0). NaN in either gives NaN.
    """
    p = log_p.exp()
    terms = torch.where((p == 0) & ~log_q.isnan(), 0.0, p * (log_p - log_q))
    return terms.sum(-1).clamp(min=0)  # rounding can leave -1e-8


@dataclass(frozen=True)
class LanguageHead:
    """Hidden states [N, H] to logits [N, V], with the architecture's scale and cap."""

    module: nn.Linear
    vocabulary: int
    scale: float = 1.0
    softcap: float | None = None
    """Bound to which tanh squeezes the logits."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LanguageHead":
        """Return a causal LM's head, with the scale and soft cap from its config."""
        module = model.get_output_embeddings()
        config = model.config.get_text_config()
        multiplier, divisor = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
        scale = float(multiplier) / float(divisor)
        return cls(module, module.weight.shape[0], scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, hidden: Tensor, temperature: float, allowed: TokenSets | None) -> Tensor:
        """Return float32 logits at a temperature; `allowed` are each row's permitted tokens, None: all."""
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(self.module.weight.dtype)  # some trunks end in float32 whatever the weights are
        logits: Tensor = self.module(hidden).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if temperature != 1.0:
            logits = logits / temperature
        if allowed is not None:
            logits = logits.masked_fill(~allowed.members(), FILTERED)
        return logits


def response_states(model: nn.Module, sequences: Sequences) -> Tensor:
    """Return the last hidden state that predicts each response token, [B, T, H], without any logits."""
    trunk = model.base_model if isinstance(model, PreTrainedModel) else model
    output = getattr(model, TRUNK, trunk)(
        input_ids=sequences.ids,
        attention_mask=sequences.attention_mask,
        position_ids=position_ids(sequences.attention_mask),
        use_cache=False,
    )
    states: Tensor = output.last_hidden_state
    return states[:, sequences.prompt_width - 1 : -1]


class ResponseTokens:
    """The N response tokens of a batch, without the padding, and the way back to [B, T]."""

    def __init__(self, sequences: Sequences) -> None:
        mask = sequences.response_mask > 0
        self.shape = mask.shape
        self.index = mask.flatten().nonzero().squeeze(-1)
        self.ids = sequences.response_ids.reshape(-1)[self.index]
        self.allowed = sequences.allowed

    def packed(self, states: Tensor) -> Tensor:
        """Return [N, H] of states [B, T, H]."""
        flat = states.flatten(0, 1)
        return flat if len(self.index) == len(flat) else flat.index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """Return [B, T] of values [N], 0 where masked."""
        if len(self.index) == self.shape.numel():
            return values.view(self.shape)
        return values.new_zeros(self.shape.numel()).index_put((self.index,), values).view(self.shape)

    def chunks(self, vocabulary: int) -> Iterator[slice]:
        """Yield slices of the tokens whose logits may be held at once."""
        size = max(1, max(LOGITS_AT_ONCE, room_for_logits(self.index.device)) // vocabulary)
        for start in range(0, len(self.index), size):
            yield slice(start, start + size)

    def allowed_in(self, part: slice) -> TokenSets | None:
        """Return the permitted sets of the tokens in `part`; None: all tokens."""
        return None if self.allowed is None else self.allowed[part]


def token_readings(
    head: LanguageHead, states: Tensor, sequences: Sequences, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the response tokens' log-probabilities and, on request, entropies, in nats, each [B, T], differentiable.

    If the logits are too many to hold at once, they are recomputed in the backward pass.
    """
    tokens = ResponseTokens(sequences)
    packed = tokens.packed(states)
    parts = list(tokens.chunks(head.vocabulary))

    def read(part_states: Tensor, ids: Tensor, allowed: TokenSets | None) -> tuple[Tensor, Tensor]:
        logits = head(part_states, temperature, allowed)
        logprobs = -cross_entropy(logits, ids, reduction="none")
        return logprobs, entropy(logits) if with_entropy else logprobs.detach()

    recomputed = partial(checkpoint, read, use_reentrant=False)
    run: Callable[..., tuple[Tensor, Tensor]] = read if len(parts) == 1 else recomputed
    readings = [run(packed[part], tokens.ids[part], tokens.allowed_in(part)) for part in parts]
    logprobs, entropies = (torch.cat(column) for column in zip(*readings, strict=True))
    return tokens.spread(logprobs), tokens.spread(entropies) if with_entropy else None


@dataclass(frozen=True)
class PolicyReading:
    """Policy, critic and reference on the same responses, per token [B, T], 0 where masked; nats except `values`."""

    logprobs: Tensor
    ref_logprobs: Tensor
    kl_exact: Tensor
    entropy: Tensor
    values: Tensor | None = None
    """None if the critic was not read, or there is none."""


@torch.no_grad()
def compare(
    policy: tuple[LanguageHead, Tensor],
    reference: tuple[LanguageHead, Tensor],
    sequences: Sequences,
    temperature: float,
) -> PolicyReading:
    """Return both models' readings of the same responses, from each one's head and states [B, T, H].

    Top-k and top-p belong to the policy. The reference's distribution stays whole: filtered and renormalized, it would
    hide all probability that the policy has moved away from the tokens left out.
    """
    tokens = ResponseTokens(sequences)
    columns: list[tuple[Tensor, ...]] = []
    (head, states), (ref_head, ref_states) = ((head, tokens.packed(states)) for head, states in (policy, reference))
    for part in tokens.chunks(head.vocabulary):
        ids = tokens.ids[part].unsqueeze(-1)
        log_p = torch.log_softmax(head(states[part], temperature, tokens.allowed_in(part)), -1)
        log_q = torch.log_softmax(ref_head(ref_states[part], temperature, None), -1)
        of_tokens = [logprobs.gather(-1, ids).squeeze(-1) for logprobs in (log_p, log_q)]
        columns.append((*of_tokens, exact_kl(log_p, log_q), -(log_p.exp() * log_p).sum(-1)))
    return PolicyReading(*(tokens.spread(torch.cat(column)) for column in zip(*columns, strict=True)))


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats, [N], of the distributions with logits [N, V]."""
    return torch.logsumexp(logits, -1) - (torch.softmax(logits, -1) * logits).sum(-1)


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


class ActorCritic(nn.Module):
    """A policy and its critic; `ppo_core.models.networks` builds one.

    The critic is a linear head on the policy's last hidden state (`critic` None), or on the trunk of a network of its
    own; critic-free baselines have no head at all.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        critic: nn.Module | None,
        value_head: nn.Linear | None,
        *,
        save_policy: SavePolicy,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic
        self.value_head = value_head
        self.save_policy = save_policy
        self.bf16 = bf16
        self.is_sharded = False
        self.value_mean, self.value_std = 0.0, 1.0
        self._recomputes = False
        self.eval()  # dropout would make the ratio differ from 1 before any update

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Enter the context of every forward pass: bfloat16 on request, with the current weights."""
        self._casts.refresh()
        with torch.autocast(self.policy.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            yield

    @cached_property
    def _casts(self) -> CastWeights:
        """What passes in this context read; sharded weights are not whole, and have no copies."""
        return CastWeights(self._networks, casts=self.bf16 and not self.is_sharded)

    @property
    def _networks(self) -> list[nn.Module]:
        """The policy, and a critic of its own."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def _read(self) -> list[nn.Module]:
        """Return policy and critic as a pass in the current precision reads them."""
        return list(self._casts.models) if torch.is_autocast_enabled(self.policy.device.type) else self._networks

    @property
    def passes(self) -> PreTrainedModel:
        """The policy as a pass in the current precision reads it."""
        return cast(PreTrainedModel, self._read()[0])

    @property
    def head(self) -> LanguageHead:
        """Its language head."""
        return LanguageHead.of(self.passes)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to the weights'."""
        loss.backward()
        self._casts.add_gradients()

    def recompute(self) -> bool:
        """Turn gradient checkpointing on for good; return False if a network has none."""
        copies = self.__dict__.get("_casts")  # made later, they have it from the networks
        networks = [cast(PreTrainedModel, model) for model in (*self._networks, *(copies.models if copies else ()))]
        if not all(map(_layers, networks)) or not all(model.supports_gradient_checkpointing for model in networks):
            return False
        for model in networks:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._recomputes = True
        logger.info("gradient checkpointing is on")
        return True

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Enter the context of passes with gradients; in sampling a checkpointed layer would drop its KV cache."""
        layers = _layers(self._casts.models) if self._recomputes else []
        for layer in layers:
            layer.training = True  # the layer's own flag: dropout inside it stays off
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False

    def values(self, states: Tensor | None, sequences: Sequences) -> Tensor:
        """Return the critic's values [B, T], in reward; `states` are the policy's, unused by a separate critic."""
        return self.standard_values(states, sequences) * self.value_std + self.value_mean

    def standard_values(self, states: Tensor | None, sequences: Sequences) -> Tensor:
        """Return the critic's own output [B, T]: values less `value_mean`, over `value_std`."""
        if self.critic is not None:
            states = response_states(self._read()[1], sequences)
        assert self.value_head is not None and states is not None
        with torch.autocast(states.device.type, enabled=False):
            output: Tensor = self.value_head(states.float()).squeeze(-1)
        return output

    @torch.no_grad()
    def set_value_units(self, mean: float, std: float, *, keeps_values: bool = True) -> None:
        """Set `value_mean` and `value_std`, and rescale the head so that the values stay.

        Without `keeps_values` the head stays, and the values move. See `ppo_core.algorithm.returns`.
        """
        assert self.value_head is not None
        if keeps_values:
            ratio, shift = self.value_std / std, (self.value_mean - mean) / std
            self.value_head.weight.mul_(ratio)
            self.value_head.bias.copy_(self.value_head.bias.double() * ratio + shift)
        self.value_mean, self.value_std = mean, std

    def policy_parameters(self) -> list[nn.Parameter]:
        """Return the weights trained at `learning_rate`."""
        return [p for p in self.policy.parameters() if p.requires_grad]

    def value_parameters(self) -> list[nn.Parameter]:
        """Return the weights trained at `value_learning_rate`."""
        modules = [module for module in (self.critic, self.value_head) if module is not None]
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    def trained(self) -> dict[str, nn.Parameter]:
        """Return all trainable weights by name, as saved in a checkpoint."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

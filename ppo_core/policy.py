"""The networks: a transformers causal LM with a critic, and the one forward pass that all training uses.

A batch is [prompt | response], prompts padded on the left and responses on the right, so that every
response begins in the same column. Attention and position ids come from the mask, never from token
ids, since a pad token may equal EOS and may even be sampled.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sequences:
    """Prompts with responses. B rows, P prompt columns, T response columns."""

    ids: Tensor
    """[B, P + T]; padding anywhere outside the mask."""
    attention_mask: Tensor
    """[B, P + T]; 1 on prompt and response tokens."""
    prompt_width: int
    """P."""

    @property
    def response_ids(self) -> Tensor:
        """[B, T]"""
        return self.ids[:, self.prompt_width :]

    @property
    def response_mask(self) -> Tensor:
        """[B, T], float; 1 on response tokens, EOS included."""
        return self.attention_mask[:, self.prompt_width :].float()

    def rows(self, index: slice | Tensor) -> "Sequences":
        """Return some rows, cropped to the columns they use."""
        ids, mask = self.ids[index], self.attention_mask[index]
        used = mask.any(0).nonzero().flatten()
        first, last = int(used[0]), max(int(used[-1]), self.prompt_width)
        return Sequences(ids[:, first : last + 1], mask[:, first : last + 1], self.prompt_width - first)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return each token's index among the unmasked ones of its row (0 on padding); shape of the mask."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def response_outputs(model: PreTrainedModel, sequences: Sequences, temperature: float) -> tuple[Tensor, Tensor]:
    """Return what predicts each response token: (log-probabilities [B, T, V], hidden states [B, T, H])."""
    width = sequences.ids.shape[1] - sequences.prompt_width
    output = model(
        input_ids=sequences.ids,
        attention_mask=sequences.attention_mask,
        position_ids=position_ids(sequences.attention_mask),
        use_cache=False,
        output_hidden_states=True,
        logits_to_keep=width + 1,
    )
    logprobs = torch.log_softmax(output.logits[:, :-1].float() / temperature, -1)
    return logprobs, output.hidden_states[-1][:, -width - 1 : -1]


def token_logprobs(logprobs: Tensor, response_ids: Tensor) -> Tensor:
    """Return the log-probability of each response token, [B, T], of log-probabilities [B, T, V]."""
    return logprobs.gather(-1, response_ids.unsqueeze(-1)).squeeze(-1)


def entropy(logprobs: Tensor) -> Tensor:
    """Return the entropy in nats per token, [B, T], of log-probabilities [B, T, V]."""
    p = logprobs.exp()
    return -torch.where(p > 0, p * logprobs, torch.zeros_like(p)).sum(-1)


class ActorCritic(nn.Module):
    """A trainable copy of a causal LM, and its critic.

    `shared`: the critic is a linear head on the policy's last hidden state. `separate`: it has a
    trunk of its own, begun as a copy of the policy's. The head begins at 0, so the first values are 0.
    """

    def __init__(self, pretrained: PreTrainedModel, value_model: str) -> None:
        super().__init__()
        self.policy = copy.deepcopy(pretrained).requires_grad_(True)
        self.critic_trunk = copy.deepcopy(self.policy) if value_model == "separate" else None
        hidden = self.policy.get_output_embeddings().weight.shape[1]
        self.value_head = nn.Linear(hidden, 1, device=self.policy.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.eval()  # dropout would make the ratio differ from 1 before any update

    def forward(self, sequences: Sequences, temperature: float) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities [B, T, V], values [B, T])."""
        logprobs, hidden = response_outputs(self.policy, sequences, temperature)
        if self.critic_trunk is not None:
            hidden = response_outputs(self.critic_trunk, sequences, temperature)[1]
        return logprobs, self.value_head(hidden.float()).squeeze(-1)

    def policy_parameters(self) -> list[nn.Parameter]:
        """Return what learns at `learning_rate`."""
        return list(self.policy.parameters())

    def value_parameters(self) -> list[nn.Parameter]:
        """Return what learns at `value_learning_rate`."""
        trunk = [] if self.critic_trunk is None else list(self.critic_trunk.parameters())
        return trunk + list(self.value_head.parameters())

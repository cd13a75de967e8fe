"""Prompts with responses, as tensors.

A batch is [prompt | response], prompts padded on the left and responses on the right, so that every
response begins in the same column. Attention and position ids come from the mask, never from token
ids, since a pad token may equal EOS and may even be sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.token_sets import TokenSets, ragged_range


@dataclass(frozen=True)
class Sequences:
    """Prompts with responses. B rows, P prompt columns, T response columns."""

    ids: Tensor
    """[B, P + T]; padding anywhere outside the mask."""
    attention_mask: Tensor
    """[B, P + T]; 1 on prompt and response tokens."""
    prompt_width: int
    """P."""
    allowed: TokenSets | None = None
    """Which tokens top-k and top-p left to choose from, one set a response token, row by row; None: all."""

    @property
    def response_ids(self) -> Tensor:
        """[B, T]"""
        return self.ids[:, self.prompt_width :]

    @property
    def response_mask(self) -> Tensor:
        """[B, T], float; 1 on response tokens, EOS included."""
        return self.attention_mask[:, self.prompt_width :].float()

    @property
    def response_width(self) -> int:
        """T."""
        return self.ids.shape[1] - self.prompt_width

    def rows(self, index: slice | Tensor) -> "Sequences":
        """Return some rows, cropped to the columns they use."""
        ids, mask = self.ids[index], self.attention_mask[index]
        used = mask.any(0).nonzero().flatten()
        first, last = int(used[0]), max(int(used[-1]), self.prompt_width)
        allowed = None if self.allowed is None else self.allowed[self._tokens(index)]
        return Sequences(ids[:, first : last + 1], mask[:, first : last + 1], self.prompt_width - first, allowed)

    def _tokens(self, index: slice | Tensor) -> Tensor:
        """Return the numbers of some rows' response tokens, counted over the response tokens of all rows."""
        lengths = self.attention_mask[:, self.prompt_width :].sum(-1)
        starts = lengths.cumsum(0) - lengths
        return ragged_range(starts[index], lengths[index])

    def by_length(self) -> Tensor:
        """Return the rows' order from the shortest to the longest, [B]: chunks of it hold little padding."""
        return self.attention_mask.sum(-1).argsort(stable=True)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return each token's index among the unmasked ones of its row (0 on padding); shape of the mask."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def padded_left(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> Sequences:
    """Return token lists as sequences without a response."""
    width = max(len(ids) for ids in rows)
    ids = torch.full((len(rows), width), fill, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return Sequences(ids.to(device), mask.to(device), width)

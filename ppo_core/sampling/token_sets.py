"""Sets of token ids, in as little memory as their sizes allow.

Training needs exactly the tokens that top-k and top-p left at each position of the sampler. They cannot be computed
again: the training forward rounds differently from a decode step, so a token at the edge of the set would come and go,
and the set must stay that of the policy that sampled while the epochs change the policy. A position after the end of a
response has no set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSets:
    """N sets of tokens of a vocabulary of V."""

    vocabulary: int
    """V."""
    counts: Tensor
    """[N], int32: the sets' sizes."""
    ids: Tensor
    """[sum of counts], int32: the sets' ids, one set after the other."""

    @classmethod
    def of(cls, members: Tensor) -> "TokenSets":
        """Return the sets of booleans [N, V]."""
        return cls(members.shape[-1], members.sum(-1).int(), members.nonzero()[:, 1].int())

    @classmethod
    def cat(cls, parts: Sequence["TokenSets"]) -> "TokenSets":
        """Concatenate the sets of the parts, at least one."""
        counts, ids = (torch.cat([getattr(part, name) for part in parts]) for name in ("counts", "ids"))
        return cls(parts[0].vocabulary, counts, ids)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: slice | Tensor) -> "TokenSets":
        """Return some sets, in the order of `index` (numbers, not booleans)."""
        starts, counts = self.counts.cumsum(0) - self.counts, self.counts[index]
        return TokenSets(self.vocabulary, counts, self.ids[ragged_range(starts[index], counts)])

    def members(self) -> Tensor:
        """Return the booleans [N, V]."""
        members = torch.zeros(len(self), self.vocabulary, dtype=torch.bool, device=self.counts.device)
        rows = torch.arange(len(self), device=self.counts.device).repeat_interleave(self.counts)
        members[rows, self.ids.long()] = True
        return members


def ragged_range(starts: Tensor, counts: Tensor) -> Tensor:
    """Return start, start + 1, ... for each [N] start and count, concatenated: [sum of counts]."""
    offsets = counts.cumsum(0) - counts
    return (starts - offsets).repeat_interleave(counts) + torch.arange(int(counts.sum()), device=counts.device)

"""Sets of token ids, in as little memory as their sizes allow.

Training needs exactly the tokens that top-k and top-p left at each position of the sampler. They cannot be computed
again: the training forward rounds differently from a decode step, so a token at the edge of the set would come and go,
and the set must stay that of the policy that sampled while the epochs change the policy. So sets are kept as ids (4
bytes each), or as bits (V / 8 bytes per set) if those take fewer bytes. A position after the end of a response has no
set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class TokenSets:
    """N sets of tokens of a vocabulary of V."""

    vocabulary: int
    """V."""
    counts: Tensor
    """[N], int32: ids of each set, 0 where it is held as bits."""
    ids: Tensor
    """[sum of counts], int32: the sets' ids, one set after the other."""
    is_bits: Tensor
    """[N], bool."""
    bits: Tensor
    """[number of sets held as bits, ceil(V / 8)], uint8."""

    @classmethod
    def of(cls, members: Tensor) -> "TokenSets":
        """Return the sets of booleans [N, V]."""
        vocabulary = members.shape[-1]
        sizes = members.sum(-1)
        is_bits = 4 * sizes >= (vocabulary + 7) // 8
        counts = sizes.masked_fill(is_bits, 0).int()
        ids = members[~is_bits].nonzero()[:, 1].int()
        return cls(vocabulary, counts, ids, is_bits, pack_bits(members[is_bits]))

    @classmethod
    def cat(cls, parts: Sequence["TokenSets"]) -> "TokenSets":
        """Concatenate the sets of the parts, at least one."""
        counts, ids, is_bits, bits = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("counts", "ids", "is_bits", "bits")
        )
        return cls(parts[0].vocabulary, counts, ids, is_bits, bits)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: slice | Tensor) -> "TokenSets":
        """Return some sets, in the order of `index` (numbers, not booleans)."""
        counts, is_bits = self.counts[index], self.is_bits[index]
        starts = self.counts.cumsum(0) - self.counts
        rows = (self.is_bits.cumsum(0) - 1)[index][is_bits]
        return TokenSets(
            self.vocabulary, counts, self.ids[ragged_range(starts[index], counts)], is_bits, self.bits[rows]
        )

    def members(self) -> Tensor:
        """Return the booleans [N, V]."""
        members = torch.zeros(len(self), self.vocabulary, dtype=torch.bool, device=self.counts.device)
        rows = torch.arange(len(self), device=self.counts.device).repeat_interleave(self.counts)
        members[rows, self.ids.long()] = True
        members[self.is_bits] = unpack_bits(self.bits, self.vocabulary)
        return members


def ragged_range(starts: Tensor, counts: Tensor) -> Tensor:
    """Return start, start + 1, ... for each [N] start and count, concatenated: [sum of counts]."""
    offsets = counts.cumsum(0) - counts
    return (starts - offsets).repeat_interleave(counts) + torch.arange(int(counts.sum()), device=counts.device)


def pack_bits(flags: Tensor) -> Tensor:
    """Return booleans [..., V] as bytes [..., ceil(V / 8)]."""
    padded = pad(flags, (0, -flags.shape[-1] % 8))
    weights = 2 ** torch.arange(8, device=flags.device, dtype=torch.uint8)
    packed: Tensor = (padded.unflatten(-1, (-1, 8)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """Return the booleans [..., size] of `pack_bits`."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :size].bool()

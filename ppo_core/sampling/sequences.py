"""Prompts with responses, as tensors.

A batch is [prompt | response], prompts padded on the left and responses on the right, so that every
response begins in the same column. Attention and position ids come from the mask, never from token
ids, since a pad token may equal EOS and may even be sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

# Sets of token ids, in as little memory as their sizes allow.
#
# Training needs exactly the tokens that top-k and top-p left at each position of the sampler. They cannot be computed
# again: the training forward rounds differently than a step of decoding, so a token at the edge of the set would come
# and go, and the set must stay that of the policy that sampled while the epochs change the policy. So they are kept:
# as ids (4 bytes each), or as bits (V / 8 bytes a set) where those are fewer bytes. Nothing is reserved ahead, and a
# position after the end of a response has no set.


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
    """Tokens left by top-k and top-p, one set a response token, row by row; None: all."""

    @classmethod
    def cat(cls, parts: Sequence["Sequences"]) -> "Sequences":
        """Concatenate the rows of the parts, at least one, padded to the widest prompt and response."""
        prompt, response = (max(getattr(part, name) for part in parts) for name in ("prompt_width", "response_width"))

        def joined(name: str) -> Tensor:
            widths = [(prompt - part.prompt_width, response - part.response_width) for part in parts]
            return torch.cat([pad(getattr(part, name), width) for part, width in zip(parts, widths, strict=True)])

        allowed = [part.allowed for part in parts if part.allowed is not None]
        sets = TokenSets.cat(allowed) if allowed else None
        return cls(joined("ids"), joined("attention_mask"), prompt, sets)

    @property
    def response_ids(self) -> Tensor:
        """[B, T]; padding where `response_mask` is 0."""
        return self.ids[:, self.prompt_width :]

    @property
    def response_mask(self) -> Tensor:
        """[B, T], float; 1 on response tokens, EOS included."""
        return self.attention_mask[:, self.prompt_width :].float()

    @property
    def response_width(self) -> int:
        """T: the columns after the prompts."""
        return self.ids.shape[1] - self.prompt_width

    def response_tokens(self) -> list[list[int]]:
        """Return each response's token ids, without padding."""
        rows = zip(self.response_ids.tolist(), self.response_mask.tolist(), strict=True)
        return [[token for token, is_token in zip(ids, mask, strict=True) if is_token] for ids, mask in rows]

    def rows(self, index: slice | Tensor) -> "Sequences":
        """Return the rows `index` (a slice, or [K]), without outer columns that are empty in all of them."""
        ids, mask = self.ids[index], self.attention_mask[index]
        used = mask.any(0).nonzero().flatten()
        first, last = int(used[0]), max(int(used[-1]), self.prompt_width)
        allowed = None if self.allowed is None else self.allowed[self._tokens(index)]
        return Sequences(ids[:, first : last + 1], mask[:, first : last + 1], self.prompt_width - first, allowed)

    def _tokens(self, index: slice | Tensor) -> Tensor:
        """Return the indices of some rows' response tokens among those of all rows."""
        lengths = self.attention_mask[:, self.prompt_width :].sum(-1)
        starts = lengths.cumsum(0) - lengths
        return ragged_range(starts[index], lengths[index])

    def by_length(self) -> Tensor:
        """Return the rows' order from shortest to longest, [B]: chunks in this order hold little padding."""
        return self.attention_mask.sum(-1).argsort(stable=True)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return each token's index among the unmasked ones of its row (0 on padding); shape of the mask."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def padded_left(rows: Sequence[Sequence[int]], device: torch.device) -> Sequences:
    """Return token lists as sequences without a response.

    The padding is 0: only the mask is read, and the tokenizer's own pad id may be unknown to the model.
    """
    width = max(len(ids) for ids in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return Sequences(ids.to(device), mask.to(device), width)

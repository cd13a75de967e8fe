"""Prompts with responses: as tensors, with the tokens that the sampler's filters left, and as texts.

A batch is [prompt | response], prompts padded on the left and responses on the right, so that every
response begins in the same column. Attention and position ids come from the mask, never from token
ids, since a pad token may equal EOS and may even be sampled.

Training needs exactly the tokens that top-k and top-p left at each position of the sampler. They cannot be computed
again: the training forward rounds differently from a decode step, so a token at the edge of the set would come and go,
and the set must stay that of the policy that sampled while the epochs change the policy. A position after the end of a
response has no set.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase


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
    """Tokens left by top-k and top-p, one set per response token, row by row; None: all."""

    @classmethod
    def cat(cls, parts: Sequence["Sequences"]) -> "Sequences":
        """Concatenate the rows of the parts, at least one, padded to the widest prompt and response."""
        prompt, response = (max(getattr(part, name) for part in parts) for name in ("prompt_width", "response_width"))
        widths = [(prompt - part.prompt_width, response - part.response_width) for part in parts]
        ids, mask = (
            torch.cat([pad(getattr(part, name), width) for part, width in zip(parts, widths, strict=True)])
            for name in ("ids", "attention_mask")
        )
        allowed = [part.allowed for part in parts if part.allowed is not None]
        return cls(ids, mask, prompt, TokenSets.cat(allowed) if allowed else None)

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

    def prompt_tokens(self) -> list[list[int]]:
        """Return each prompt's token ids, without padding."""
        return self._tokens_of(slice(0, self.prompt_width))

    def response_tokens(self) -> list[list[int]]:
        """Return each response's token ids, without padding."""
        return self._tokens_of(slice(self.prompt_width, None))

    def _tokens_of(self, columns: slice) -> list[list[int]]:
        rows = zip(self.ids[:, columns].tolist(), self.attention_mask[:, columns].tolist(), strict=True)
        return [list(itertools.compress(ids, mask)) for ids, mask in rows]

    def rows(self, index: slice | Tensor) -> "Sequences":
        """Return the rows `index` (a slice, or [K]), without outer columns that are empty in all of them."""
        ids, mask = self.ids[index], self.attention_mask[index]
        used = mask.any(0).nonzero().flatten()
        first, last = int(used[0]), max(int(used[-1]), self.prompt_width)
        allowed = self.allowed
        if allowed is not None:
            lengths = self.attention_mask[:, self.prompt_width :].sum(-1)
            starts = lengths.cumsum(0) - lengths
            allowed = allowed[ragged_range(starts[index], lengths[index])]
        return Sequences(ids[:, first : last + 1], mask[:, first : last + 1], self.prompt_width - first, allowed)

    def by_length(self) -> Tensor:
        """Return the rows' order from shortest to longest, [B]: chunks in this order hold little padding."""
        return self.attention_mask.sum(-1).argsort(stable=True)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return each token's index among the unmasked ones of its row (0 on padding); shape of the mask."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def padded_left(rows: Sequence[Sequence[int]], device: torch.device) -> Sequences:
    """Return token lists as sequences without a response; their padding is 0, since only the mask is read."""
    tokens = [torch.tensor(row) for row in rows]
    ids, mask = (
        pad_sequence(parts, batch_first=True, padding_side="left").to(device)
        for parts in (tokens, [torch.ones_like(row) for row in tokens])
    )
    return Sequences(ids, mask, ids.shape[1])


def response_texts(tokenizer: PreTrainedTokenizerBase, sequences: Sequences) -> tuple[str, ...]:
    """Return the responses' texts, decoded with their prompts: decoded alone, one can lose its leading space.

    What the response changes of its prompt's text, as a character that the prompt leaves unfinished, belongs to it.
    """
    prompts, responses = sequences.prompt_tokens(), sequences.response_tokens()
    wholes = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    texts = (tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in (prompts, wholes))
    pairs = [(len(commonprefix(pair)), pair[1]) for pair in zip(*texts, strict=True)]  # noqa: RUF071 - of characters
    return tuple(whole[same:] for same, whole in pairs)


class TokenTexts:
    """Text of each token by itself, for rewards and pages that look at single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._text = functools.cache(lambda token: str(tokenizer.decode([token])))

    def __call__(self, sequences: Sequences) -> list[list[str]]:
        return [list(map(self._text, tokens)) for tokens in sequences.response_tokens()]

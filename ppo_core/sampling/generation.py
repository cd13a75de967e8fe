"""Sample responses: the interface of a generator, and the one that decodes with transformers.

The sampler's own log-probabilities are kept, so that the training forward can be checked against them. Rows whose
response has ended leave the batch once half of it has, if the model's cache can drop rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.data.prompts import encode
from ppo_core.data.task import Prompt
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import ActorCritic
from ppo_core.models.sequences import Sequences, TokenSets, padded_left, position_ids, response_texts
from ppo_core.randomness import Key, uniforms
from ppo_core.sampling.cuda_graphs import CapturedDecoding, Decoding
from ppo_core.sampling.decoding import IS_FIXED, CachedDecoding
from ppo_core.sampling.next_token import SamplingSettings, Stops, next_token


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    id: int
    """Selects its random numbers of the key; at least 0, and unique in a batch."""
    prompt: Prompt


@dataclass(frozen=True)
class Rollouts:
    """B sampled responses of at most T tokens."""

    sequences: Sequences
    sampler_logprobs: Tensor
    """[B, T]: log-probability of each token as sampled, 0 where masked."""
    ended: Tensor
    """[B], bool: True if ended by a stop token or text."""
    prompts: tuple[Prompt, ...]
    responses: tuple[str, ...]
    """Texts without special tokens."""

    @property
    def lengths(self) -> Tensor:
        """[B]: response tokens, including the stop token or text."""
        return self.sequences.response_mask.sum(-1)


class Generator(Protocol):
    """Samples responses from the current policy, for the trainer and its evaluations."""

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        """Return one response per request, in their order, or raise OutOfMemory.

        A response's randomness depends on the key, its request's id and the position alone, not on other requests,
        their order, or the number of rows in a pass.
        """
        ...

    def update_weights(self) -> None:
        """Take over the policy's changed weights."""
        ...


MakeGenerator = Callable[[ActorCritic, PreTrainedTokenizerBase], Generator]
"""Returns a generator that samples from the network's policy."""


class TransformersGenerator:
    """Decodes with the trained tensors, in this process; on a GPU with captured graphs if the model allows.

    `fixed` decodes in buffers of fixed shape; None: on a GPU, if `ppo_core.sampling.cache_check` allows it.
    """

    def __init__(
        self,
        network: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        chunk: ChunkRows,
        *,
        fixed: bool | None = None,
    ) -> None:
        self._network, self._tokenizer, self._chunk = network, tokenizer, chunk
        # Captured graphs need whole weights that stay in place.
        policy, on_gpu = network.policy, network.policy.device.type == "cuda" and not network.is_sharded
        with network.precision():
            self._model = network.passes
        fixed = on_gpu and getattr(policy, IS_FIXED, False) if fixed is None else fixed
        self._captured = CapturedDecoding(self._model, captures=on_gpu) if fixed else None

    def give_back(self) -> bool:
        """Free what is kept between two batches; return False if there is nothing."""
        return self._captured is not None and self._captured.give_back()

    def update_weights(self) -> None:
        """Note what learning needed beside the buffers."""
        if self._captured is not None:
            self._captured.learned()

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        """Return one response per request, some rows at a time, fewer when memory runs out."""
        numbers = torch.from_numpy(uniforms(key, [request.id for request in requests], sampling.response_length))
        prompts = [request.prompt for request in requests]

        def attempt(rows: int) -> Rollouts:
            try:
                begin = None if self._captured is None else self._captured.begin
                return generate(self._model, self._tokenizer, prompts, numbers, sampling, chunk_rows=rows, begin=begin)
            except BaseException:
                if self._captured is not None:
                    self._captured.release()  # an interrupted pass may leave the buffers in any state
                raise

        with self._network.precision():
            rollouts = self._chunk.run(attempt, most=len(requests))
        if self._captured is not None:
            self._captured.end()
        return rollouts


BeginDecoding = Callable[[int, int], Decoding]
"""Prepares for a batch: called with the maximum number of rows and of columns."""


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    chunk_rows: int,
    begin: BeginDecoding | None = None,
) -> Rollouts:
    """Return one response per prompt; `uniforms` [B, T] in [0, 1) decides every token, T is `response_length`.

    Rows are sampled `chunk_rows` at a time, prompts of similar length together, the longest first; that bounds memory
    and changes no sample. `begin` prepares the steps of a chunk; None: `CachedDecoding`.
    """
    if uniforms.shape != (wanted := (len(prompts), settings.response_length)):
        raise ValueError(f"generate: uniforms has shape {list(uniforms.shape)}, not {list(wanted)}")
    encoded = padded_left([encode(prompt, tokenizer) for prompt in prompts], model.device)
    order = torch.arange(len(prompts), device=model.device)
    if chunk_rows < len(prompts):
        order = encoded.by_length().flip(0)
    numbers, stops = uniforms.to(model.device), Stops(settings, tokenizer, model.device)
    begin = begin or (lambda rows, tokens: CachedDecoding(model, tokens))
    parts = [_Chunk(encoded.rows(rows), numbers[rows], settings, stops) for rows in order.split(chunk_rows)]
    for part in parts:
        part.run(begin)
    back = order.argsort()
    mask = torch.cat([part.mask for part in parts])[back]
    length = int(mask.sum(-1).max())
    mask = mask[:, :length]
    ids, logprobs = (torch.cat([getattr(part, name) for part in parts])[back, :length] for name in ("ids", "logprobs"))
    sequences = Sequences(
        torch.cat([encoded.ids, ids], 1),
        torch.cat([encoded.attention_mask, mask], 1),
        encoded.prompt_width,
        _row_by_row(parts, order.split(chunk_rows)) if settings.filters else None,
    )
    ended = torch.cat([part.ended for part in parts])[back]
    texts = response_texts(tokenizer, sequences)
    return Rollouts(sequences, logprobs, ended, tuple(prompts), texts)


class _Chunk:
    """The responses of R rows, of at most T tokens; the only wait for a GPU is a look at which rows have ended."""

    def __init__(self, prompt: Sequences, uniforms: Tensor, settings: SamplingSettings, stops: Stops) -> None:
        rows, steps = uniforms.shape
        device = prompt.ids.device
        self.prompt, self.uniforms, self.settings, self.stops = prompt, uniforms, settings, stops
        self.ids = torch.zeros((rows, steps), dtype=torch.long, device=device)
        self.mask = torch.zeros((rows, steps), dtype=torch.long, device=device)
        self.logprobs = torch.zeros((rows, steps), device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.allowed: list[TokenSets] = []
        """Allowed tokens of some steps, one after the other, for the rows in `sampled_rows`."""
        self.sampled_rows: list[Tensor] = []
        self._filtered: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of each step since the last look: tokens left [K, V], rows [K], and which of them had ended [K]."""

    def run(self, begin: BeginDecoding) -> None:
        """Sample until all rows have ended."""
        rows, width, steps = len(self.ids), self.prompt.ids.shape[1], self.uniforms.shape[1]
        live = torch.arange(rows, device=self.ids.device)  # rows still in the batch
        decoding = begin(rows, width + steps)
        feed, positions = self.prompt.ids, position_ids(self.prompt.attention_mask)
        mask = torch.cat([self.prompt.attention_mask, torch.ones_like(self.mask)], 1)
        logits = _prompt_logits(decoding, self.prompt, positions)
        for t in range(steps):
            token = self._write(t, live, logits)
            feed, positions = token.unsqueeze(1), positions[:, -1:] + 1
            if (t + 1) % decoding.looks_every == 0:
                self._compact()
                ended = self.ended[live]
                going = len(live) - int(ended.sum())
                if going == 0:
                    break
                kept = decoding.leaving(ended, going)
                if kept is not None:
                    decoding.keep(kept)
                    live, feed, positions, mask = live[kept], feed[kept], positions[kept], mask[kept]
            if t + 1 < steps:
                logits = decoding.logits(feed, mask[:, : width + t + 1], positions)
        self._compact()

    def _compact(self) -> None:
        """Note which tokens the filters left in the steps since the last look: counting them waits for a GPU."""
        if self._filtered:
            kept, rows, ended = (torch.cat(column) for column in zip(*self._filtered, strict=True))
            going = (~ended).nonzero().squeeze(-1)
            self._filtered.clear()
            self.allowed.append(TokenSets.of(kept[going]))
            self.sampled_rows.append(rows[going])

    def _write(self, t: int, live: Tensor, logits: Tensor) -> Tensor:
        """Sample position `t` of the live rows; samples of ended rows are dropped."""
        sampled = next_token(logits, self.uniforms[live, t], self.settings)
        ended = self.ended[live]
        self.ids[live, t] = sampled.ids.masked_fill(ended, 0)
        self.mask[live, t] = (~ended).long()
        self.logprobs[live, t] = sampled.logprobs.masked_fill(ended, 0.0)
        if sampled.kept is not None:
            self._filtered.append((sampled.kept, live, ended))
        self.ended[live] = ended | self.stops(self.ids[live, : t + 1])
        return sampled.ids


def _prompt_logits(decoding: Decoding, prompt: Sequences, positions: Tensor) -> Tensor:
    """Return the first token's logits [R, V]; repeated prompts are run only once."""
    if decoding.drops_rows:
        rows = (prompt.ids + 1) * prompt.attention_mask  # padding is 0 whatever fills it
        distinct, copies = rows.unique(dim=0, return_inverse=True)
        if len(distinct) < len(rows):
            numbers = torch.arange(len(rows), device=rows.device)
            first = numbers.new_full((len(distinct),), len(rows)).scatter_reduce(0, copies, numbers, "amin")
            logits = decoding.logits(prompt.ids[first], prompt.attention_mask[first], positions[first])
            decoding.keep(copies)
            return logits[copies]
    return decoding.logits(prompt.ids, prompt.attention_mask, positions)


def _row_by_row(parts: Sequence[_Chunk], rows: Sequence[Tensor]) -> TokenSets:
    """Return all steps' sets in the order of the tokens; `rows` are each part's rows in the batch."""
    row_of_token = [own[sampled] for part, own in zip(parts, rows, strict=True) for sampled in part.sampled_rows]
    sets = TokenSets.cat([step for part in parts for step in part.allowed])
    return sets[torch.cat(row_of_token).argsort(stable=True)]  # a row's tokens are in order already

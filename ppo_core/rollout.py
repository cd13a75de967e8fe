"""Sampling responses with a KV cache, from exactly the distribution that is trained.

The next token is drawn by inverse CDF from softmax(logits / temperature) with a number handed in,
with no filter and no mask that training would not apply. The sampler's own log-probabilities are
kept, so that the training forward can be checked against them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.policy import Sequences, position_ids


@dataclass(frozen=True)
class Rollouts:
    """B sampled responses of at most T tokens."""

    sequences: Sequences
    sampler_logprobs: Tensor
    """[B, T]: log-probability of each token as sampled, 0 where masked."""
    ended: Tensor
    """[B], bool: ended by itself, that is with an EOS token."""
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    """Texts without special tokens; prompt + response is the whole text."""

    @property
    def lengths(self) -> Tensor:
        """[B]: response tokens, EOS included."""
        return self.sequences.response_mask.sum(-1)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], device: torch.device) -> Sequences:
    """Return the prompts padded on the left, as sequences without a response."""
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    width = max(len(ids) for ids in encoded)
    ids = torch.full((len(encoded), width), pad_id(tokenizer), dtype=torch.long)
    mask = torch.zeros((len(encoded), width), dtype=torch.long)
    for row, tokens in enumerate(encoded):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return Sequences(ids.to(device), mask.to(device), width)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills padding; any id would do, since only the mask is read."""
    pad = tokenizer.pad_token_id
    return int(pad if pad is not None else tokenizer.eos_token_id or 0)


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all ids that end a response: the model's generation config's, else the tokenizer's."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = tokenizer.eos_token_id
    if declared is None:
        return []
    return [int(i) for i in declared] if isinstance(declared, list | tuple) else [int(declared)]


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    uniforms: Tensor,
    *,
    temperature: float,
    chunk_rows: int,
) -> Rollouts:
    """Return one response per prompt; `uniforms` [B, T] in [0, 1) decides every token, T is the most new tokens.

    Rows go through the model `chunk_rows` at a time, which bounds memory and changes no sample.
    """
    stop_ids = torch.tensor(eos_ids(model, tokenizer), device=model.device)
    encoded = encode_prompts(tokenizer, prompts, model.device)
    parts = [
        _decode(model, encoded.rows(slice(i, i + chunk_rows)), uniforms[i : i + chunk_rows], stop_ids, temperature)
        for i in range(0, len(prompts), chunk_rows)
    ]
    length = max(part.mask.shape[1] for part in parts)
    responses = torch.cat([_widened(part.ids, length, pad_id(tokenizer)) for part in parts])
    masks = torch.cat([_widened(part.mask, length, 0) for part in parts])
    sequences = Sequences(
        torch.cat([encoded.ids, responses], 1), torch.cat([encoded.attention_mask, masks], 1), encoded.prompt_width
    )
    prompt_texts, response_texts = _texts(tokenizer, sequences)
    return Rollouts(
        sequences=sequences,
        sampler_logprobs=torch.cat([_widened(part.logprobs, length, 0) for part in parts]),
        ended=torch.cat([part.ended for part in parts]),
        prompts=prompt_texts,
        responses=response_texts,
    )


@dataclass(frozen=True)
class _Decoded:
    ids: Tensor
    mask: Tensor
    logprobs: Tensor
    ended: Tensor


def _decode(
    model: PreTrainedModel, prompt: Sequences, uniforms: Tensor, stop_ids: Tensor, temperature: float
) -> _Decoded:
    rows, device = prompt.ids.shape[0], prompt.ids.device
    uniforms = uniforms.to(device)
    alive = torch.ones(rows, dtype=torch.bool, device=device)
    mask, feed, positions = prompt.attention_mask, prompt.ids, position_ids(prompt.attention_mask)
    cache, tokens, masks, logprobs = None, [], [], []
    for t in range(uniforms.shape[1]):
        output = model(
            input_ids=feed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        token, logprob = _sample(output.logits[:, -1].float() / temperature, uniforms[:, t])
        tokens.append(token)
        masks.append(alive.long())
        logprobs.append(torch.where(alive, logprob, torch.zeros_like(logprob)))
        alive = alive & ~torch.isin(token, stop_ids)
        if not alive.any():
            break
        mask = torch.cat([mask, masks[-1].unsqueeze(1)], 1)
        feed, positions = token.unsqueeze(1), positions[:, -1:] + 1
    return _Decoded(torch.stack(tokens, 1), torch.stack(masks, 1), torch.stack(logprobs, 1), ~alive)


def _sample(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return (token [B], its log-probability [B]) by inverse CDF, in double precision."""
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.double().exp().cumsum(-1)
    threshold = (uniform.to(cumulative.dtype) * cumulative[:, -1]).unsqueeze(-1)
    token = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)
    return token.squeeze(-1), logprobs.gather(-1, token).squeeze(-1)


def _widened(values: Tensor, width: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)


def _texts(tokenizer: PreTrainedTokenizerBase, sequences: Sequences) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Decode whole rows and cut the prompt off, since a response decoded alone can lose its leading space."""
    prompts, responses = [], []
    for ids, mask in zip(sequences.ids.tolist(), sequences.attention_mask.tolist(), strict=True):
        used = [token for token, on in zip(ids, mask, strict=True) if on]
        prompt_tokens = sum(mask[: sequences.prompt_width])
        prompt = str(tokenizer.decode(used[:prompt_tokens], skip_special_tokens=True))
        whole = str(tokenizer.decode(used, skip_special_tokens=True))
        prompts.append(prompt)
        responses.append(whole.removeprefix(prompt))
    return tuple(prompts), tuple(responses)

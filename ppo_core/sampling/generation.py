"""Sample responses: the interface of a generator, and the one that decodes with transformers.

The sampler's own log-probabilities are kept, so that the training forward can be checked against them. Rows whose
response has ended leave the batch once half of it has, if the model's cache can drop rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from ppo_core.algorithm.randomness import Key, uniforms
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.prompts import encode
from ppo_core.data.task import Prompt
from ppo_core.errors import ConfigError
from ppo_core.models.memory import ChunkRows
from ppo_core.models.policy import FILTERED, ActorCritic, LanguageHead
from ppo_core.sampling.cuda_graphs import CapturedDecoding, CastWeights
from ppo_core.sampling.decoding import IS_FIXED, CachedDecoding, Decoding
from ppo_core.sampling.sequences import Sequences, TokenSets, padded_left, position_ids

# One step of sampling: the next token by inverse CDF, from exactly the distribution that is trained.
#
# The tokens left by top-k and top-p are kept beside the response, so that training and KL read the same filtered
# distribution. A number in [0, 1) decides each token.


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for sampling and ending responses."""

    temperature: float
    response_length: int
    """Maximum tokens of a response, the stop token or text included."""
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: PPOConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "SamplingSettings":
        """Return the settings of a run's rollouts.

        Raises:
            ConfigError: stop_token_id is not a token of the policy.
        """
        ends = eos_ids(model, tokenizer) if config.stop_token == "eos" else []
        if config.stop_token_id is not None:  # 0 is an id like others
            vocabulary = LanguageHead.of(model).vocabulary
            if config.stop_token_id >= vocabulary:
                raise ConfigError(
                    f"stop_token_id = {config.stop_token_id} is not allowed: the policy's tokens are 0 to "
                    f"{vocabulary - 1}"
                )
            ends.append(config.stop_token_id)
        return cls(
            config.temperature, config.response_length, config.top_k, config.top_p, tuple(ends), config.stop_texts
        )

    @property
    def filters(self) -> bool:
        """True if top-k or top-p leaves out tokens."""
        return self.top_k is not None or self.top_p < 1


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all ids that end a response: those of the model's generation config, and the tokenizer's.

    Either may miss one: a chat model's config may have only the base model's, and a tokenizer has only one.
    """
    declared = getattr(model.generation_config, "eos_token_id", None)
    of_model = declared if isinstance(declared, list | tuple) else [declared]
    return list(dict.fromkeys(int(i) for i in (*of_model, tokenizer.eos_token_id) if i is not None))


@dataclass(frozen=True)
class NextToken:
    """The next token of R rows."""

    ids: Tensor
    """[R]"""
    logprobs: Tensor
    """[R], nats, under the filtered distribution."""
    kept: Tensor | None
    """[R, V], bool: tokens left by the filters; None: no filters."""


def next_token(logits: Tensor, uniform: Tensor, settings: SamplingSettings) -> NextToken:
    """Sample the next token from logits [R, V] by numbers [R] in [0, 1), in double precision."""
    logits = logits.float()
    if settings.temperature != 1.0:
        logits = logits / settings.temperature
    kept = None
    if settings.filters:
        kept = likeliest(logits, settings.top_k, settings.top_p)
        logits = logits.masked_fill(~kept, FILTERED)
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.double().exp().cumsum(-1)
    threshold = (uniform.to(cumulative.dtype) * cumulative[:, -1]).unsqueeze(-1)
    token = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)
    return NextToken(token.squeeze(-1), logprobs.gather(-1, token).squeeze(-1), kept)


def likeliest(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Return the tokens of logits [R, V] left by the filters: the top k, and the fewest of those that hold `top_p`.

    The result is [R, V], bool. Top-p reads the probabilities among the top k, as transformers does; the likeliest
    token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    stays = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        stays[:, top_k:] = False
    if top_p < 1:
        probabilities = torch.softmax(ordered.double().masked_fill(~stays, FILTERED), -1)
        before = probabilities.cumsum(-1) - probabilities
        stays &= before < top_p
    return torch.zeros_like(stays).scatter(-1, order, stays)


class _StopTexts(StopStringCriteria):
    """Transformers' matcher, which finds tokens' texts by prefixing "abcdef"; some tokenizers lack that text."""

    @classmethod
    def of(cls, texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> "_StopTexts":
        try:
            return cls(tokenizer, list(texts))
        except ValueError as error:
            raise ConfigError(
                f"stop_strings = {texts!r} is not allowed: no token of the policy ends with it"
            ) from error

    @staticmethod
    def clean_tokenizer_vocab(
        tokenizer: Any, static_prefix: Any = "abcdef", stop_string_matching_mode: Any = None
    ) -> Any:
        """Return the tokens' texts and ids, found with a prefix that the tokenizer reproduces."""
        texts = (str(static_prefix), *tokenizer.get_vocab())
        known = next(text for text in texts if text in tokenizer.convert_tokens_to_string(tokenizer.tokenize(text)))
        return StopStringCriteria.clean_tokenizer_vocab(tokenizer, known, stop_string_matching_mode)


class Stops:
    """Detects rows that end with the token just sampled."""

    def __init__(self, settings: SamplingSettings, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> None:
        self._ids = torch.tensor(settings.stop_ids, device=device, dtype=torch.long)
        self._texts = _StopTexts.of(settings.stop_strings, tokenizer) if settings.stop_strings else None

    def __call__(self, responses: Tensor) -> Tensor:
        """Return [R], bool, of the responses so far [R, t], whose last column was just sampled."""
        ends = torch.isin(responses[:, -1], self._ids)
        if self._texts is not None:
            ends |= self._texts(responses, None)
        return ends


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
    weight_version: int
    """Version of the sampling weights, as given to the generator."""

    @property
    def lengths(self) -> Tensor:
        """[B]: response tokens, including the stop token or text."""
        return self.sequences.response_mask.sum(-1)


class Generator(Protocol):
    """Samples responses from the current policy, for the trainer and its evaluations."""

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        """Return one response per request, in their order.

        A response's randomness depends on the key, its request's id and the position alone, not on other requests,
        their order, or the number of rows in a pass.

        Raises:
            OutOfMemory: not even one response at a time fits.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Take over the policy's changed weights; `version` labels later samples."""
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
        self._weight_version = 0
        # Copies and captured graphs are of weights that lie whole where they are.
        policy, on_gpu = network.policy, network.policy.device.type == "cuda" and not network.is_sharded
        self._casts = CastWeights(policy) if network.bf16 and (on_gpu or fixed) else None
        self._model = policy if self._casts is None else self._casts.model
        fixed = on_gpu and getattr(policy, IS_FIXED, False) if fixed is None else fixed
        self._captured = CapturedDecoding(self._model, captures=on_gpu) if fixed else None

    def update_weights(self, version: int) -> None:
        """Label later samples with `version`, and refresh cached casts of the weights."""
        self._weight_version = version
        if self._casts is not None:
            self._casts.refresh()
        if self._captured is not None:
            self._captured.learned()

    def generate(self, requests: Sequence[Request], sampling: SamplingSettings, key: Key) -> Rollouts:
        """Return one response per request, some rows at a time, fewer when memory runs out."""
        numbers = torch.from_numpy(uniforms(key, [request.id for request in requests], sampling.response_length))
        prompts = [request.prompt for request in requests]

        def attempt(rows: int) -> Rollouts:
            begin = None if self._captured is None else self._captured.begin
            try:
                return generate(
                    self._model, self._tokenizer, prompts, numbers, sampling,
                    chunk_rows=rows, weight_version=self._weight_version, begin=begin,
                )  # fmt: skip
            except BaseException:
                if self._captured is not None:
                    self._captured.release()  # what broke off has left them in any state
                raise

        with self._network.precision():
            rollouts = self._chunk.run(attempt, most=len(requests))
        if self._captured is not None:
            self._captured.end()
        return rollouts


BeginDecoding = Callable[[int, int], Decoding]
"""Prepares for a batch of at most so many rows and columns."""

REPLACEMENT = "\ufffd"
"""Character that tokenizers decode incomplete bytes to."""


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    chunk_rows: int,
    weight_version: int = 0,
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
    parts = [_Chunk(encoded.rows(rows), numbers[rows], settings, stops).run(begin) for rows in order.split(chunk_rows)]
    back = order.argsort()
    length = max(part.ids.shape[1] for part in parts)
    ids, mask, logprobs = (
        torch.cat([_widened(getattr(part, name), length) for part in parts])[back]
        for name in ("ids", "mask", "logprobs")
    )
    sequences = Sequences(
        torch.cat([encoded.ids, ids], 1),
        torch.cat([encoded.attention_mask, mask], 1),
        encoded.prompt_width,
        _row_by_row(parts, order.split(chunk_rows)) if settings.filters else None,
    )
    ended = torch.cat([part.ended for part in parts])[back]
    texts = _response_texts(tokenizer, sequences)
    return Rollouts(sequences, logprobs, ended, tuple(prompts), texts, weight_version)


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
        """Allowed tokens of each step, for the rows in `sampled_rows`."""
        self.sampled_rows: list[Tensor] = []

    def run(self, begin: BeginDecoding) -> "_Chunk":
        """Sample until all rows have ended; the tensors are cut to the longest response."""
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
        return self._cut(int(self.mask.sum(-1).max()))

    def _write(self, t: int, live: Tensor, logits: Tensor) -> Tensor:
        """Sample position `t` of the live rows; samples of ended rows are dropped."""
        sampled = next_token(logits, self.uniforms[live, t], self.settings)
        ended = self.ended[live]
        self.ids[live, t] = sampled.ids.masked_fill(ended, 0)
        self.mask[live, t] = (~ended).long()
        self.logprobs[live, t] = sampled.logprobs.masked_fill(ended, 0.0)
        if sampled.kept is not None:
            self.allowed.append(TokenSets.of(sampled.kept[~ended]))
            self.sampled_rows.append(live[~ended])
        self.ended[live] = ended | self.stops(self.ids[live, : t + 1])
        return sampled.ids

    def _cut(self, steps: int) -> "_Chunk":
        self.ids, self.mask, self.logprobs = self.ids[:, :steps], self.mask[:, :steps], self.logprobs[:, :steps]
        return self


def _prompt_logits(decoding: Decoding, prompt: Sequences, positions: Tensor) -> Tensor:
    """Return the first token's logits [R, V]; repeated prompts are run only once."""
    if decoding.drops_rows:
        first, of_row = _distinct(prompt)
        if len(first) < len(of_row):
            logits = decoding.logits(prompt.ids[first], prompt.attention_mask[first], positions[first])
            decoding.keep(of_row)
            return logits[of_row]
    return decoding.logits(prompt.ids, prompt.attention_mask, positions)


def _distinct(prompt: Sequences) -> tuple[Tensor, Tensor]:
    """Return one row of each distinct prompt, [U], and each row's index among these, [R]."""
    rows = (prompt.ids + 1) * prompt.attention_mask  # padding is 0 whatever fills it
    _, of_row = rows.unique(dim=0, return_inverse=True)
    first = torch.full((int(of_row.max()) + 1,), len(of_row), device=of_row.device)
    first = first.scatter_reduce(0, of_row, torch.arange(len(of_row), device=of_row.device), "amin")
    return first, of_row


def _row_by_row(parts: Sequence[_Chunk], rows: Sequence[Tensor]) -> TokenSets:
    """Return all steps' sets in the order of the tokens; `rows` are each part's rows in the batch."""
    of_tokens = [own[sampled] for part, own in zip(parts, rows, strict=True) for sampled in part.sampled_rows]
    sets = TokenSets.cat([step for part in parts for step in part.allowed])
    return sets[torch.cat(of_tokens).argsort(stable=True)]  # a row's tokens stand one after the other already


def _widened(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


def _response_texts(tokenizer: PreTrainedTokenizerBase, sequences: Sequences) -> tuple[str, ...]:
    """Return the responses' texts, decoded with their prompts: decoded alone, one can lose its leading space."""
    prompts, wholes = [], []
    for ids, mask in zip(sequences.ids.tolist(), sequences.attention_mask.tolist(), strict=True):
        used = [token for token, on in zip(ids, mask, strict=True) if on]
        wholes.append(used)
        prompts.append(used[: sum(mask[: sequences.prompt_width])])
    texts = (tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in (prompts, wholes))
    return tuple(_text_after(tokenizer, *row) for row in zip(prompts, wholes, *texts, strict=True))


def _text_after(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], whole: list[int], prompt_text: str, whole_text: str
) -> str:
    """Return a row's text after its prompt, whose end the response's first tokens may have changed.

    A character that the prompt leaves unfinished belongs to the response. A response that begins with an incomplete
    byte can spoil all bytes before it in one decoder (byte fallback): it is then decoded after less of the prompt.
    """
    if whole_text.startswith(prompt_text):
        return whole_text[len(prompt_text) :]
    finished = prompt_text.rstrip(REPLACEMENT)
    if finished != prompt_text and whole_text.startswith(finished):
        return whole_text[len(finished) :]
    response, less = whole[len(prompt) :], 1
    while less < len(prompt):
        context = prompt[:-less]
        before, after = (
            str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (context, [*context, *response])
        )
        if before and not before.endswith(REPLACEMENT) and after.startswith(before):
            return after[len(before) :]
        less *= 2
    return str(tokenizer.decode(response, skip_special_tokens=True))


class TokenTexts:
    """Text of each token by itself, for rewards and pages that look at single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, sequences: Sequences) -> list[list[str]]:
        """Return the response tokens' texts, row by row."""
        return [[self._text(token) for token in tokens] for tokens in sequences.response_tokens()]

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = str(self._tokenizer.decode([token]))
        return self._known[token]

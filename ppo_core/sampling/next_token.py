"""One step of sampling: choose each row's next token, and detect the rows that end with it.

A number in [0, 1) decides each token, by inverse CDF, from exactly the distribution that is trained. The tokens left by
top-k and top-p are returned, so that training and KL read the same filtered distribution. Nothing here waits for a GPU.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.models.policy import FILTERED, LanguageHead


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
        """Return the settings of a run's rollouts, or raise ConfigError for a stop_token_id that the policy lacks."""
        ends = eos_ids(model, tokenizer) if config.stop_token == "eos" else []
        if config.stop_token_id is not None:  # 0 is an id like others
            last = LanguageHead.of(model).vocabulary - 1
            if config.stop_token_id > last:
                raise ConfigError(
                    f"stop_token_id = {config.stop_token_id} is not allowed: the policy's tokens are 0 to {last}"
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
    """Sample the next token from logits [R, V] by numbers [R] in [0, 1)."""
    logits = logits.float()
    if settings.temperature != 1.0:
        logits = logits / settings.temperature
    kept = None
    if settings.filters:
        kept = likeliest(logits, settings.top_k, settings.top_p)
        logits = logits.masked_fill(~kept, FILTERED)
    logprobs = torch.log_softmax(logits, -1)
    token = drawn(logprobs, uniform).unsqueeze(-1)
    return NextToken(token.squeeze(-1), logprobs.gather(-1, token).squeeze(-1), kept)


BLOCK = 512
"""Tokens that are added up in float32 before sampling looks at any of them."""


def drawn(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token [R] at which the cumulative probability of log-probabilities [R, V] passes `uniform` [R].

    With s_b the sum of block b's probabilities, S_b = s_1 + ... + s_b, and c_i the cumulative sums within a block:

        b = first with S_b > u S_last        i = first with c_i > c_last (1 - (S_b - u S_last) / s_b)

    Only S and c are float64. Both are passed for certain, by a token whose probability is not 0: u < 1 in float64 makes
    each right side less than the last sum.
    """
    rows, vocabulary = logprobs.shape
    blocks = -(-vocabulary // BLOCK)
    padded = logprobs.new_zeros(rows, blocks * BLOCK)
    torch.exp(logprobs, out=padded[:, :vocabulary])
    weights = padded.view(rows, blocks, BLOCK)
    sums = weights.sum(-1).double()
    ends = sums.cumsum(-1)
    threshold = uniform.double().unsqueeze(-1) * ends[:, -1:]
    block = torch.searchsorted(ends, threshold, right=True).clamp(max=blocks - 1)  # NaN is never passed
    share = (ends.gather(-1, block) - threshold) / sums.gather(-1, block)
    within = weights.gather(1, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double().cumsum(-1)
    place = torch.searchsorted(within, within[:, -1:] * (1 - share), right=True)
    return (block * BLOCK + place).squeeze(-1).clamp(max=vocabulary - 1)


def likeliest(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Return the tokens of logits [R, V] left by the filters: the top k, and the fewest of those that hold `top_p`.

    The result is [R, V], bool. Top-p reads the probabilities among the top k, as transformers does; the likeliest
    token always stays.
    """
    if top_k is None:
        ordered, order = logits.sort(descending=True, stable=True)
    else:
        ordered, order = logits.topk(min(top_k, logits.shape[-1]))
    stays = torch.ones_like(ordered, dtype=torch.bool)
    if top_p < 1:
        probabilities = torch.softmax(ordered, -1)
        before = probabilities.cumsum(-1) - probabilities
        stays = ~(before >= top_p)  # NaN stays, so that what is left of a broken policy is NaN, too
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, stays)


class _StopTexts(StopStringCriteria):
    """Transformers' matcher, which finds tokens' texts by prefixing "abcdef"; some tokenizers lack that text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> None:
        try:
            super().__init__(tokenizer, list(texts))
        except ValueError as error:
            raise ConfigError(
                f"stop_strings = {texts!r} is not allowed: no token of the policy ends with it"
            ) from error

    @staticmethod
    def clean_tokenizer_vocab(
        tokenizer: Any, static_prefix: Any = "abcdef", stop_string_matching_mode: Any = None
    ) -> Any:
        """Return the tokens' texts and ids, found with a prefix that the tokenizer reproduces."""
        texts = (static_prefix, *tokenizer.get_vocab())
        known = next(text for text in texts if text in tokenizer.convert_tokens_to_string(tokenizer.tokenize(text)))
        return StopStringCriteria.clean_tokenizer_vocab(tokenizer, known, stop_string_matching_mode)


@functools.lru_cache(maxsize=4)
def _stop_texts(tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> _StopTexts:
    """Return the matcher, made once: its table of a large vocabulary takes seconds, and transformers makes it anew."""
    return _StopTexts(tokenizer, texts)


class Stops:
    """Detects rows that end with the token just sampled."""

    def __init__(self, settings: SamplingSettings, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> None:
        self._ids = torch.tensor(settings.stop_ids, device=device, dtype=torch.long)
        self._texts = _stop_texts(tokenizer, settings.stop_strings) if settings.stop_strings else None

    def __call__(self, responses: Tensor) -> Tensor:
        """Return [R], bool, of the responses so far [R, t], whose last column was just sampled."""
        ends = torch.isin(responses[:, -1], self._ids)
        if self._texts is not None:
            ends |= self._texts(responses, None)
        return ends

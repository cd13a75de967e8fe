"""Cached decoding, and how finished rows leave the batch: decided once for a loaded model, by trying it.

Architectures differ in what a cache holds (keys and values, states, or both), in how it drops rows, and in whether
padding on the left has an effect. No list of names decides: when a model is loaded, a few tokens are decoded in each
way that transformers has to drop rows, and the logits are compared with those of each row by itself, without padding
or cache. The model prepares the inputs of a step, as for transformers' `generate`.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ppo_core.errors import TaskError
from ppo_core.policy import LanguageHead, response_states
from ppo_core.sequences import Sequences, position_ids

# A KV cache with its room reserved: a step writes into it, where transformers' own copies it whole to add a token.


def reserved_cache(model: PreTrainedModel, tokens: int) -> DynamicCache:
    """Return an empty cache with room for `tokens`; layers of other kinds (a sliding window) stay transformers' own."""
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = _ReservedLayer(tokens)
    return cache


class _ReservedLayer(DynamicLayer):
    """Keys and values [R, heads, length, width] are views of buffers that are `tokens` long."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self._buffers: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of t new tokens, [R, heads, t, width], and return views of all so far."""
        length = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = tuple(
                states.new_empty(*states.shape[:2], self.tokens, states.shape[-1])
                for states in (key_states, value_states)
            )
        new = length + key_states.shape[-2]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, length:new] = states
        self.keys, self.values = (buffer[:, :, :new] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [K], in that order."""
        length = self.get_seq_length()
        self._buffers = tuple(buffer[indices] for buffer in self._buffers)
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do as `batch_select_indices`: transformers' name for it where layers have a state."""
        self.batch_select_indices(beam_idx)


# Cached decoding, and how finished rows leave the batch: decided once for a loaded model, by trying it.

logger = logging.getLogger(__name__)

WAYS = ("batch_select_indices", "reorder_cache")
"""The methods of transformers' caches that drop rows; layers with a state have the second one alone."""

LEAST_TOLERANCE = 1e-3
"""Of the logits' spread: what TF32 leaves of float32, and far less than a wrong state changes."""

MOST_TOLERANCE = 0.4
"""Of the logits' spread, in any precision: a wrong state changes about all of it."""

_WAY = "_ppo_core_drops_rows_by"
"""The attribute that keeps the decision on a model, so that its copies have it, too."""


class CachedDecoding:
    """The decode steps of one batch of at most `tokens` columns; the first one takes the prompts."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self._model: Any = model  # a PreTrainedModel that generates has more methods than its type says
        self._cache = reserved_cache(model, tokens)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._is_first = True

    def logits(self, ids: Tensor, attention_mask: Tensor, positions: Tensor) -> Tensor:
        """Return the next token's logits [R, V] after new tokens [R, t], with the mask of all tokens so far."""
        inputs = self._model.prepare_inputs_for_generation(
            ids,
            is_first_iteration=self._is_first,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        self._is_first = False
        logits: Tensor = self._model(**{**inputs, "logits_to_keep": 1}).logits[:, -1]
        return logits

    def keep(self, rows: Tensor) -> None:
        """Keep the rows `rows` [K], in that order; only where the model `drops_rows`."""
        getattr(self._cache, getattr(self._model, _WAY, WAYS[0]))(rows)

    @property
    def drops_rows(self) -> bool:
        """Whether rows may leave before the others."""
        return getattr(self._model, _WAY, WAYS[0]) is not None


@torch.no_grad()
def decide_decoding(model: PreTrainedModel, which: str) -> None:
    """Decide how rows leave the model's cache: in one of two ways, or, with a note in the log, not at all.

    Raises:
        TaskError: the training forward or decoding gives other logits to rows in one batch than to each row alone;
            `which` names the model.
    """
    sequences = _probe(model)
    is_token = sequences.response_mask > 0
    expected = _each_alone(model, sequences)[is_token]
    scale = _size(expected - expected.mean(-1, keepdim=True))
    with _rounded_otherwise(model):
        rounding = _size(_each_alone(model, sequences)[is_token] - expected)
    tolerance = min(max(4 * rounding, LEAST_TOLERANCE * scale), MOST_TOLERANCE * scale)

    def agrees(read: Callable[[], Tensor]) -> bool:
        try:
            found = read()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # what a cache or a model lacks shows in an error of any class
            return False
        return _size(found[is_token] - expected) <= tolerance

    name = f"{which} ({type(model).__name__})"
    if not agrees(lambda: LanguageHead.of(model)(response_states(model, sequences), 1.0, None)):
        raise TaskError(f"{name} cannot be used: padding before a short row changes its logits")
    for way in (*WAYS, None):
        setattr(model, _WAY, way)
        if agrees(lambda: _decoded(model, sequences)):
            break
    else:
        raise TaskError(f"{name} cannot be used: decoding with a cache gives other logits than one pass")
    if way is None:
        logger.warning(
            "%s: finished responses stay in the batch until all have finished, because its cache cannot drop rows", name
        )


def _probe(model: PreTrainedModel) -> Sequences:
    """Return rows of different prompts and responses, [4, 4 + 5], that end at different steps and in no order."""
    prompts, responses = torch.tensor([[1], [4], [2], [3]]), torch.tensor([[5], [1], [4], [2]])
    columns = torch.arange(9)
    mask = ((columns >= 4 - prompts) & (columns < 4 + responses)).long()
    vocabulary = LanguageHead.of(model).vocabulary
    ids = torch.randint(vocabulary, mask.shape, generator=torch.Generator().manual_seed(0))
    return Sequences(ids.to(model.device), mask.to(model.device), prompt_width=4)


@contextmanager
def _rounded_otherwise(model: PreTrainedModel) -> Iterator[None]:
    """Move every layer's output by up to one unit in the last place, as another order of summation does.

    In bfloat16 this moves the logits by 1% to 70% of their spread: more in deep models, and where a choice of experts
    is close.
    """
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(model.dtype).eps

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        share = 2 * torch.rand(output.shape, generator=generator).to(output.device) - 1
        return output * (1 + unit * share).to(output.dtype)

    layers = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [layer.register_forward_hook(move) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _each_alone(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Return each row's `_alone`, [B, T, V]."""
    return torch.stack([_alone(model, sequences, row) for row in range(len(sequences.ids))])


def _alone(model: PreTrainedModel, sequences: Sequences, row: int) -> Tensor:
    """Return the logits before each response token of one row, [T, V], by a plain pass without padding or cache."""
    used = sequences.attention_mask[row].bool()
    ids = sequences.ids[row : row + 1, used]
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
    length = int(sequences.response_mask[row].sum())
    return torch.nn.functional.pad(logits[-length - 1 : -1], (0, 0, 0, sequences.response_width - length))


def _decoded(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Return the logits before each response token, [B, T, V], step by step; rows that end leave where they can."""
    width, steps = sequences.prompt_width, sequences.response_width
    decoding = CachedDecoding(model, width + steps)
    lengths = sequences.response_mask.sum(-1)
    live = torch.arange(len(lengths), device=lengths.device)
    # A row that stays is fed on, as in sampling.
    mask = torch.cat([sequences.attention_mask[:, :width], torch.ones_like(sequences.attention_mask[:, width:])], 1)
    positions = position_ids(mask)
    found: Tensor | None = None
    for t in range(steps):
        new = slice(0, width) if t == 0 else slice(width + t - 1, width + t)
        logits = decoding.logits(sequences.ids[live, new], mask[live, : width + t], positions[live, new]).float()
        if found is None:
            found = logits.new_zeros(len(lengths), steps, logits.shape[-1])
        found[live, t] = logits
        going = (lengths[live] > t + 1).nonzero().squeeze(-1)
        if decoding.drops_rows and 0 < len(going) < len(live):
            decoding.keep(going)
            live = live[going]
    assert found is not None
    return found


def _size(values: Tensor) -> float:
    """Return the root of the mean square."""
    return float(values.double().square().mean().sqrt())

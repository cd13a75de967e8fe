"""Decoding with a KV cache, one step after another.

The model prepares a step's inputs as for transformers' `generate`. Whether its cache can drop rows is determined once
per loaded model (`ppo_core.sampling.cache_check`), and noted on it.
"""

import inspect
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


def reserved_cache(model: PreTrainedModel, tokens: int, rows: int | None = None) -> DynamicCache:
    """Return an empty cache with room for `tokens` of `rows` (None: as many as the first call has).

    A step writes into the reserved room; transformers' own cache is copied whole to add a token. Layers of other kinds
    (a sliding window, a state) stay transformers' own.
    """
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = ReservedLayer(tokens, rows)
    return cache


class ReservedLayer(DynamicLayer):
    """Keys and values [R, heads, length, width] are views of buffers that are `tokens` long."""

    def __init__(self, tokens: int, rows: int | None = None) -> None:
        super().__init__()
        self.tokens, self.rows = tokens, rows
        self.place: Tensor | None = None
        """[1], column of the next token's states; if set, `columns` are returned, so that no shape depends on it."""
        self.columns = tokens
        self._buffers: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of t new tokens, [R, heads, t, width], and return views of all so far."""
        if self.place is not None:
            keys, values = (buffer[: len(key_states), :, : self.columns] for buffer in self._buffers)
            return keys.index_copy_(2, self.place, key_states), values.index_copy_(2, self.place, value_states)
        length = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = tuple(
                # Zeros, since what a mask leaves out still goes through the attention: 0 * NaN would be NaN.
                states.new_zeros(self.rows or len(states), states.shape[1], self.tokens, states.shape[-1])
                for states in (key_states, value_states)
            )
        rows, new = len(key_states), length + key_states.shape[-2]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:rows, :, length:new] = states
        self.keys, self.values = (buffer[:rows, :, :new] for buffer in self._buffers)
        return self.keys, self.values

    def held_bytes(self) -> int:
        """Return the buffers' size in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def rewind(self) -> None:
        """Forget all tokens, keeping the buffers, for at most as many rows."""
        self.place = None
        if self._buffers:
            self.keys, self.values = (buffer[:, :, :0] for buffer in self._buffers)

    def keep_in_place(self, rows: Tensor) -> None:
        """Move the rows `rows` [K] to the front of the buffers."""
        for buffer in self._buffers:
            buffer[: len(rows)] = buffer[rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx` [K], in that order."""
        length = self.get_seq_length()
        self._buffers = tuple(buffer[beam_idx] for buffer in self._buffers)
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


DROPS_ROWS = "_ppo_core_drops_rows"
"""Attribute of a model, True if its cache can drop rows; copies of the model have it as well."""
IS_FIXED = "_ppo_core_reads_fixed_buffers"
"""Attribute of a model that can be decoded in buffers of fixed shape (`ppo_core.sampling.cuda_graphs`)."""


class CachedDecoding:
    """Step-by-step decoding of one batch with a cache of at most `tokens` columns; the first step takes the prompts."""

    looks_every = 1
    """Steps between two checks for ended rows: each check waits for the device."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self._model: Any = model  # a PreTrainedModel that generates has more methods than its type says
        self._cache = reserved_cache(model, tokens)
        self._is_first = True

    def logits(self, ids: Tensor, attention_mask: Tensor, positions: Tensor) -> Tensor:
        """Return the next token's logits [R, V] after new tokens [R, t], with the mask of all tokens so far."""
        logits = step_logits(self._model, self._cache, ids, attention_mask, positions, is_first=self._is_first)
        self._is_first = False
        return logits

    def keep(self, rows: Tensor) -> None:
        """Continue with the rows `rows` [K], in that order; only if it `drops_rows`."""
        self._cache.reorder_cache(rows)  # type: ignore[arg-type]  # its own type for these numbers

    @property
    def drops_rows(self) -> bool:
        """True if rows may leave before the others, and be repeated."""
        return bool(getattr(self._model, DROPS_ROWS, True))

    def leaving(self, ended: Tensor, count: int) -> Tensor | None:
        """Return the rows to keep: those that have not `ended` [R], `count` of them, once half have; None: all."""
        return (~ended).nonzero().squeeze(-1) if self.drops_rows and 2 * count <= len(ended) else None


def step_logits(
    model: Any, cache: DynamicCache, ids: Tensor, attention_mask: Tensor, positions: Tensor, *, is_first: bool
) -> Tensor:
    """Return the next token's logits [R, V]; the model prepares the inputs as for transformers' `generate`."""
    parameters = inspect.signature(model.forward).parameters
    inputs = model.prepare_inputs_for_generation(
        ids,
        is_first_iteration=is_first,
        attention_mask=attention_mask,
        position_ids=positions,
        use_cache=True,
        **{"cache_params" if "cache_params" in parameters else "past_key_values": cache},
    )
    logits: Tensor = model(**{**inputs, "logits_to_keep": 1}).logits[:, -1]
    return logits

"""A KV cache with its room reserved: a step writes into it, where transformers' own copies it whole to add a token."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


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
        """Append the states of new tokens and return all there are."""
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
        """Keep only some rows."""
        length = self.get_seq_length()
        self._buffers = tuple(buffer[indices] for buffer in self._buffers)
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep only some rows: transformers' other name for it."""
        self.batch_select_indices(beam_idx)

"""Decode on a GPU without waiting for the host: each step replays one captured CUDA graph.

A decode step is hundreds of small kernels. Launched one by one from Python they take 30 to 45 ms per token whatever the
size of the model; replayed as a graph, only the kernels' own time. A graph has fixed shapes and addresses, so keys and
values live in buffers that outlast a batch, attention reads a fixed part of them under a mask, and rows that have ended
leave by halves: R, R/2, R/4, ... rows have a graph each. Only full attention can be read this way;
`ppo_core.sampling.cache_check` decides by trying it, and everything else is decoded step by step.

    prompts  ->  one ordinary pass, which fills the buffers
    a step   ->  mask[:, place] = 0, the model, place += 1: captured once per rows and columns, then replayed

Attention reads all columns of a graph, used or not. Capturing a graph takes the time of three steps without one, so not
every width is worth its own: a batch reads the buffers' whole width, or the half, the quarter, ... that holds it. That
is less than twice what it uses, and the widest, which costs the most, reads no more than its own.
"""

import logging
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ppo_core.errors import is_out_of_memory
from ppo_core.models.memory import begin_recent_peak, free, recent_peak, room
from ppo_core.sampling.decoding import CachedDecoding, ReservedLayer, reserved_cache, step_logits

logger = logging.getLogger(__name__)

LOOKS_EVERY = 8
"""Steps between two checks for rows that have ended. A check waits for the device; a late one costs little."""
TOKENS_STEP = 128
"""Buffers are sized in multiples of this, so that prompts of similar widths share graphs."""
MASKED = -1e30
"""Added to the attention scores of masked columns: finite in float32 and bfloat16."""
SMALL = 0.1
"""Share of the device's memory that buffers may keep between two batches before an iteration's use is known."""
MOST_FILLED = 0.9
"""Share of the device's memory for an iteration plus the buffers; responses may still grow longer."""


class CapturedDecoding:
    """Decodes one batch after another in the same buffers, step by step as a captured graph.

    `captures` False runs the same steps without a graph, on any device.
    """

    drops_rows = True

    def __init__(self, model: PreTrainedModel, *, captures: bool = True) -> None:
        self._model = model
        self._captures = captures
        self.looks_every = LOOKS_EVERY if captures else 1
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """Graphs by rows and columns."""
        self._beside: float | None = None
        """Peak bytes of iterations that learned after the buffers were released; None: none yet."""
        self._is_given_back = False
        self._is_first = True
        self.release()

    def begin(self, rows: int, tokens: int) -> "CapturedDecoding":
        """Prepare for a batch of at most `rows` rows and `tokens` columns; growing the buffers costs new graphs.

        So the widest of several batches should come first; its memory also serves the graphs of the others.
        """
        if rows > self._rows or tokens > self._tokens:
            size = max(rows, self._rows), max(-(-tokens // TOKENS_STEP) * TOKENS_STEP, self._tokens)
            self.release()
            self._allocate(*size)
        self._columns = self._tokens
        while self._columns >= 2 * max(tokens, TOKENS_STEP):
            self._columns //= 2
        for layer in self._layers:
            layer.rewind()
        self._is_first = True
        return self

    def _allocate(self, rows: int, tokens: int) -> None:
        device, dtype = self._model.device, self._model.dtype
        self._cache = reserved_cache(self._model, tokens, rows)
        self._layers = [cast(ReservedLayer, layer) for layer in self._cache.layers]
        self._ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._mask = torch.full((rows, 1, 1, tokens), MASKED, dtype=dtype, device=device)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._rows, self._tokens = rows, tokens

    def end(self) -> None:
        """Keep the buffers if they fit beside the memory for learning, else release them."""
        held, memory = self._held(), room(self._model.device)
        if self._beside is None:
            most = SMALL * memory.total
        else:
            most = MOST_FILLED * memory.total - memory.process - self._beside
        if held > most:
            self.give_back()
            free()

    def give_back(self) -> bool:
        """Release the buffers kept between two batches, for the work beside them; return False without any."""
        had_some = self._held() > 0
        if had_some:
            self._is_given_back = True
            self.release()
            begin_recent_peak(self._model.device)  # what the buffers took is no part of what is needed beside them
        return had_some

    def _held(self) -> int:
        return sum(layer.held_bytes() for layer in self._layers)

    def learned(self) -> None:
        """Record an iteration's peak memory, if the buffers were released before it learned."""
        if self._is_given_back:
            self._is_given_back = False
            self._beside = recent_peak(self._model.device)

    def release(self) -> None:
        """Free the buffers and all graphs."""
        self._graphs.clear()
        self._rows = self._tokens = 0
        self._layers, self._cache = [], DynamicCache()

    def logits(self, ids: Tensor, attention_mask: Tensor, positions: Tensor) -> Tensor:
        """Return the next token's logits; they overwrite the previous ones."""
        rows = len(ids)
        if self._is_first:
            logits = step_logits(self._model, self._cache, ids, attention_mask, positions, is_first=True)
            self._mask.fill_(MASKED)
            self._mask[:rows, 0, 0, : ids.shape[1]].masked_fill_(attention_mask > 0, 0.0)
            self._place.fill_(ids.shape[1])
            for layer in self._layers:
                layer.place, layer.columns = self._place, self._columns
            self._is_first = False
            return logits
        self._ids[:rows].copy_(ids)
        self._positions[:rows].copy_(positions)
        if (rows, self._columns) not in self._graphs and not self._has_captured(rows):
            return self._step(rows)
        graph, logits = self._graphs[rows, self._columns]
        graph.replay()
        return logits

    def _has_captured(self, rows: int) -> bool:
        """Capture a step for `rows` rows; return False if that is impossible, and never retry."""
        if not self._captures:
            return False
        try:
            self._graphs[rows, self._columns] = self._capture(rows)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._captures = False
            reason = str(error).partition("\n")[0]
            logger.warning("decodes without captured graphs, because a step cannot be captured: %s", reason)
        return self._captures

    def _step(self, rows: int) -> Tensor:
        self._mask.index_fill_(3, self._place, 0.0)
        mask = self._mask[:rows, :, :, : self._columns]
        device = self._mask.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        # A graph must not read a cast made outside it.
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            logits = step_logits(
                self._model, self._cache, self._ids[:rows], mask, self._positions[:rows], is_first=False
            )
        self._place.add_(1)
        return logits

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        """One stream for all captures: cuBLAS keeps a workspace for each stream that it has seen."""
        return torch.cuda.Stream()

    def _capture(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        place, current = self._place.clone(), torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(2):  # libraries set up their workspaces; what is written stands at the step's own place
                self._step(rows)
                self._place.copy_(place)
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:
            # One for all: graphs are replayed one at a time, and a graph's logits are read before the next replay.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
                logits = self._step(rows)
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
        return graph, logits  # capturing ran nothing: the place is still the step's

    def keep(self, rows: Tensor) -> None:
        """Keep only some rows, moved to the front of the buffers."""
        for layer in self._layers:
            layer.keep_in_place(rows)
        self._mask[: len(rows)] = self._mask[rows]

    def leaving(self, ended: Tensor, count: int) -> Tensor | None:
        """Return half of the rows, unfinished ones first, once at most half of all are unfinished."""
        half = (len(ended) + 1) // 2
        if count > half or half == len(ended):
            return None
        return ended.to(torch.uint8).argsort(stable=True)[:half]


def has_fixed_layers(model: PreTrainedModel) -> bool:
    """Return True if the model's only state per token is its keys and values."""
    return all(type(layer) is ReservedLayer for layer in reserved_cache(model, tokens=1).layers)


Decoding = CachedDecoding | CapturedDecoding
"""The decode steps of one batch."""

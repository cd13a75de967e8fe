"""Find out by trying how a loaded model can be decoded.

Architectures differ in what a cache holds (keys and values, states, or both), in how it drops rows, and in whether
padding on the left has an effect. No list of names decides: when a model is loaded, a few tokens are decoded in each
possible way, and the logits are compared with those of each row by itself, without padding or cache.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ppo_core.errors import TaskError
from ppo_core.models.policy import LanguageHead, response_states
from ppo_core.models.sequences import Sequences, position_ids
from ppo_core.sampling.cuda_graphs import CapturedDecoding, Decoding, has_fixed_layers
from ppo_core.sampling.decoding import DROPS_ROWS, IS_FIXED, CachedDecoding

logger = logging.getLogger(__name__)

LEAST_TOLERANCE = 1e-3
"""Share of the logits' spread: TF32's error, far less than a wrong state's effect."""

MOST_TOLERANCE = 0.4
"""Share of the logits' spread, in any precision: a wrong state's effect is about the whole spread."""


@torch.no_grad()
def decide_decoding(model: PreTrainedModel, which: str, *, fixed: bool | None = None) -> None:
    """Determine whether rows can leave the loaded model's cache, with a note in the log if not; `which` names it there.

    `fixed` also tries buffers of fixed shape, as captured graphs read them; None: on a CUDA device. Raises TaskError if
    the training forward or decoding gives other logits to rows in one batch than to each row alone.
    """
    agrees, sequences = _comparison(model)
    name = f"{which} ({type(model).__name__})"
    if not agrees(lambda: LanguageHead.of(model)(response_states(model, sequences), 1.0, None)):
        raise TaskError(f"{name} cannot be used: padding before a short row changes its logits")
    for drops_rows in (True, False):
        setattr(model, DROPS_ROWS, drops_rows)
        if agrees(lambda: _decoded(model, sequences, CachedDecoding(model, sequences.ids.shape[1]))):
            break
    else:
        raise TaskError(f"{name} cannot be used: decoding with a cache gives other logits than one pass")
    if not drops_rows:
        logger.warning(
            "%s: finished responses stay in the batch until all have finished, because its cache cannot drop rows", name
        )
    if fixed or (fixed is None and model.device.type == "cuda"):
        setattr(model, IS_FIXED, has_fixed_layers(model) and agrees(lambda: _decoded_fixed(model, sequences)))
        if not getattr(model, IS_FIXED):
            logger.warning(
                "%s: decodes without captured graphs, because its attention cannot read buffers of fixed shape, or its "
                "step waits for the device",
                name,
            )


def _comparison(model: PreTrainedModel) -> tuple[Callable[[Callable[[], Tensor]], bool], Sequences]:
    """Return a check that logits [B, T, V] agree with those of each row alone, and its test sequences."""
    sequences = _probe(model)
    is_token = sequences.response_mask > 0
    expected = _each_alone(model, sequences)[is_token]
    scale = _size(expected - expected.mean(-1, keepdim=True))
    with _rounded_otherwise(model):
        rounding = _size(_each_alone(model, sequences)[is_token] - expected)
    tolerance = min(max(4 * rounding, LEAST_TOLERANCE * scale), MOST_TOLERANCE * scale)

    def agrees(read: Callable[[], Tensor]) -> bool:
        try:
            logits = read()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # what a cache or a model lacks shows in an error of any class
            return False
        return _size(logits[is_token] - expected) <= tolerance

    return agrees, sequences


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

    In bfloat16 this moves the logits by 1% to 70% of their spread: more in deep models, and if a choice of experts is
    close.
    """
    generator = torch.Generator().manual_seed(0)
    unit = unit_of(model)

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


def unit_of(model: PreTrainedModel) -> float:
    """Return one unit in the last place of the model's computing precision, which autocast may set."""
    device = model.device.type
    return torch.finfo(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype).eps


def _each_alone(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Return the logits before each response token, [B, T, V], by a plain pass per row without padding or cache."""
    padded = []
    for tokens, mask, response in zip(sequences.ids, sequences.attention_mask, sequences.response_mask, strict=True):
        ids = tokens[mask.bool()].unsqueeze(0)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
        length = int(response.sum())
        padded.append(torch.nn.functional.pad(logits[-length - 1 : -1], (0, 0, 0, len(response) - length)))
    return torch.stack(padded)


def _decoded_fixed(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """Return the logits of the second of two batches decoded in the same buffers, the first one of other tokens."""
    decoding = _Rehearsal(model, captures=False)
    other = replace(sequences, ids=sequences.ids.flip(0))
    _decoded(model, other, decoding.begin(*other.ids.shape))
    return _decoded(model, sequences, decoding.begin(*sequences.ids.shape))


class _Rehearsal(CapturedDecoding):
    """Runs without a graph, and raises RuntimeError if a step could not be captured.

    A failed capture may leave torch's allocator in it for good, so such a step must not be tried on a GPU.
    """

    def _step(self, rows: int) -> Tensor:
        with _NoWaiting():
            return super()._step(rows)


class _NoWaiting(TorchDispatchMode):
    """Raises RuntimeError at an operation that makes the host wait for a GPU: reading a value or moving a tensor.

    On the CPU, where nothing is moved, only the reads are seen, and of these not `tolist`.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if _waits(func, args, options):
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **options)


aten = torch.ops.aten


def _waits(func: Any, args: Any, options: Any) -> bool:
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if func is aten._to_copy.default:
        return bool(torch.device(options.get("device") or args[0].device).type != args[0].device.type)
    if func is aten.copy_.default:
        return bool(args[0].device.type != args[1].device.type)
    reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    # torch.tensor() copies a Python value to the device.
    return func in (aten.equal.default, aten.lift_fresh.default) or not reads.isdisjoint(func.tags)


def _decoded(model: PreTrainedModel, sequences: Sequences, decoding: Decoding) -> Tensor:
    """Return the logits before each response token, [B, T, V], step by step; ended rows leave if possible."""
    width, steps = sequences.prompt_width, sequences.response_width
    lengths = sequences.response_mask.sum(-1)
    live = torch.arange(len(lengths), device=lengths.device)
    # A row that stays is fed on, as in sampling.
    mask = torch.cat([sequences.attention_mask[:, :width], torch.ones_like(sequences.attention_mask[:, width:])], 1)
    positions = position_ids(mask)
    logits_of_steps = mask.new_zeros(len(lengths), steps, LanguageHead.of(model).vocabulary, dtype=torch.float32)
    for t in range(steps):
        new = slice(0, width) if t == 0 else slice(width + t - 1, width + t)
        logits = decoding.logits(sequences.ids[live, new], mask[live, : width + t], positions[live, new]).float()
        logits_of_steps[live, t] = logits
        going = (lengths[live] > t + 1).nonzero().squeeze(-1)
        if decoding.drops_rows and 0 < len(going) < len(live):
            decoding.keep(going)
            live = live[going]
    return logits_of_steps


def _size(values: Tensor) -> float:
    """Return the root of the mean square."""
    return float(values.double().square().mean().sqrt())

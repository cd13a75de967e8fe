"""What an iteration's matrix multiplications alone would take on this machine: every shape timed by itself.

Counted is what PPO needs once: sampling with a KV cache, one scoring pass of policy, reference, reward model and
separate critic, and forward and backward of every optimizer step. The output layer counts for response tokens only.
Everything else (softmax, norms, optimizer, tokenizer, Python) is what the floor leaves out.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .shape import Shape

_BLOCKS = 5
_BLOCK_SECONDS = 4e-3


@dataclass(frozen=True)
class Product:
    """[batch, rows, inner] x [batch, inner, columns], as its operands lie in memory."""

    rows: int
    inner: int
    columns: int
    batch: int = 1
    transposed: Literal["none", "left", "right"] = "none"

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiplication and an addition each."""
        return 2 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Floor:
    """The matrix multiplications of one iteration."""

    seconds: float
    gflop: float


def products(shape: Shape, separate_critic: bool) -> Counter[Product]:
    """Return how often each product is needed in one iteration."""
    length = shape.prompt_tokens + shape.new_tokens
    needed = _sampling(shape)
    scored = _forward(shape, shape.episodes, length)
    learned = _with_gradients(_forward(shape, shape.mini_batch, length))
    needed += _times(scored, 4 if separate_critic else 3)
    needed += _times(_output_layer(shape, shape.episodes * shape.new_tokens), 2)
    needed += _times(learned, shape.optimizer_steps * (2 if separate_critic else 1))
    output = _with_gradients(_output_layer(shape, shape.mini_batch * shape.new_tokens))
    return needed + _times(output, shape.optimizer_steps)


def measure(shape: Shape, separate_critic: bool) -> Floor:
    """Return the floor at the rate this machine reaches right now, in the current number of threads."""
    needed = products(shape, separate_critic)
    seconds = sum(count * _seconds(product) for product, count in needed.items())
    return Floor(seconds, sum(count * product.flops for product, count in needed.items()) / 1e9)


def _sampling(shape: Shape) -> Counter[Product]:
    """The prompt's pass, then one token at a time; attention at the mean length of its cache."""
    decode = Counter(_layer_products(shape, shape.episodes))
    cached = shape.prompt_tokens + shape.new_tokens // 2
    decode += _attention(shape, shape.episodes, queries=1, keys=cached)
    steps = shape.new_tokens - 1
    return (
        _forward(shape, shape.episodes, shape.prompt_tokens)
        + _times(_times(decode, shape.layers), steps)
        + _times(_output_layer(shape, shape.episodes), shape.new_tokens)
    )


def _forward(shape: Shape, rows: int, length: int) -> Counter[Product]:
    layer = Counter(_layer_products(shape, rows * length)) + _attention(shape, rows, length, length)
    return _times(layer, shape.layers)


def _layer_products(shape: Shape, tokens: int) -> list[Product]:
    """Query, key and value at once; attention's output; both of the feed-forward network."""
    width = shape.width
    return [
        Product(tokens, width, 3 * width),
        Product(tokens, width, width),
        Product(tokens, width, 4 * width),
        Product(tokens, 4 * width, width),
    ]


def _attention(shape: Shape, rows: int, queries: int, keys: int) -> Counter[Product]:
    head, batch = shape.width // shape.heads, rows * shape.heads
    return Counter([Product(queries, head, keys, batch, "right"), Product(queries, keys, head, batch)])


def _output_layer(shape: Shape, tokens: int) -> Counter[Product]:
    return Counter([Product(tokens, shape.width, shape.vocabulary, transposed="right")])


def _with_gradients(forward: Counter[Product]) -> Counter[Product]:
    """Add the gradients of both operands of every product: as many operations each as the product itself."""
    needed = Counter(forward)
    for p, count in forward.items():
        needed[Product(p.rows, p.columns, p.inner, p.batch, "right")] += count
        needed[Product(p.inner, p.rows, p.columns, p.batch, "left")] += count
    return needed


def _times(products: Counter[Product], factor: int) -> Counter[Product]:
    return Counter({product: count * factor for product, count in products.items()})


@torch.inference_mode()
def _seconds(product: Product) -> float:
    """Return the median time of the product over a few blocks of repetitions."""
    multiply = _operation(product)
    multiply()
    start = time.perf_counter()
    multiply()
    repeats = max(1, int(_BLOCK_SECONDS / (time.perf_counter() - start)))
    blocks = []
    for _ in range(_BLOCKS):
        start = time.perf_counter()
        for _ in range(repeats):
            multiply()
        blocks.append((time.perf_counter() - start) / repeats)
    return statistics.median(blocks)


def _operation(product: Product) -> Callable[[], Tensor]:
    batch = () if product.batch == 1 else (product.batch,)
    left = torch.randn(*batch, product.rows, product.inner)
    right = torch.randn(*batch, product.inner, product.columns)
    if product.transposed == "left":
        left = left.mT.contiguous().mT
    if product.transposed == "right":
        right = right.mT.contiguous().mT
    out = torch.empty(*batch, product.rows, product.columns)
    return lambda: torch.matmul(left, right, out=out)

"""A wrong shape is refused at the entry points of the mathematics, where it would broadcast silently."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ppo_core.algorithm.advantages import gae, masked_whiten
from ppo_core.algorithm.kl import kl_loss, sampled_kl
from ppo_core.algorithm.ppo_loss import policy_loss, value_loss
from ppo_core.distributed.world import ONE_PROCESS

ENTRIES: dict[str, tuple[Callable[..., object], list[str]]] = {
    "policy_loss": (
        lambda **batch: policy_loss(**batch, cliprange=0.2),
        ["logprobs", "old_logprobs", "advantages", "mask"],
    ),
    "value_loss": (
        lambda **batch: value_loss(**batch, cliprange_value=0.2),
        ["values", "old_values", "returns", "mask"],
    ),
    "gae": (lambda **batch: gae(**batch, gamma=1.0, lam=0.95), ["rewards", "values", "mask"]),
    "masked_whiten": (partial(masked_whiten, world=ONE_PROCESS), ["values", "mask"]),
    "kl_loss": (lambda **batch: kl_loss(**batch, estimator="k1"), ["logprobs", "ref_logprobs", "mask"]),
    "sampled_kl": (lambda **batch: sampled_kl(**batch, estimator="k1"), ["logprobs", "ref_logprobs"]),
}
CASES = [(entry, name) for entry, (_, names) in ENTRIES.items() for name in names]
B = T = 3
"""As many rows as columns: [B] broadcasts along the wrong one."""


def batch(names: list[str]) -> dict[str, Tensor]:
    return {name: torch.ones(B, T) for name in names}


@pytest.mark.parametrize("shape", [(B,), (B, 1), (1, T), ()], ids=str)
@pytest.mark.parametrize(("entry", "name"), CASES)
def test_another_shape_is_refused(entry: str, name: str, shape: tuple[int, ...]) -> None:
    function, names = ENTRIES[entry]
    function(**batch(names))
    with pytest.raises(AssertionError):
        function(**batch(names) | {name: torch.ones(shape)})


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry != "sampled_kl"])
def test_one_number_per_response_is_not_one_per_token(entry: str) -> None:
    function, names = ENTRIES[entry]
    with pytest.raises(AssertionError):
        function(**{name: torch.ones(B) for name in names})

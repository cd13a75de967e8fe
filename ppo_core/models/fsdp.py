"""Weights, gradients and AdamW's moments spread over the processes of a run: FSDP2 (`torch.distributed.fsdp`).

Each process holds a share of every tensor at rest. In passes with gradients a layer's weights are gathered just before
it works and dropped after it (ZeRO-3) or after its backward pass (ZeRO-2), and its gradients are added up into each
process's share. Sampling and scoring gather all weights once (`gathered`): responses end at different steps in
different processes, which then could not gather layer by layer in step.

Source: Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054; Zhao et al. 2023, arXiv 2304.11277; PyTorch's `fully_shard`.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ppo_core.distributed.world import World
from ppo_core.errors import ConfigError
from ppo_core.models.policy import TRUNK, ActorCritic

T = TypeVar("T")


def shard(network: ActorCritic, world: World, reshard_after_forward: bool) -> None:
    """Spread both networks' weights over the processes, layer by layer, or raise ConfigError; value heads stay whole.

    `reshard_after_forward` drops a layer's weights between its forward and backward passes.
    """
    for model in (network.policy, network.critic):
        if model is not None:
            _shard(cast(PreTrainedModel, model), world, reshard_after_forward)
    network.is_sharded = True


def _shard(model: PreTrainedModel, world: World, reshard_after_forward: bool) -> None:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"use_fsdp is not allowed: {type(model).__name__} has no layers that could be sharded")
    # FSDP's outputs are views here, which nothing changes in place.
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    mesh = init_device_mesh(model.device.type, (world.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # The rest belongs to the model itself: embeddings, the last norm and the head, which is applied after it.
    fully_shard(model, mesh=mesh)
    for module in _sharded(model):
        module.reshards = reshard_after_forward and module is not model  # the model itself is used first and last
        module.set_reshard_after_forward(module.reshards, recurse=False)
        module.set_gradient_divide_factor(1.0)  # losses are divided by the tokens of all processes already
        module.set_force_sum_reduction_for_comms(True)
    trunk = model.base_model
    if trunk is not model:
        setattr(model, TRUNK, lambda **inputs: trunk(**inputs))
        register_fsdp_forward_method(model, TRUNK)


@contextmanager
def gathered(network: ActorCritic) -> Iterator[None]:
    """Make all weights whole in every process inside; for passes without gradients."""
    if not network.is_sharded:
        yield
        return
    modules = _sharded(network)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module.reshards, recurse=False)
        drop_gathered(network)


def drop_gathered(network: ActorCritic) -> None:
    """Return every process to its share alone; after an optimizer step gathered weights are out of date."""
    if network.is_sharded:
        for module in _sharded(network):
            module.reshard()


def whole(value: T) -> T:
    """Return a sharded tensor whole, for all processes to call at once; other values are unchanged."""
    return cast(T, value.full_tensor()) if isinstance(value, DTensor) else value


def to_first(value: T) -> T:
    """Return a sharded tensor whole and on the CPU in rank 0, empty elsewhere; other values are unchanged.

    All processes call it at once, one tensor after the other: a GPU then holds no more than one whole.
    """
    if not isinstance(value, DTensor):
        return value
    gathered = value.full_tensor()
    return cast(T, gathered.cpu() if value.device_mesh.get_rank() == 0 else gathered.new_empty(0))


def like(value: T, parameter: Tensor) -> T:
    """Spread a whole tensor of a sharded parameter's shape as that is; other values are unchanged."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return cast(T, distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements))


def clip_grad_norm(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale the gradients down to a norm of at most `most` over all weights, sharded or not, and return their norm."""
    kinds: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in parameters:
        if parameter.grad is not None:
            kinds[isinstance(parameter, DTensor)].append(parameter)
    if not kinds[True]:
        norm: Tensor = nn.utils.clip_grad_norm_(kinds[False], most)
        return norm
    norms = [whole(nn.utils.get_total_norm([cast(Tensor, p.grad) for p in kind])) for kind in kinds if kind]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, most, total)
    return total


def _sharded(network: nn.Module) -> list[Any]:
    return [module for module in network.modules() if isinstance(module, FSDPModule)]

"""bitsandbytes: frozen weights in 4 bits (QLoRA), AdamW's moments in 8.

Dettmers et al. 2023, arXiv 2305.14314 (NF4, double quantisation), and 2022, arXiv 2110.02861 (8-bit optimizers).
bitsandbytes is optional, and imported only when one of them is requested.
"""

import importlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import BitsAndBytesConfig

from ppo_core.errors import ConfigError

INSTALL = 'pip install "ppo-tuner[quantized]"'
LEAST_8BIT = 4096
"""Smallest tensor whose moments are in 8 bits; bitsandbytes keeps others in float32."""
_BLOCK = 256
"""Numbers of an 8-bit moment that share one float32 scale."""


def require_bitsandbytes(setting: str) -> Any:
    """Import and return the module, or raise ConfigError on how to install it; `setting` needs it."""
    try:
        return importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ConfigError(f"{setting} needs bitsandbytes: {INSTALL}") from error


def in_4_bits(device: torch.device, computed: torch.dtype) -> dict[str, Any]:
    """Return the options with which `from_pretrained` loads a model's linear layers in 4 bits on `device`.

    The head, the embeddings and the norms stay whole; products are in the precision `computed`.
    """
    require_bitsandbytes("load_in_4bit = true")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=computed
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def keep_gradients(model: nn.Module) -> None:
    """Prevent a model's 4-bit layers from packing their weights for a CPU with AVX-512 BF16.

    bitsandbytes would do so in the first pass in eval mode without gradients, and give no gradients ever after.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.__dict__["support_avx512bf16_for_cpu"] = False


def scales(module: nn.Module) -> list[object]:
    """Return the scales of a module's 4-bit weights, which are neither parameters nor buffers; empty without any."""
    states = (getattr(each, "quant_state", None) for each in module.modules())
    return [state for state in states if state is not None]


def adamw_8bit(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """Return an AdamW that keeps its moments in 8 bits."""
    optimizer: Optimizer = require_bitsandbytes('optim = "adamw_8bit"').optim.AdamW8bit(groups, **options)
    return optimizer


def moment_bytes(parameter: nn.Parameter, optim: str) -> int:
    """Return the size of AdamW's two moments of a parameter; 8-bit ones have scales."""
    count = parameter.numel()
    if optim != "adamw_8bit":
        return 2 * parameter.nbytes
    return 2 * (count + 4 * -(-count // _BLOCK)) if count >= LEAST_8BIT else 8 * count

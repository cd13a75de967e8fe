"""What is changed in a loaded model's layers: nothing that its weights or its function depend on."""

from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation


def prepare_layers(model: nn.Module) -> None:
    """Turn dropout off for good, and compute the tanh GELU in one kernel."""
    disable_dropout(model)
    fuse_gelu(model)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of a model to 0: it would make the ratio differ from 1 before any update.

    Eval mode alone is not enough, since gradient checkpointing needs its layers in training mode.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def fuse_gelu(model: nn.Module) -> None:
    """Replace GELUs that are written out as six operations (gelu_new, gelu_fast) by torch's kernel of that function."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation | FastGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))

"""Loading with transformers, without its notes and progress bars: what matters is raised, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import PreTrainedModel
from transformers.utils import logging


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence transformers and the hub's progress bars inside; afterwards everything is as it was."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    had_hub_bars = not are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()  # and the hub's
        if had_hub_bars == are_progress_bars_disabled():
            (enable_progress_bars if had_hub_bars else disable_progress_bars)()


def load_pretrained(kind: Any, path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of `path` as one of transformers' Auto classes makes it.

    Raises:
        OSError, ValueError: transformers cannot load it, or it was saved without some weights, which transformers
            draws at random.
    """
    with quiet_loading():
        model, info = kind.from_pretrained(path, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"it was saved without {', '.join(sorted(info['missing_keys'])[:3])}")
    return cast(PreTrainedModel, model)

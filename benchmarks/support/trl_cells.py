"""TRL's PPO trainer on a cell: the same shape, batch and passes; its critic is a network of its own, as it must be."""

import statistics
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ppo_core.models.memory import peak_mib

from .cells import Cell, Measured, Rates, begin_afresh, summary
from .peer import build_trainer
from .sizes import config_of, random_policy, word_tokenizer


class _Enough(Exception):
    """Ends TRL's run from within a callback."""


class _Laps(TrainerCallback):
    """Takes the time at the end of each iteration, and ends the run after some."""

    def __init__(self, laps: int, device: torch.device) -> None:
        self.ends: list[float] = []
        self._laps, self._device = laps, device

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.ends.append(time.perf_counter())
        if len(self.ends) > self._laps:
            raise _Enough


def measure_trl(cell: Cell, device: torch.device, rates: Rates, *, iterations: int) -> Measured:
    """Return TRL's medians over some iterations, after one to warm up; its phases are not timed apart."""
    begin_afresh(device)
    torch.set_float32_matmul_precision("high")  # as ours has it; its attention is torch's choice, as its users have it
    dtype = torch.bfloat16 if device.type == "cuda" and cell.lora else torch.float32
    config = config_of(cell.size)
    policy, reference = random_policy(cell.size, device, dtype), None
    peft = None
    if cell.lora:
        from peft import LoraConfig

        peft = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    else:
        reference = random_policy(cell.size, device, dtype)
    config.num_labels = 1
    with device:
        critic = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    words = torch.randint(2, config.vocab_size, (4 * cell.episodes, cell.prompt_tokens), generator=torch.Generator())
    laps = _Laps(iterations, device)
    with TemporaryDirectory() as folder:
        trainer = build_trainer(
            policy=policy,
            reference=reference,
            reward_model=EvenWords(),
            value_model=critic,
            tokenizer=word_tokenizer(config.vocab_size),
            prompts=[" ".join(f"w{word}" for word in row) for row in words.tolist()],
            callback=laps,
            output=Path(folder),
            batch_size=cell.episodes,
            mini_batches=cell.mini_batches,
            on_gpu=device.type == "cuda",
            peft_config=peft,
            seed=0,
            num_ppo_epochs=cell.epochs,
            total_episodes=cell.episodes * (iterations + 4),
            learning_rate=1e-6,
            response_length=cell.new_tokens,
            temperature=1.0,
            stop_token=None,
        )
        begin = time.perf_counter()
        with suppress(_Enough):
            trainer.train()
    ends = [begin, *laps.ends]
    seconds = statistics.median(later - earlier for earlier, later in list(pairwise(ends))[1:])
    return summary(cell, "TRL", {"iteration": seconds}, peak_mib(device) / 1024, rates)


class EvenWords(nn.Module):
    """A reward model, as TRL calls one, that costs nothing: the score at a token is whether its number is even."""

    base_model_prefix = "backbone"

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def backbone(self, input_ids: Tensor, **inputs: Any) -> SimpleNamespace:
        """Return the ids as hidden states of width 1."""
        return SimpleNamespace(hidden_states=(input_ids.unsqueeze(-1).float(),))

    def score(self, states: Tensor) -> Tensor:
        """Return the scores, [B, T, 1]."""
        return (states % 2 == 0).float()

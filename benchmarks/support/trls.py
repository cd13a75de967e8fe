"""TRL's side of the timing: its training loop, held by a callback at the end of each iteration."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from ppo_core.models.memory import peak_mib

from .models import SavedModels
from .peer import build_trainer
from .shape import Shape
from .turns import Lap, Start, Track

_ENOUGH_LAPS = 100_000


class _Turns(TrainerCallback):
    """Waits for the turn before each iteration, and reports it at its end."""

    def __init__(self, track: Track, shape: Shape) -> None:
        self.track = track
        self.shape = shape
        self.steps = 0
        self.response_tokens = 0
        self.start = Start()

    def count_step(self, *_: object) -> None:
        """Count a step that the optimizer took."""
        self.steps += 1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        seconds, cpu_seconds = self.start.elapsed()
        self.track.report(
            Lap(
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                optimizer_steps=self.steps,
                response_tokens=self.response_tokens,
                peak_mib=peak_mib(torch.device("cpu")),
                threads=torch.get_num_threads(),
            )
        )
        self._begin()

    def _begin(self) -> None:
        self.track.wait()
        self.steps = self.response_tokens = 0
        self.start = Start()


def run(track: Track, saved: SavedModels, shape: Shape, threads: int | None) -> None:
    """Do an iteration a lap, without evaluation, logging or checkpoint."""
    if threads is not None:
        torch.set_num_threads(threads)
    set_seed(0)
    turns = _Turns(track, shape)
    policy = AutoModelForCausalLM.from_pretrained(saved.policy, dtype=torch.float32)
    _count_response_tokens(policy, turns)
    with tempfile.TemporaryDirectory() as output:
        trainer = build_trainer(
            policy=policy,
            reference=AutoModelForCausalLM.from_pretrained(saved.policy, dtype=torch.float32),
            reward_model=_classifier(saved.reward_model),
            value_model=_classifier(saved.reward_model),
            tokenizer=AutoTokenizer.from_pretrained(saved.policy, padding_side="left"),
            prompts=saved.prompts,
            callback=turns,
            output=Path(output),
            batch_size=shape.episodes,
            mini_batches=shape.mini_batches,
            num_ppo_epochs=shape.epochs,
            response_length=shape.new_tokens,
            temperature=shape.temperature,
            total_episodes=shape.episodes * _ENOUGH_LAPS,
        )
        trainer.optimizer.optimizer.register_step_post_hook(turns.count_step)
        trainer.train()


def _classifier(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def _count_response_tokens(policy: Any, turns: _Turns) -> None:
    """Let `turns` see how many tokens each call of the policy's `generate` adds."""
    generate = policy.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        prompt_width = kwargs["input_ids"].shape[1]
        turns.response_tokens += output.sequences[:, prompt_width:].numel()
        return output

    policy.generate = counted

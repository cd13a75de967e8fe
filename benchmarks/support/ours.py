"""Our side of the timing: PPOTrainer's own iterator, one step a lap."""

import torch

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Prompts, RewardPart
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import FrozenPolicy, TaskModels, load_policy
from ppo_core.models.memory import peak_mib
from ppo_core.rewards.combined import load_reward
from ppo_core.trainer import PPOTrainer

from .models import SavedModels
from .shape import TIMED, Shape
from .turns import Lap, Start, Track

_ENOUGH_LAPS = 100_000
"""The run never ends by itself: its last iteration would evaluate."""


def run(track: Track, saved: SavedModels, shape: Shape, threads: int | None, value_model: str) -> None:
    """Do an iteration a lap, without evaluation, logging or checkpoint."""
    if threads is not None:
        torch.set_num_threads(threads)
    reports = iter(PPOTrainer(_config(shape, value_model), _load(saved, shape), world=ONE_PROCESS))
    next(reports)  # the baseline's evaluation
    steps = 0.0
    while True:
        track.wait()
        start = Start()
        metrics = next(reports).metrics
        seconds, cpu_seconds = start.elapsed()
        track.report(
            Lap(
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                optimizer_steps=round(metrics["optimizer_steps"] - steps),
                response_tokens=round(metrics["response/length_mean"] * shape.episodes),
                peak_mib=peak_mib(torch.device("cpu")),
                threads=torch.get_num_threads(),
                phases={
                    name.removeprefix("time/"): value
                    for name, value in metrics.items()
                    if name.startswith("time/") and name != "time/tokens_per_second"
                },
            )
        )
        steps = metrics["optimizer_steps"]


def _config(shape: Shape, value_model: str) -> PPOConfig:
    episodes = shape.episodes * _ENOUGH_LAPS
    return PPOConfig.from_dict(
        {
            "value_model": value_model,
            "value_model_path": "reward_model" if value_model == "separate" else None,  # as TRL's
            "batch_size": shape.episodes,
            "mini_batch_size": shape.mini_batch,
            "num_ppo_epochs": shape.epochs,
            "response_length": shape.new_tokens,
            "temperature": shape.temperature,
            "stop_token": "none",
            "total_episodes": episodes,
            "eval_every_episodes": episodes,
        }
    )


def _load(saved: SavedModels, shape: Shape) -> TaskModels:
    cpu = torch.device("cpu")
    reference, tokenizer = load_policy(str(saved.policy), cpu, FrozenPolicy(), "the benchmark")
    reward = RewardPart("reward", "model", str(saved.reward_model))
    return TaskModels(
        TIMED,
        reference,
        tokenizer,
        load_reward([reward], cpu),
        Prompts.of_texts(saved.prompts, saved.prompts[:2], ()),
        shape.prompt_tokens,
    )

"""One training run of each trainer on the reviews task, judged by the same evaluation on held-out prompts.

Both start from the same policy; the critic of both starts as the reward model; the settings below are TRL's names.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.loading.task_file import get_task
from ppo_core.report import StepReport
from ppo_core.trainer import PPOTrainer, ppo_trainer

from .curves import Curve, Point
from .peer import build_trainer

_NEVER_CLIPS = 1e9
"""TRL's trainer declares max_grad_norm and never applies it."""


@dataclass(frozen=True)
class Settings:
    """What both trainers train with."""

    task: str = "reviews"
    total_episodes: int = 1920
    batch_size: int = 64
    mini_batches: int = 4
    epochs: int = 4
    learning_rate: float = 2e-4
    response_length: int = 24
    temperature: float = 1.0
    kl_coef: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    missing_eos_penalty: float = 1.0
    evaluate_every: int = 192
    """Episodes; a multiple of batch_size."""
    threads: int = 1


def run_ours(settings: Settings, seed: int) -> Curve:
    """Train with our trainer; return its evaluations."""
    torch.set_num_threads(settings.threads)
    reports = ppo_trainer(our_config(settings, seed), settings.task, device="cpu")
    return Curve("ours", seed, tuple(_point(report) for report in reports if report.is_evaluation))


def run_trl(settings: Settings, seed: int) -> Curve:
    """Train with TRL's trainer; return our evaluations of its policy."""
    torch.set_num_threads(settings.threads)
    set_seed(seed)  # TRL shuffles mini-batches with numpy's global generator and does not seed it
    assets = get_task(settings.task).prepare(None)
    assert assets.reward_model is not None
    tokenizer = AutoTokenizer.from_pretrained(assets.policy, padding_side="left")
    policy = _load(AutoModelForCausalLM, assets.policy)
    evaluations = _Evaluations(policy, settings, seed)
    with tempfile.TemporaryDirectory() as output:
        build_trainer(
            policy=policy,
            reference=_load(AutoModelForCausalLM, assets.policy),
            reward_model=LastWordReward(
                _load(AutoModelForSequenceClassification, assets.reward_model), tokenizer.eos_token_id
            ),
            value_model=_load(AutoModelForSequenceClassification, assets.reward_model),
            tokenizer=tokenizer,
            prompts=[prompt.text for prompt in assets.prompts.train],
            callback=evaluations,
            output=Path(output),
            batch_size=settings.batch_size,
            mini_batches=settings.mini_batches,
            seed=seed,
            num_ppo_epochs=settings.epochs,
            total_episodes=settings.total_episodes,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="linear",
            response_length=settings.response_length,
            temperature=settings.temperature,
            stop_token="eos",
            missing_eos_penalty=settings.missing_eos_penalty,
            kl_coef=settings.kl_coef,
            kl_estimator="k1",
            gamma=settings.gamma,
            lam=settings.lam,
            cliprange=settings.cliprange,
            cliprange_value=settings.cliprange_value,
            vf_coef=settings.vf_coef,
        ).train()
    return Curve("TRL", seed, tuple(evaluations.points))


def our_config(settings: Settings, seed: int) -> PPOConfig:
    """Return the settings as our config."""
    return PPOConfig(
        seed=seed,
        value_model="separate",
        value_model_path="reward_model",
        batch_size=settings.batch_size,
        num_mini_batches=settings.mini_batches,
        num_ppo_epochs=settings.epochs,
        total_episodes=settings.total_episodes,
        eval_every_episodes=settings.evaluate_every,
        learning_rate=settings.learning_rate,
        value_learning_rate=settings.learning_rate,  # TRL has one rate for both
        lr_scheduler_type="linear",
        max_grad_norm=_NEVER_CLIPS,
        response_length=settings.response_length,
        temperature=settings.temperature,
        stop_token="eos",
        missing_eos_penalty=settings.missing_eos_penalty,
        kl_coef=settings.kl_coef,
        kl_estimator="k1",
        gamma=settings.gamma,
        lam=settings.lam,
        cliprange=settings.cliprange,
        normalize_values=False,
        cliprange_value=settings.cliprange_value,
        vf_coef=settings.vf_coef,
        log_ratio_clamp=None,
    )


class LastWordReward(nn.Module):
    """A sequence classifier, as TRL calls one, whose score at an end-of-sequence token is that of the token before.

    TRL scores the end-of-sequence token with the rest, which the reviews task's reward model never saw in training;
    ours scores the text.
    """

    base_model_prefix = "backbone"  # how TRL finds what gives the hidden states

    def __init__(self, classifier: PreTrainedModel, eos_id: int) -> None:
        super().__init__()
        self.classifier = classifier
        self.score = classifier.score
        self.eos_id = eos_id

    def backbone(self, input_ids: Tensor, **inputs: Any) -> SimpleNamespace:
        """Return the last hidden states, [B, T, H], as the only ones."""
        hidden = self.classifier.base_model(input_ids=input_ids, **inputs).hidden_states[-1]
        at_end = (input_ids == self.eos_id).unsqueeze(-1)
        return SimpleNamespace(hidden_states=(torch.where(at_end, hidden.roll(1, dims=1), hidden),))


class _Evaluations(TrainerCallback):
    """Judges TRL's policy at our evaluation's episodes, with our evaluation."""

    def __init__(self, policy: PreTrainedModel, settings: Settings, seed: int) -> None:
        self.policy = policy
        self.every = settings.evaluate_every
        self.judge: PPOTrainer = ppo_trainer(our_config(settings, seed), settings.task, device="cpu")
        self.points: list[Point] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._evaluate(0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        episode: int = vars(state)["episode"]  # TRL's own state has it
        if episode % self.every == 0 or state.global_step == state.max_steps:
            self._evaluate(episode)

    def _evaluate(self, episode: int) -> None:
        self.judge.network.policy.load_state_dict(self.policy.state_dict())
        self.points.append(_point(self.judge.evaluated(StepReport(step=0, episode=episode, metrics={}))))


def _load(kind: Any, path: str) -> Any:
    return kind.from_pretrained(path, dtype=torch.float32)


def _point(report: StepReport) -> Point:
    return Point(report.episode, report.metrics["eval/reward"], report.metrics["eval/kl"])

"""`ppo-tuner doctor --train`: PPO on three made-up tasks whose answers are known, with a tiny random policy.

Each of LENGTH tokens is right or wrong, and the score is the share of right ones. A policy that is as likely to say any
of V tokens, and then says the right one with probability p, is away from where it began by

    KL = LENGTH · (p log(p V) + (1 - p) log((1 - p) V / (V - 1)))

so no policy scores more at its KL than that p. A sound trainer comes near it, holds the KL at the target, and has a
critic that predicts what is left to gain.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.task import Prompt, Prompts, Scored, Task, TaskAssets
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels, resolve_device
from ppo_core.report import StepReport
from ppo_core.trainer import PPOTrainer

LENGTH = 4
KL_TARGET = 3.0
"""In nats per response."""
NEAR = 0.6
"""Least share of what there is to gain at its KL that a sound run gains."""
HELD = (0.5, 1.5)
"""Mean training KL of a sound run's last third, as shares of the target."""
EXPLAINED = 0.1
"""Least share of the returns' variance that the critic explains, in the mean of the last third."""
DIGITS = [str(digit) for digit in range(10)]
WORDS = ["<pad>", "<eos>", *DIGITS]
CONFIG = PPOConfig(
    total_episodes=40 * 128, batch_size=128, mini_batch_size=32, eval_every_episodes=40 * 128, learning_rate=1e-3,
    value_learning_rate=3e-3, lr_controller="kl_step", kl_target=KL_TARGET, response_length=LENGTH, num_ppo_epochs=2,
    temperature=1.0, normalize_values=True, value_model="separate",
)  # fmt: skip
Right = Callable[[Sequence[str], int], str]
"""Returns the right token at a place of the digits so far, the prompt's first."""
TASKS: Mapping[str, Right] = {
    "the digit 7": lambda digits, place: "7",
    "the prompt's digit": lambda digits, place: digits[0],
    "one more than the digit before": lambda digits, place: DIGITS[(int(digits[place - 1]) + 1) % 10],
}


class Found(NamedTuple):
    """The outcome of a run."""

    is_sound: bool
    text: str
    """One line."""


def self_check(right: Right) -> Found:
    """Train on a task, and return whether the trainer is sound."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other where there is so little to do
    try:
        reports = list(PPOTrainer(CONFIG, _models(right), world=ONE_PROCESS))
    finally:
        torch.set_num_threads(threads)
    late = reports[-len(reports) // 3 :]
    before, after = reports[0].metrics["eval/reward"], reports[-1].metrics["eval/reward"]
    most = most_at(reports[-1].metrics["eval/kl"])
    kl, explained = _mean(late, "objective/kl_exact"), _mean(late, "val/var_explained")
    problems = {
        "the reward did not rise as it must": not after - before >= NEAR * (most - before) > 0,
        "the KL is not at its target": not HELD[0] <= kl / KL_TARGET <= HELD[1],
        "the critic explains nothing": not explained >= EXPLAINED,
    }
    found = [problem for problem, is_there in problems.items() if is_there]
    text = (
        f"reward {before:.2f} to {after:.2f} (at most {most:.2f} at this KL), KL {kl:.2f} of {KL_TARGET:g} "
        f"nats/response, {explained:.0%} of the returns' variance explained"
    )
    return Found(not found, "; ".join([*found, text]))


def most_at(kl: float) -> float:
    """Return the highest score at a KL, in nats per response, by the formula above."""
    low, high, n = 1 / len(WORDS), 1.0, len(WORDS)
    for _ in range(50):
        p = (low + high) / 2
        wrong = (1 - p) * math.log((1 - p) * n / (n - 1)) if p < 1 else 0.0
        low, high = (low, p) if LENGTH * (p * math.log(p * n) + wrong) > kl else (p, high)
    return low


def _mean(reports: Sequence[StepReport], metric: str) -> float:
    return statistics.fmean(report.metrics[metric] for report in reports)


def _models(right: Right) -> TaskModels:
    """Return a task with a tiny random policy, built in memory."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=len(WORDS), n_positions=8, n_embd=32, n_layer=2, n_head=2,
            pad_token_id=0, bos_token_id=1, eos_token_id=1,
        )  # fmt: skip
        policy = GPT2LMHeadModel(config)
    policy = policy.eval().requires_grad_(False).to(resolve_device("auto"))

    def score(
        prompts: Sequence[Prompt], responses: Sequence[str], tokens: Sequence[Sequence[str]], ended: Sequence[bool]
    ) -> Scored:
        shares = []
        for prompt, response in zip(prompts, responses, strict=True):
            digits = [prompt.text, *response.split()]
            places = range(1, len(digits))
            shares.append(sum(digits[place] == right(digits, place) for place in places) / LENGTH)
        return Scored(shares, {"right": shares})

    def prepare(_: object) -> TaskAssets:
        raise NotImplementedError("its models are in memory")

    task = Task("self-check", "made up", {}, {}, KL_TARGET, 5 * KL_TARGET, 1.0, LENGTH, 1, prepare)
    return TaskModels(task, policy, tokenizer, score, Prompts.of_texts(DIGITS, DIGITS * 12, DIGITS), 1)

"""Small real models, shared by the tests. They are built here and saved to disk, then loaded as a user would."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_core import PPOConfig
from ppo_core.data.task import Prompt, Prompts, Scored, Task, TaskAssets
from ppo_core.distributed.world import ONE_PROCESS
from ppo_core.loading.load import TaskModels
from ppo_core.trainer import PPOTrainer
from tests.ppo_core.conformance import WORDS, small_policy

torch.set_num_threads(1)


def _no_assets(progress: object) -> TaskAssets:
    raise AssertionError("the tests hand the models over")


TINY_TASK = Task(
    name="tiny",
    doc="A random GPT-2; the reward counts the word w3.",
    reference={},
    advised={},
    kl_budget=10.0,
    kl_limit=15.0,
    eval_temperature=1.0,
    eval_response_length=6,
    eval_seed=5,
    prepare=_no_assets,
)


def count_w3(
    prompts: Sequence[Prompt], responses: Sequence[str], tokens: Sequence[Sequence[str]], ended: Sequence[bool]
) -> Scored:
    """A reward that any policy can learn: how often it says w3."""
    counts = [float(response.split().count("w3")) for response in responses]
    return Scored(counts, {"w3": counts})


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small policy and its tokenizer, saved as transformers do."""
    folder = tmp_path_factory.mktemp("tiny")
    model, tokenizer = small_policy()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder: Path) -> TaskModels:
    """The tiny task, loaded anew for each test."""
    return tiny_models(tiny_folder)


def tiny_models(tiny_folder: Path) -> TaskModels:
    """Return the tiny policy as reference, with its tokenizer, prompts of different lengths and a Python reward."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval().requires_grad_(False)
    prompts = [" ".join(WORDS[(i + j) % 20] for j in range(1 + i % 5)) for i in range(40)]
    return TaskModels(
        TINY_TASK,
        model,
        AutoTokenizer.from_pretrained(tiny_folder),
        count_w3,
        Prompts.of_texts(prompts[:24], prompts[24:32], prompts[32:]),
        longest_prompt=5,
    )


def run_to(trainer: PPOTrainer, step: int, folder: Path) -> PPOTrainer:
    """Run a trainer up to a step, save its checkpoint as `folder`, and return it."""
    next(report for report in trainer if report.step == step)
    trainer.save(folder)
    return trainer


def restored(config: PPOConfig, models: TaskModels, folder: Path) -> PPOTrainer:
    """Return a trainer that continues from a checkpoint."""
    trainer = PPOTrainer(config, models, world=ONE_PROCESS)
    trainer.restore(folder)
    return trainer


@pytest.fixture
def models(tiny_folder: Path) -> TaskModels:
    """The tiny policy with a reward that differs between most responses."""
    from tests.ppo_core.families import load_models  # which needs this file

    return load_models(tiny_folder, tiny_folder)

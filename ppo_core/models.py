"""Loading what a task names: the frozen reference, its tokenizer and the reward, by path or hub id."""

import functools
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.errors import ConfigError, TaskError
from ppo_core.report import StepReport, require_device
from ppo_core.rewards.combined import load_reward
from ppo_core.task import Prompts, Reward, Task, get_task


@dataclass
class TaskModels:
    """Everything frozen that the runs of one task share: a worker loads it once for all its trials."""

    task: Task
    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reward: Reward
    prompts: Prompts
    longest_prompt: int
    """In tokens."""
    baseline: dict[int, StepReport] = field(default_factory=dict)
    """The untrained policy's evaluation by thread count: the same for every run of the task."""


def resolve_device(device: str) -> torch.device:
    """Return the device accelerate finds (`auto`), or the CPU (`cpu`).

    Raises:
        ConfigError: another name, or a launch with several processes, which this trainer does not spread over.
    """
    accelerator = Accelerator(cpu=require_device(device, "device") == "cpu")
    if accelerator.num_processes > 1:
        raise ConfigError(f"a run uses one process, not {accelerator.num_processes}; start it without a launcher")
    return torch.device(accelerator.device)


@functools.lru_cache(maxsize=1)
def load_task(name: str, device: str) -> TaskModels:
    """Return the task's models, prepared and loaded; the last one asked for stays in memory."""
    task = get_task(name)
    assets = task.prepare(None)
    where = resolve_device(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(assets.policy)
        reference = AutoModelForCausalLM.from_pretrained(assets.policy, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise TaskError(f'task "{name}": cannot load the policy {assets.policy}: {error}') from error
    nn.Module.to(reference, where)
    reference.eval().requires_grad_(False)
    prompts = assets.prompts
    texts = [prompt.text for prompt in (*prompts.train, *prompts.eval, *prompts.test)]
    longest = max(len(ids) for ids in tokenizer(texts)["input_ids"])
    return TaskModels(task, reference, tokenizer, load_reward(assets.rewards, where), prompts, longest)

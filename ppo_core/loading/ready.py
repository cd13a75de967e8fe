"""Checks, while a task is prepared, of what would fail in a run's first minutes: a response that does not fit behind
the longest prompt, a reward that asks for what is no column or that does not return numbers. No weights are loaded.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.prompts import prompt_lengths, tokenised
from ppo_core.data.task import OnProgress, Prompt, Prompts, Task, TaskAssets
from ppo_core.errors import ConfigError, RewardError, RewardOutage, TaskError
from ppo_core.models.networks import base_of, quiet_loading
from ppo_core.output import pluralize
from ppo_core.rewards.batch import Batch, column_names
from ppo_core.rewards.function import FunctionReward

TRIED = 3
"""Prompts that a reward is tried with."""


def require_ready(
    configs: Sequence[PPOConfig], task: Task, assets: TaskAssets, *, tries_rewards: bool = False
) -> Iterator[str]:
    """Check the runs of these configs on a prepared task; yield notes for the user.

    With `tries_rewards` each Python function is called once, with a few prompts as their own responses.

    Raises:
        ConfigError: a response does not fit into the policy's context.
        TaskError: one of an evaluation does not, or a reward asks for what is no column, or returns no numbers.
    """
    prompts = (*assets.prompts.train, *assets.prompts.eval, *assets.prompts.test)
    functions = [FunctionReward(part, column_names(prompts)) for part in assets.rewards if part.kind == "function"]
    if (loaded := _shape_and_tokenizer(assets)) is None:
        return
    shape, tokenizer = loaded
    lengths = named_lengths(assets.prompts, tokenizer, task.name)
    longest = max((length for _, length in lengths), default=0)
    for config in configs:
        require_room(config, task, shape, longest, lengths)
    for function in functions if tries_rewards else ():
        if (note := _try(function, assets.prompts.train[:TRIED], tokenizer)) is not None:
            yield note


def fitting_length(wanted: int, task: Task, assets: TaskAssets, progress: OnProgress) -> int:
    """Return the wanted response length, or what fits behind the longest prompt if that is less, at least 1."""
    if (loaded := _shape_and_tokenizer(assets)) is None:
        return wanted
    shape, tokenizer = loaded
    room, why = room_behind(shape, longest_prompt(assets.prompts, tokenizer, task.name))
    if wanted <= max(1, room):
        return wanted
    progress(f"response_length = {max(1, room):.0f}: {why}", 1.0)
    return int(max(1, room))


def _shape_and_tokenizer(assets: TaskAssets) -> tuple[PretrainedConfig, PreTrainedTokenizerBase] | None:
    """Return the policy's config and tokenizer, or None if they cannot be read: loading the policy says why."""
    try:
        with quiet_loading():
            return AutoConfig.from_pretrained(base_of(assets.policy)), AutoTokenizer.from_pretrained(assets.policy)
    except Exception:  # libraries raise errors of many classes about missing or damaged files
        return None


def named_lengths(prompts: Prompts, tokenizer: PreTrainedTokenizerBase, task: str) -> list[tuple[str, int]]:
    """Return each prompt's name and length in tokens, or raise TaskError for an empty prompt."""
    named = []
    for split in ("train", "eval", "test"):
        part = getattr(prompts, split)
        for i, (prompt, length) in enumerate(zip(part, prompt_lengths(part, tokenizer), strict=True)):
            if length == 0:
                raise TaskError(f'task "{task}": prompts.{split}[{i}] is empty; a prompt needs at least one token')
            named.append((prompt.where or f"prompts.{split}[{i}]", length))
    return named


def longest_prompt(prompts: Prompts, tokenizer: PreTrainedTokenizerBase, task: str) -> int:
    """Return the longest prompt's length in tokens, or raise TaskError for an empty prompt."""
    return max((length for _, length in named_lengths(prompts, tokenizer, task)), default=0)


def require_room(
    config: PPOConfig, task: Task, shape: PretrainedConfig, longest: int, lengths: Sequence[tuple[str, int]] = ()
) -> None:
    """Raise ConfigError or TaskError if a response would not fit behind the longest prompt, of so many tokens.

    `lengths` are those of the prompts by name, to say which are too long.
    """
    room, why = room_behind(shape, longest)
    if config.response_length > room:
        which = _too_long(lengths, int(room) + longest - config.response_length)
        raise ConfigError(f"response_length = {config.response_length} is not allowed: {why}{which}")
    if task.eval_response_length > room:
        which = _too_long(lengths, int(room) + longest - task.eval_response_length)
        raise TaskError(
            f'task "{task.name}": its evaluation\'s response_length = {task.eval_response_length} is not allowed: {why}'
            f"{which}"
        )


def _too_long(lengths: Sequence[tuple[str, int]], most: int) -> str:
    """Return, in words, which prompts have more tokens than fit before the response, and what leaves them out."""
    longer = [name for name, length in lengths if length > most]
    if not longer:
        return ""
    which = f"; too long for it: {len(longer)} of {pluralize(len(lengths), 'prompt')}, {longer[0]} first"
    return which if len(longer) == len(lengths) else f"{which}; prompts.max_prompt_tokens = {most} leaves such out"


def room_behind(shape: PretrainedConfig, longest: int) -> tuple[float, str]:
    """Return the most tokens of a response behind a prompt of so many, and why; infinity if unbounded."""
    config = shape.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    ropes = getattr(config, "rope_parameters", None) or {}  # one config, or one per kind of layer
    limits = [
        rope["original_max_position_embeddings"]
        for rope in (ropes, *ropes.values())
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope"
    ]
    most, why = min(limits, default=math.inf), f"the policy has {positions} positions"
    if most < positions:
        # Keys in the cache keep the rotation that they were computed with: sampler and trainer would differ.
        why = f"the policy's longrope rotates all of its {positions} positions otherwise beyond {most}"
    room = min(most, positions) - longest
    allowed = f"so at most {room:.0f}" if room > 0 else "which leaves no room"
    return room, f"{why} and the longest prompt takes {longest}, {allowed}"


def _try(reward: FunctionReward, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Call a reward with prompts as their responses; return a note if it raises; TaskError if it gives no numbers."""
    texts = [prompt.text if prompt.messages is None else prompt.messages[-1]["content"] for prompt in prompts]
    ids = [tokenised([text], tokenizer, special_tokens=False)[0] for text in texts]
    tokens = [[str(tokenizer.decode([token])) for token in row] for row in ids]
    try:
        reward(Batch(prompts, texts, tokens, [True] * len(texts)))
    except RewardError as error:
        if error.__cause__ is None and not isinstance(error, RewardOutage):
            raise TaskError(f"{error}; tried with prompts as their own responses") from error
        return f"tried with prompts as their own responses, {error}"
    return None

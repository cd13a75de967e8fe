"""Load a task's frozen reference, tokenizer and reward, by path or hub id."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, cast

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.data.prompts import encode
from ppo_core.data.task import Prompts, Reward, Scored, Task
from ppo_core.distributed.world import init_process_group, require_own_gpu
from ppo_core.errors import TaskError, one_line
from ppo_core.loading.digest import digests
from ppo_core.loading.ready import longest_prompt
from ppo_core.loading.task_file import AnyTask, get_task
from ppo_core.models import quantized
from ppo_core.models.casts import cast_products
from ppo_core.models.networks import computes_in_bf16, follow_text, load_pretrained, prepare_layers, quiet_loading
from ppo_core.models.policy import LanguageHead, response_states
from ppo_core.models.sequences import Sequences, TokenTexts
from ppo_core.report import StepReport, require_device
from ppo_core.rewards.batch import Batch
from ppo_core.rewards.combined import load_reward
from ppo_core.rewards.model import RewardModel
from ppo_core.sampling.cache_check import decide_decoding, unit_of
from ppo_core.sampling.generation import Rollouts

logger = logging.getLogger(__name__)


@dataclass
class TaskModels:
    """Frozen models that the runs of one task share: a worker loads them once for all its trials."""

    task: Task
    reference: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reward: Reward
    prompts: Prompts
    longest_prompt: int
    """In tokens."""
    baseline: dict[tuple[object, ...], StepReport] = field(default_factory=dict)
    """The SFT policy's evaluation, by the settings that affect it."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """See `ppo_core.loading.digest`."""

    def __post_init__(self) -> None:
        self.token_texts = TokenTexts(self.tokenizer)

    def score(self, rollouts: Rollouts) -> Scored:
        """Return the reward's scores of the responses.

        Raises:
            RewardError: a part of the reward cannot score.
            OutOfMemory: a reward model's batch does not fit.
        """
        texts = self.token_texts(rollouts.sequences)
        return self.reward(rollouts.prompts, rollouts.responses, texts, rollouts.ended.tolist())

    @property
    def reward_model(self) -> PreTrainedModel | None:
        """The task's first reward model, if any: a critic may begin as its copy."""
        find: Callable[[], PreTrainedModel | None] = getattr(self.reward, "reward_model", lambda: None)
        return find()


def resolve_device(device: str) -> torch.device:
    """Return the device that accelerate finds (`auto`), prepared; the CPU for `cpu`, or if that device lacks float64.

    Raises ConfigError for another name, or a launch of more processes than there are GPUs.
    """
    on_cpu = require_device(device, "device") == "cpu"
    init_process_group()  # accelerate would start a group without gloo
    if not on_cpu:
        require_own_gpu()
    accelerator = torch.device(Accelerator(cpu=on_cpu).device)
    if accelerator.type == "cuda":
        accelerator = torch.device("cuda", torch.cuda.current_device())  # torch reads a GPU's share only by its index
    prepare_device(accelerator)
    if _has_float64(accelerator):
        return accelerator
    logger.warning("running on the CPU: the sampler needs float64, which the device %s does not have", accelerator)
    return torch.device("cpu")


def prepare_device(device: torch.device) -> None:
    """Set this process's matrix multiplication and attention modes for a GPU; nothing elsewhere."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 in what is left of float32 products: reward models
        # cuDNN plans attention anew for every shape, and here nearly every pass has a width of its own.
        torch.backends.cuda.enable_cudnn_sdp(False)


def _has_float64(device: torch.device) -> bool:
    if device.type in ("cpu", "cuda"):
        return True
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # Apple's MPS raises the first, Intel GPUs without float64 the second
        return False
    return True


Weights = Literal["float32", "bf16", "bf16_products"]


@dataclass(frozen=True)
class FrozenPolicy:
    """Precision and kernels of a task's frozen policy."""

    weights: Weights = "float32"
    """`bf16_products`: the weights of linear layers alone are in bfloat16, as autocast reads those of a policy that is
    trained whole, so that policy and reference begin with the same numbers."""
    attention: str | None = None
    """Transformers' name for it."""
    in_4bit: bool = False
    """True if the linear layers except the head are in 4 bits, to train adapters on."""

    @classmethod
    def of(cls, config: PPOConfig, device: str) -> "FrozenPolicy":
        """Return the settings for a run on `device` (see `resolve_device`)."""
        weights: Weights = "float32"
        if computes_in_bf16(config, resolve_device(device)):
            weights = "bf16" if config.use_peft else "bf16_products"
        return cls(weights, config.attn_implementation, config.load_in_4bit)


_latest: list[tuple[tuple[Task, str, FrozenPolicy], TaskModels]] = []
"""The task loaded last, with what was asked for."""


def load_task(task: AnyTask, device: str, held: FrozenPolicy = FrozenPolicy()) -> TaskModels:
    """Return the task's models, prepared and loaded; the latest stay in memory, until its declaration changes.

    Raises:
        ConfigError: 4-bit weights are asked for without bitsandbytes.
        TaskError: the task cannot be prepared or loaded, or a prompt has no tokens.
    """
    asked = get_task(task), device, held
    if not _latest or _latest[0][0] != asked:
        _latest.clear()  # two tasks may not fit
        _latest.append((asked, _load(*asked)))
    return _latest[0][1]


def _load(task: Task, device: str, held: FrozenPolicy) -> TaskModels:
    name = task.name
    with quiet_loading():
        assets = task.prepare(None)
    where = resolve_device(device)
    reference, tokenizer = load_policy(assets.policy, where, held, f'task "{name}"')
    prompts = assets.prompts
    longest = longest_prompt(prompts, tokenizer, name)
    every = (*prompts.train, *prompts.eval, *prompts.test)
    ends = [] if tokenizer.eos_token_id is None else [[int(tokenizer.eos_token_id)]]
    read = chain(ends, (encode(prompt, tokenizer) for prompt in every))  # a response has the model's own tokens
    _require_known_tokens(reference, tokenizer, read, f'task "{name}": the policy {assets.policy}')
    with quiet_loading():
        reward = load_reward(assets.rewards, where, every)
    for _, scorer in reward.parts:
        if isinstance(scorer, RewardModel):
            unanswered = (Batch([prompt], [""], [[]], [True]) for prompt in every)
            texts = chain.from_iterable(map(scorer.encode, unanswered))
            _require_known_tokens(scorer.model, scorer.tokenizer, texts, scorer.who, also_later=True)
    return TaskModels(task, reference, tokenizer, reward, prompts, longest, digests=digests(task, assets))


def _require_known_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    read: Iterable[Sequence[int]],
    who: str,
    *,
    also_later: bool = False,
) -> None:
    """Raise TaskError if one of the ids that are `read` has no embedding.

    Tokens may have been added to the tokenizer, for a chat template, without resizing the model. With `also_later` the
    model itself refuses them from now on: a response may spell one.
    """
    embeddings = cast(nn.Embedding, model.get_input_embeddings())
    size = embeddings.num_embeddings
    if max(tokenizer.get_vocab().values(), default=0) < size:
        return

    def require(ids: Sequence[int]) -> None:
        if (largest := max(ids, default=0)) >= size:
            raise TaskError(
                f"{who} has {size} embeddings, and its tokenizer writes {tokenizer.convert_ids_to_tokens(largest)!r} "
                f"as token {largest}; resize the model (resize_token_embeddings) and save it, or remove the token"
            )

    for ids in read:
        require(ids)
    if also_later:
        embeddings.register_forward_pre_hook(lambda _, args: require(args[0].flatten().tolist()))


def load_policy(
    path: str, device: torch.device, held: FrozenPolicy, of: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a frozen causal LM and its tokenizer, or raise TaskError; `of` names the owner in it.

    Raises:
        TaskError: it cannot be loaded, or its architecture makes logits or decodes in a way that training cannot use.
        ConfigError: 4-bit weights are asked for without bitsandbytes.
    """
    dtype = torch.bfloat16 if held.weights == "bf16" else torch.float32
    options = quantized.in_4_bits(device, dtype) if held.in_4bit else {}
    try:
        with quiet_loading():
            tokenizer = AutoTokenizer.from_pretrained(path)
        model = load_pretrained(AutoModelForCausalLM, path, dtype, held.attention, **options)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TaskError(f"{of}: cannot load the policy {path}: {reason}") from error
    freeze_policy(model, device, held, f"{of}: the policy {path}")
    return model, tokenizer


def freeze_policy(model: PreTrainedModel, device: torch.device, held: FrozenPolicy, which: str) -> None:
    """Make a causal LM the frozen policy of a run's task on a device; `which` names it in errors.

    Raises TaskError if its architecture makes logits or decodes in a way that training cannot use.
    """
    nn.Module.to(model, device)
    model.eval().requires_grad_(False)
    prepare_layers(model)
    with _as_it_computes(held, device):
        follow_text(model)
        _require_known_head(model, which)
        decide_decoding(model, which)
    if held.weights == "bf16_products":
        cast_products(model)


@contextmanager
def _as_it_computes(held: FrozenPolicy, device: torch.device) -> Iterator[None]:
    """Compute in bfloat16 if passes do; else in float32 throughout, since TF32 differs with the number of rows."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=held.weights == "bf16_products"):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@torch.no_grad()
def _require_known_head(model: PreTrainedModel, which: str) -> None:
    """Raise TaskError if the model is more than head and trunk, which training reads apart."""
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    probe = Sequences(ids, torch.ones_like(ids), prompt_width=1)
    name = f"{which} ({type(model).__name__})"
    try:
        whole = model(input_ids=ids, attention_mask=probe.attention_mask, use_cache=False).logits[0, :-1].float()
        separate = LanguageHead.of(model)(response_states(model, probe)[0], 1.0, None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an architecture of another build fails in its own way
        raise TaskError(f"{name} cannot be used: its head and trunk cannot be separated: {one_line(error)}") from error
    if not bool(whole.isfinite().all()):
        raise TaskError(f"{name} cannot be used: its logits are not finite")
    # The model may round after every operation on its logits (scale, divide, tanh, multiply), we compute in float32.
    tolerance = max(3 * unit_of(model), 1e-4)
    if not float((whole - separate).abs().max()) <= tolerance * float(whole.abs().max()):  # NaN is refused as well
        raise TaskError(f"{name} changes its logits after the head in a way not known here")

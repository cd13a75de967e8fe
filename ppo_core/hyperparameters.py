"""Every PPO hyperparameter, declared once.

One `Hyper` declaration per field of `PPOConfig` feeds validation, the command line, the search
space, the dashboard's labels and the docs. `valid` is mathematics and can never be left; `search`
is advice for a 1B to 7B model, which a task or a study may replace. This module never imports torch.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from ppo_core import batch_sizes
from ppo_core.batch_sizes import BatchSizes
from ppo_core.declaration import Bounds, Hyper, Hyperparameter, HyperValue, Range, read_declarations, with_help
from ppo_core.errors import ConfigError, nearest

POSITIVE = Bounds(0, low_open=True)
COUNT = Bounds(1)
SHARE = Bounds(0, 1)
RATE = Bounds(0, 1)
TRL = "TRL 1.12 PPOConfig"
PPO_PAPER = "Schulman et al. 2017, arXiv 1707.06347"
ZIEGLER = "Ziegler et al. 2019, arXiv 1909.08593"


@with_help
@dataclass(frozen=True)
class PPOConfig:
    """One PPO run's hyperparameters, under TRL's names where TRL has the field.

    A plain dataclass, not a child of `transformers.TrainingArguments`, whose hundred fields mostly
    do nothing in an online RL loop. Where to find what users look for there:

    | TrainingArguments              | here                                                         |
    |--------------------------------|--------------------------------------------------------------|
    | num_train_epochs, max_steps    | `total_episodes` (passes over one rollout: `num_ppo_epochs`)  |
    | per_device_train_batch_size    | the same: rows of one forward and backward pass              |
    | gradient_accumulation_steps    | the same, or derived from `batch_size`; see `batch_sizes`     |
    | warmup_steps                   | `warmup_ratio`                                               |
    | optim                          | AdamW always; `adam_epsilon` and `weight_decay` as there     |
    | eval_strategy, eval_steps      | `eval_every_episodes`                                        |
    | save_steps, save_total_limit   | the driver saves between steps: `PPOTrainer.save`            |
    | output_dir, report_to, logging | not hyperparameters: arguments of the commands               |
    | no_cuda, use_cpu, local_rank   | accelerate finds the device                                  |

    Raises:
        ConfigError: a value of the wrong type or out of its valid range, or a rule across fields
            that is broken. The message names the field, the value and what is allowed.
    """

    total_episodes: Annotated[
        int,
        Hyper(
            label="Total episodes",
            doc="Length of the run: one episode is one prompt and its response. Rounded up to whole rollout batches.",
            source=TRL,
            unit="episodes",
            valid=COUNT,
        ),
    ] = 100_000
    learning_rate: Annotated[
        float,
        Hyper(
            label="Policy learning rate",
            doc="Peak AdamW learning rate of the policy. Too high and the KL blows up; too low and nothing is learned.",
            source=f"{TRL}; search range from published 1B to 7B recipes",
            valid=RATE,
            search=Range(1e-6, 5e-5, "log"),
        ),
    ] = 3e-6
    value_learning_rate: Annotated[
        float,
        Hyper(
            label="Value learning rate",
            doc="Peak AdamW learning rate of the critic. With a shared trunk it reaches only the value head.",
            source="OpenRLHF and verl give the critic a rate of its own",
            valid=RATE,
            search=Range(1e-5, 1e-4, "log"),
        ),
    ] = 1e-5
    lr_scheduler_type: Annotated[
        Literal["linear", "cosine", "constant"],
        Hyper(
            label="Schedule",
            doc="How both learning rates go from their peak towards 0 (constant: they stay) after the warm-up.",
            source=f"{TRL} (linear)",
        ),
    ] = "linear"
    warmup_ratio: Annotated[
        float,
        Hyper(
            label="Warm-up",
            doc="Share of the iterations over which both learning rates rise to their peak.",
            source="transformers 4 TrainingArguments",
            unit="share of the run",
            valid=Bounds(0, 1, high_open=True),
        ),
    ] = 0.0
    max_grad_norm: Annotated[
        float,
        Hyper(
            label="Gradient clip",
            doc="Largest gradient norm of an optimizer step, applied to the policy and to the critic each on its own.",
            source=f"{TRL} (declared there, never applied)",
            valid=POSITIVE,
        ),
    ] = 1.0
    adam_epsilon: Annotated[
        float,
        Hyper(
            label="Adam epsilon",
            doc="Term added to AdamW's denominator.",
            source="Huang et al. 2024, arXiv 2403.17031: 1e-5 was used for TL;DR, frameworks default to 1e-8",
            valid=POSITIVE,
        ),
    ] = 1e-8
    weight_decay: Annotated[
        float,
        Hyper(
            label="Weight decay",
            doc="AdamW's decoupled weight decay, for both networks.",
            source="transformers TrainingArguments",
            valid=Bounds(0),
        ),
    ] = 0.0
    batch_size: Annotated[
        int | None,
        Hyper(
            label="Rollout batch",
            doc="Episodes collected in one iteration, over all processes. Unset: per_device_train_batch_size x "
            "gradient_accumulation_steps x processes where both are set, else 64.",
            source="TRL's derived batch_size",
            unit="episodes",
            valid=COUNT,
            search=Range(64, 1024, "log2"),
        ),
    ] = None
    mini_batch_size: Annotated[
        int | None,
        Hyper(
            label="Mini-batch",
            doc="Episodes of one optimizer step, over all processes; divides batch_size. Unset: batch_size / "
            "num_mini_batches where that is set, else the whole batch_size (as TRL).",
            source="TRL's derived mini_batch_size",
            unit="episodes",
            valid=COUNT,
            search=Range(4, 64, "log2"),
        ),
    ] = None
    per_device_train_batch_size: Annotated[
        int | None,
        Hyper(
            label="Micro-batch per device",
            doc="Episodes of one forward and backward pass on one device: what fits in memory, never a change of "
            "the experiment. Unset: the device's whole share of a mini-batch.",
            source=TRL,
            unit="episodes",
            valid=COUNT,
        ),
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None,
        Hyper(
            label="Accumulation steps",
            doc="Forward and backward passes per device in one rollout batch (TRL's meaning); another way to state "
            "batch_size.",
            source=TRL,
            valid=COUNT,
        ),
    ] = None
    num_mini_batches: Annotated[
        int | None,
        Hyper(
            label="Mini-batches",
            doc="Optimizer steps in one PPO epoch; another way to state mini_batch_size.",
            source=TRL,
            valid=COUNT,
        ),
    ] = None
    num_ppo_epochs: Annotated[
        int,
        Hyper(
            label="PPO epochs",
            doc="Passes over one rollout batch. More squeeze more out of it, and drift further from what sampled it.",
            source=TRL,
            unit="epochs",
            valid=COUNT,
            search=Range(2, 10),
        ),
    ] = 4
    cliprange: Annotated[
        float,
        Hyper(
            label="Clip range ε",
            doc="The probability ratio earns nothing outside [1-ε, 1+ε].",
            source=f"{PPO_PAPER}, eq. 7; {TRL}",
            valid=Bounds(0, 1, low_open=True, high_open=True),
            search=Range(0.1, 0.3),
        ),
    ] = 0.2
    cliprange_value: Annotated[
        float,
        Hyper(
            label="Value clip range",
            doc="A new value prediction further than this from the old one earns nothing.",
            source=f"{TRL}; OpenAI baselines",
            valid=POSITIVE,
        ),
    ] = 0.2
    vf_coef: Annotated[
        float,
        Hyper(
            label="Value loss weight c1",
            doc="Weight of the value loss. With a separate critic AdamW cancels it, so it does nothing there.",
            source=f"{PPO_PAPER}, eq. 9 (c1); {TRL}",
            valid=Bounds(0),
            search=Range(0.5, 1.0),
        ),
    ] = 0.1
    entropy_coef: Annotated[
        float,
        Hyper(
            label="Entropy bonus c2",
            doc="Weight of the policy's entropy in the objective.",
            source=f"{PPO_PAPER}, eq. 9 (c2)",
            valid=Bounds(0),
        ),
    ] = 0.0
    gamma: Annotated[
        float,
        Hyper(
            label="Discount γ",
            doc="Discount per token. 1 for episodic text.",
            source=TRL,
            valid=SHARE,
        ),
    ] = 1.0
    lam: Annotated[
        float,
        Hyper(
            label="GAE λ",
            doc="Trade of variance (1: Monte Carlo) against bias (0: one-step TD) in the advantages.",
            source=f"Schulman et al. 2016, arXiv 1506.02438, eq. 16; {TRL}",
            valid=SHARE,
            search=Range(0.9, 1.0),
        ),
    ] = 0.95
    kl_coef: Annotated[
        float,
        Hyper(
            label="KL coefficient β",
            doc="Price of one nat of KL in reward. The starting point where kl_target makes β adaptive.",
            source=TRL,
            unit="reward per nat",
            valid=Bounds(0),
            search=Range(0.01, 0.2, "log"),
        ),
    ] = 0.05
    kl_target: Annotated[
        float | None,
        Hyper(
            label="KL target",
            doc="Set: β adapts so that the exact KL of a response goes to this. Unset: β is fixed.",
            source=f"{ZIEGLER}, section 2.2 (6 nats for 24 tokens)",
            unit="nats per response",
            valid=POSITIVE,
            search=Range(3, 12, "log"),
        ),
    ] = None
    kl_horizon: Annotated[
        int | None,
        Hyper(
            label="KL horizon",
            doc="Episodes over which adaptive β can change by about e^0.2 fold. Unset: a tenth of total_episodes "
            "(the classic 10,000 does nothing in a short trial).",
            source=f"{ZIEGLER}, section 2.2",
            unit="episodes",
            valid=COUNT,
        ),
    ] = None
    kl_estimator: Annotated[
        Literal["k1", "k3"],
        Hyper(
            label="KL estimator",
            doc="Per-token estimate that prices the reward: k1 = log-ratio; k3 = exp(-log-ratio) - 1 + log-ratio.",
            source=f"{TRL}; J. Schulman, Approximating KL Divergence, 2020",
        ),
    ] = "k1"
    missing_eos_penalty: Annotated[
        float | None,
        Hyper(
            label="Missing-EOS penalty",
            doc="Taken off the score of a response that does not end by itself within response_length.",
            source=TRL,
            unit="reward",
            valid=Bounds(0),
        ),
    ] = None
    whiten_rewards: Annotated[
        bool,
        Hyper(
            label="Whiten rewards",
            doc="Scale the per-token rewards of a rollout batch to unit variance (the mean stays) before GAE.",
            source=TRL,
        ),
    ] = False
    response_length: Annotated[
        int,
        Hyper(
            label="Response length",
            doc="Most new tokens of a response.",
            source=TRL,
            unit="tokens",
            valid=COUNT,
        ),
    ] = 53
    temperature: Annotated[
        float,
        Hyper(
            label="Temperature",
            doc="Divides the logits, in sampling and in training alike.",
            source=TRL,
            valid=POSITIVE,
        ),
    ] = 0.7
    value_model: Annotated[
        Literal["shared", "separate"],
        Hyper(
            label="Critic",
            doc="shared: a value head on the policy's own trunk. separate: a network of its own, begun as its copy.",
            source="trlx (shared); TRL, OpenRLHF and verl (separate)",
        ),
    ] = "shared"
    eval_every_episodes: Annotated[
        int | None,
        Hyper(
            label="Evaluate every",
            doc="Episodes between evaluations on held-out prompts (also before the first and after the last update). "
            "Unset: a quarter of total_episodes.",
            source="PPO Tuner",
            unit="episodes",
            valid=COUNT,
        ),
    ] = None
    local_rollout_forward_batch_size: Annotated[
        int,
        Hyper(
            label="Forward rows",
            doc="Most rows of one pass without gradients per device (generation, scoring, evaluation). Memory only.",
            source=TRL,
            unit="episodes",
            valid=COUNT,
        ),
    ] = 256
    seed: Annotated[
        int,
        Hyper(
            label="Seed",
            doc="Decides every random draw of the run, whatever the chunking or the number of processes.",
            source=TRL,
            valid=Bounds(0, 2**32 - 1),
        ),
    ] = 0

    def __post_init__(self) -> None:
        for name, declaration in HYPERPARAMETERS.items():
            object.__setattr__(self, name, declaration.coerce(getattr(self, name)))
        if None in (self.gradient_accumulation_steps, self.per_device_train_batch_size):
            # With both, the batch depends on the number of processes.
            self.batch_sizes(world_size=1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config") -> "PPOConfig":
        """Return the config of `values` over the defaults; an unknown key is an error naming the nearest."""
        for name in values:
            require_name(name, where)
        return cls(**values)

    def to_dict(self) -> dict[str, HyperValue]:
        """Return every field by name."""
        return dataclasses.asdict(self)

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Return the whole batch hierarchy for `world_size` processes.

        Raises:
            ConfigError: something does not divide; the message names the nearest sizes that do.
        """
        return batch_sizes.resolve(
            world_size,
            batch_size=self.batch_size,
            mini_batch_size=self.mini_batch_size,
            num_mini_batches=self.num_mini_batches,
            per_device=self.per_device_train_batch_size,
            accumulation=self.gradient_accumulation_steps,
        )

    def num_iterations(self, world_size: int = 1) -> int:
        """Return how many rollout batches the run has: total_episodes / batch_size, rounded up."""
        return math.ceil(self.total_episodes / self.batch_sizes(world_size).batch_size)

    @property
    def eval_interval(self) -> int:
        """Episodes between evaluations, with the default filled in."""
        return self.eval_every_episodes or max(1, self.total_episodes // 4)

    @property
    def horizon(self) -> int:
        """Episodes of the adaptive controller's horizon, with the default filled in."""
        return self.kl_horizon or max(1, self.total_episodes // 10)


HYPERPARAMETERS: Mapping[str, Hyperparameter] = MappingProxyType(read_declarations(PPOConfig))
"""Every hyperparameter by name, in the order of `PPOConfig`."""


def require_name(name: str, where: str) -> Hyperparameter:
    """Return the hyperparameter `name`, or raise ConfigError with the nearest valid one."""
    if name not in HYPERPARAMETERS:
        raise ConfigError(f'{where}: unknown hyperparameter "{name}"{nearest(name, HYPERPARAMETERS)}')
    return HYPERPARAMETERS[name]


def inert(name: str, fixed: Mapping[str, HyperValue]) -> str | None:
    """Return why searching `name` would do nothing beside the `fixed` values, or None where it does something."""
    critic = fixed.get("value_model", HYPERPARAMETERS["value_model"].default)
    if name == "vf_coef" and critic == "separate":
        return "with a separate critic AdamW cancels the weight of its loss; search value_learning_rate instead"
    if name == "kl_horizon" and fixed.get("kl_target", None) is None:
        return "the horizon belongs to an adaptive β; set kl_target"
    if name in ("local_rollout_forward_batch_size", "per_device_train_batch_size"):
        return "it decides memory, not the experiment"
    return None


def cautions(config: PPOConfig) -> list[str]:
    """Return what is allowed but will hardly do what it says, one line each."""
    lines = []
    if config.kl_target is not None and config.horizon > config.total_episodes:
        lines.append(
            f"kl_horizon = {config.horizon} is longer than the run ({config.total_episodes} episodes), so β can move "
            f"by at most {20 * config.total_episodes / config.horizon:.2g}% towards kl_target"
        )
    sizes = config.batch_sizes(world_size=1) if config.gradient_accumulation_steps is None else None
    if sizes is not None and config.num_ppo_epochs == 1 and sizes.num_mini_batches == 1:
        lines.append("with one PPO epoch and one mini-batch the ratio is always 1, so cliprange does nothing")
    return lines

"""The work of the timed PPO iteration. No torch: the process that only hands out turns stays small."""

from dataclasses import dataclass

from ppo_core.data.task import OnProgress, Task, TaskAssets


def _no_assets(progress: OnProgress | None) -> TaskAssets:
    raise AssertionError("the models are handed over")


TIMED = Task(
    name="timing",
    doc="Random models; nothing to learn.",
    reference={},
    advised={},
    kl_budget=10.0,
    kl_limit=15.0,
    eval_temperature=1.0,
    eval_response_length=1,
    eval_seed=0,
    prepare=_no_assets,
)
"""What timings train."""


@dataclass(frozen=True)
class Shape:
    """One PPO iteration: a GPT-2 shape, a rollout batch of equally long episodes, and the passes over it."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    vocabulary: int = 1024
    episodes: int = 64
    prompt_tokens: int = 8
    new_tokens: int = 32
    epochs: int = 4
    mini_batches: int = 4
    temperature: float = 0.7

    @property
    def mini_batch(self) -> int:
        """Episodes of one optimizer step."""
        return self.episodes // self.mini_batches

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of one iteration."""
        return self.epochs * self.mini_batches

    def __str__(self) -> str:
        return (
            f"GPT-2 of {self.layers} layers x {self.width}, vocabulary {self.vocabulary}; {self.episodes} episodes of "
            f"{self.prompt_tokens} + {self.new_tokens} tokens; {self.epochs} epochs x {self.mini_batches} mini-batches"
        )

"""TRL's PPOTrainer, made comparable: no logging, no samples, no checkpoints; float32 on the CPU, bfloat16 on a GPU.

With gradient_accumulation_steps = 1, per_device_train_batch_size is the whole rollout batch and each mini-batch is one
forward and backward pass with an optimizer step of its own; with more, TRL 1.12 steps only once an epoch.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def build_trainer(
    *,
    policy: Any,
    reference: Any,
    reward_model: Any,
    value_model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    callback: TrainerCallback,
    output: Path,
    batch_size: int,
    mini_batches: int,
    on_gpu: bool = False,
    peft_config: Any = None,
    **settings: Any,
) -> Any:
    """Return a PPOTrainer of TRL; `settings` are fields of its PPOConfig."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    config = PPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=1,
        num_mini_batches=mini_batches,
        local_rollout_forward_batch_size=batch_size,
        num_sample_generations=0,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=Dataset.from_dict({"input_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts]}),
        callbacks=[callback],
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer

"""A policy of real size, trained as a user would: from a task file, with chats and a reward model of another tokenizer.

    python benchmarks/real_size.py                    # a Qwen2 shape of 0.5B with LoRA: three iterations
    python benchmarks/real_size.py --size tiny        # the same with a tiny one

The weights are random: what is shown is that it runs, how long each phase takes, and how much memory, beside what
`ppo-tuner estimate` says of it. Models are saved once, in runs/benchmarks/real_size. The process that trains does
nothing else, so its peak memory is the run's.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from support.cells import PHASES
from support.real_task import save_task
from support.sizes import SIZES

FOLDER = Path("runs", "benchmarks", "real_size")


def train(arguments: argparse.Namespace) -> None:
    """Train in this process, and print its iterations as one line of JSON."""
    from ppo_core.config.hyperparameters import PPOConfig
    from ppo_core.data.task_file import get_task
    from ppo_core.models.estimate import Estimator
    from ppo_core.models.fits import predicted
    from ppo_core.models.memory import room
    from ppo_core.trainer import ppo_trainer

    episodes = arguments.episodes * arguments.iterations
    config = PPOConfig.from_dict(
        {
            "total_episodes": episodes,
            "eval_every_episodes": episodes,
            "batch_size": arguments.episodes,
            "mini_batch_size": max(1, arguments.episodes // 2),
            "per_device_train_batch_size": arguments.micro_batch,
            "num_ppo_epochs": 1,
            "response_length": arguments.tokens,
            "stop_token": "none",
            "temperature": 1.0,
            "use_peft": not arguments.full,
            "lora_target_modules": None if arguments.full else "all-linear",
            "bf16": arguments.bf16,
            "gradient_checkpointing": arguments.gradient_checkpointing,
        }
    )
    task = get_task(str(arguments.train))
    place = room(torch.device("cpu"))
    estimate = Estimator(task, task.prepare(None), place)(config)
    began = time.monotonic()
    trainer = ppo_trainer(config, str(arguments.train), device="cpu")
    loaded = time.monotonic() - began
    trainer.state.step = 0  # no baseline: it would be an evaluation
    laps: list[dict[str, Any]] = []
    reports = iter(trainer)
    for _ in range(arguments.iterations):
        metrics = next(reports).metrics
        laps.append({name: metrics[f"time/{name}"] for name in PHASES} | {"peak": metrics["memory/peak"]})
        laps[-1] |= {"mismatch": metrics["sampler/mismatch"], "kl": metrics["objective/kl_exact"]}
    mib = {"before": place.process / 2**20, "estimate": predicted(estimate, place) / 2**20}
    print(json.dumps({"loaded": loaded, "laps": laps, "largest": estimate.largest, **mib}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="qwen2-0.5b")
    parser.add_argument("--episodes", type=int, default=8, help="of a rollout batch (8)")
    parser.add_argument("--prompt-tokens", type=int, default=24, help="of a prompt, without its template (24)")
    parser.add_argument("--tokens", type=int, default=16, help="of a response (16)")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows of one forward and backward pass (2)")
    parser.add_argument("--iterations", type=int, default=3, help="how many (3)")
    parser.add_argument("--full", action="store_true", help="train all weights, not adapters")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="keep no activations of layers")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments)
        return 0
    task = save_task(FOLDER, arguments.size, arguments.tokens, arguments.prompt_tokens)
    command = [sys.executable, __file__, *sys.argv[1:], "--train", str(task)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        return ended.returncode
    found = json.loads(ended.stdout.splitlines()[-1])
    print(f"{arguments.size}, {'full' if arguments.full else 'LoRA'}: {arguments.episodes} episodes of about "
          f"{arguments.prompt_tokens} + {arguments.tokens} tokens; loaded in {found['loaded']:.1f} s")  # fmt: skip
    print(
        f"{'iteration':10}" + "".join(f"{phase + ' s':>12}" for phase in PHASES) + f"{'peak GiB':>12}{'mismatch':>12}"
    )
    for number, lap in enumerate(found["laps"], 1):
        seconds = "".join(f"{lap[phase]:12.1f}" for phase in PHASES)
        print(f"{number:<10}{seconds}{lap['peak'] / 1024:12.2f}{lap['mismatch']:12.1e}")
    peak = max(lap["peak"] for lap in found["laps"])
    print(
        f"Predicted before anything was loaded: {found['estimate'] / 1024:.2f} GiB, in {found['largest']}; that is "
        f"{found['estimate'] / peak - 1:+.1%} of the measured {peak / 1024:.2f} GiB. The process held "
        f"{found['before'] / 1024:.2f} GiB by then."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A folder as a user of `python -m ppo_core` has one: a policy, a reward in Python, prompts; and how it is run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
KILL_AT = "COMMAND_TEST_KILL_AT"
"""The call of the reward at which it kills its process, as a power failure would."""
EXHAUST_AT = "COMMAND_TEST_EXHAUST_AT"
"""The call of the reward behind which its process runs out of memory, in the middle of the step."""
KILL_RANK = "COMMAND_TEST_KILL_RANK"
"""Which process of a launch these are of; unset: all of them."""

REWARD = f'''
import os, signal

calls = 0

def count(prompts, responses):
    """How often a response says w3."""
    global calls
    calls += 1
    rank = os.environ.get("RANK", "0")
    if calls == int(os.environ.get("{KILL_AT}", 0)) and rank == os.environ.get("{KILL_RANK}", rank):
        os.kill(os.getpid(), signal.SIGKILL)
    if calls == int(os.environ.get("{EXHAUST_AT}", 0)) and rank == os.environ.get("{KILL_RANK}", rank):
        import ppo_core.trainer
        ppo_core.trainer.learn = out_of_memory
    return [float(response.split().count("w3")) for response in responses]

def out_of_memory(*arguments):
    import torch
    raise torch.OutOfMemoryError("CUDA out of memory.")

def length(prompts, responses):
    return [0.01 * len(response) for response in responses]
'''

PARTS = ("--policy", "policy", "--reward", "rewards.py:count", "--prompts", "prompts.jsonl", "--device", "cpu")
SMALL = ("--total_episodes", "48", "--batch_size", "8", "--response_length", "6", "--learning_rate", "3e-3",
         "--eval_every_episodes", "16", "--num_ppo_epochs", "2")  # fmt: skip
"""Six iterations, four evaluations."""


def fill(folder: Path, policy: Path) -> None:
    """Write the reward and the prompts, and put the policy beside them."""
    (folder / "policy").symlink_to(policy)
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": " ".join(f"w{(i + j) % 20}" for j in range(1 + i // 20))} for i in range(80)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def process(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ppo_core` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}
    command = [sys.executable, "-m", "ppo_core", *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded steps of a run without what time and memory decide."""
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/")) and k != "eps"} for line in lines]

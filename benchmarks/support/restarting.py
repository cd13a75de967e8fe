"""What it costs to start, pause and resume a trial beside training: the constants of the replay.

One process, one thread, the task's reference configuration; CPU-seconds, medians over the rounds. The task's models are
loaded before, as a worker has them from its second trial on.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ppo_core.report import StepReport
from ppo_core.trainer import PPOTrainer, ppo_trainer
from tuner.study.spec import StudySpec

STEPS = 4
"""Of a trial that is measured, after step 0: the first is compared with the median of the others."""


def measure(spec: StudySpec, rounds: int) -> dict[str, float]:
    """Return what a start, a pause and a resume cost."""
    torch.set_num_threads(1)
    config = spec.config({})
    config = replace(config, eval_every_episodes=config.total_episodes)  # no evaluation but step 0's among the steps
    found: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(rounds + 1):
            where = Path(folder, str(round_))
            begin = time.process_time()
            trainer = ppo_trainer(config, spec.task, device="cpu")
            build = time.process_time() - begin
            first = _first_step(trainer)
            begin = time.process_time()
            trainer.save(where)
            pause = time.process_time() - begin
            begin = time.process_time()
            trainer = ppo_trainer(config, spec.task, device="cpu", resume_from=where)
            restore = time.process_time() - begin
            found.append((build + first, pause, restore + _first_step(trainer)))
    # The first round loads the models and warms up.
    medians = map(statistics.median, zip(*found[1:], strict=True))
    return dict(zip(("start", "pause", "resume"), medians, strict=True))


def _first_step(trainer: PPOTrainer) -> float:
    """Return what the first step takes more than the others, in CPU-seconds; step 0 is not one of them."""
    seconds = []
    steps: Iterator[StepReport] = iter(trainer)
    if trainer.step < 0:
        next(steps)
    for _ in range(STEPS):
        begin = time.process_time()
        next(steps)
        seconds.append(time.process_time() - begin)
    return max(0.0, seconds[0] - statistics.median(seconds[1:]))

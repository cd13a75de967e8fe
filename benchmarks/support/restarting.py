"""What it costs to start, pause and resume a trial beside training: the constants of the replay.

One process, one thread, the task's reference configuration; CPU-seconds, medians over the rounds. The task's models are
loaded before, as a worker has them from its second trial on.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tuner.strategies import make_scheduler

from ppo_core.report import StepReport
from ppo_core.trainer import PPOTrainer, ppo_trainer
from tuner.scoring import TrialList
from tuner.spec import StudySpec
from tuner.status import PausedBy, Status
from tuner.store import NewTrial, TrialRow

from .replaying import Costs, begun

STEPS = 4
"""Of a trial that is measured, after step 0: the first is compared with the median of the others."""
TRIALS = 100
"""Of the study whose scheduler is asked."""


def measure(spec: StudySpec, rounds: int) -> Costs:
    """Return the medians over so many rounds."""
    torch.set_num_threads(1)
    config = spec.config({})
    config = replace(config, eval_every_episodes=config.total_episodes)  # no evaluation but step 0's among the steps
    choice = _choice(spec)
    found: list[Costs] = []
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
            found.append(Costs(build + first, pause, restore + _first_step(trainer), choice))
    # The first round loads the models and warms up.
    names = ("start", "pause", "resume", "choice")
    return Costs(**{name: statistics.median(getattr(one, name) for one in found[1:]) for name in names})


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


def _choice(spec: StudySpec) -> float:
    """Return what the scheduler takes for a proposal late in a study: the median of ten."""
    spec = replace(spec, trials=None, budget=float(TRIALS))
    scheduler, trials, chance = make_scheduler(spec, 1), TrialList([]), random.Random(0)
    seconds: list[float] = []
    while len(trials) < TRIALS:
        begin = time.process_time()
        chosen = scheduler.next(trials, ())
        seconds.append(time.process_time() - begin)
        assert chosen is not None
        if isinstance(chosen, NewTrial):
            trials.put(_resting(chosen, chance.random()))
        else:
            seconds.pop()
            trials.put(replace(trials[chosen], status=Status.COMPLETED, paused_by=None, value=1.0, kl=1.0))
    return statistics.median(seconds[-10:])


def _resting(new: NewTrial, score: float) -> TrialRow:
    row = replace(begun(new.number, dict(new.config), dict(new.params)), origin=new.origin, status=Status.PAUSED)
    return replace(row, paused_by=PausedBy.STRATEGY, rung_scores=(score,), value=score, kl=1.0, violation=0.0)

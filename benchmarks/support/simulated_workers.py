"""An engine of workers that are simulated in the controller's own process: trials that take no time. No torch.

Each trial is a generator that says what a worker would say, with the real guard and the real watch over its reports,
and writes real, small checkpoints. A report comes as soon as the last one is answered, so what a trial takes is what
the controller takes for it.
"""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from ppo_core import checkpoint
from ppo_core.checkpoint import EPISODE, EVALUATION
from ppo_core.declare import HyperValue
from ppo_core.hyperparameters import PPOConfig
from ppo_core.report import StepReport
from tuner.budget_watch import WatchState, watch
from tuner.engine.base import EngineNeeds, JobId
from tuner.guard import GuardState, observe
from tuner.protocol import Answer, Ended, Job, Left, Message, Prepared, PrepareTask, Stepped, TrialSpec

from .null_trainer import Scripted

T = TypeVar("T")


class SimulatedEngine:
    """So many trials at a time; see `tuner.engine.base.Engine`."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._trials: dict[int, Generator[Message, Answer | None, None]] = {}
        self._said: deque[tuple[JobId, Message]] = deque()
        self._is_woken = False
        self.seconds = 0.0
        """Wall time that the simulation itself took so far."""
        self.cpu_seconds = 0.0
        """Processor time of it."""

    @classmethod
    def of(cls, needs: EngineNeeds) -> "SimulatedEngine":
        """Return the engine that a run asks for."""
        return cls(needs.workers)

    @property
    def free(self) -> int:
        """How many more trials could start now."""
        return self._workers - len(self._trials)

    @property
    def retired(self) -> Sequence[str]:
        """None: no process is involved."""
        return ()

    @property
    def is_exhausted(self) -> bool:
        """Never."""
        return False

    def start(self, job: Job) -> None:
        """Begin a trial; the task is ready at once."""
        if isinstance(job, PrepareTask):
            self._said.append((None, Prepared()))
        elif isinstance(job, TrialSpec):
            trial = self._trials[job.number] = _trial(job)
            self._hear(job.number, lambda: next(trial))
        else:
            raise NotImplementedError("the simulated task has no test prompts")

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        """Yield what was said by now; of a worker that says nothing more its place is free."""
        if not self._said and not self._is_woken:
            time.sleep(min(timeout, 0.01))
        self._is_woken = False
        for _ in range(len(self._said)):
            yield self._said.popleft()

    def answer(self, number: int, answer: Answer) -> None:
        """Answer a trial's last report: it says the next one."""
        trial = self._trials[number]
        self._hear(number, lambda: trial.send(answer))

    def _hear(self, number: int, speak: Callable[[], Message]) -> None:
        message = self._timed(speak)
        if isinstance(message, Ended | Left):
            del self._trials[number]
        self._said.append((number, message))

    def _timed(self, work: Callable[[], T]) -> T:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return work()
        finally:
            self.seconds += time.perf_counter() - wall
            self.cpu_seconds += time.thread_time() - cpu

    def resize(self, workers: int) -> None:
        """Have so many trials at a time."""
        self._workers = workers

    def wake(self) -> None:
        """Have `events` return at once."""
        self._is_woken = True

    def close(self) -> None:
        """End all trials."""
        self._trials.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _trial(spec: TrialSpec) -> Generator[Message, Answer | None, None]:
    """Say what a worker says of a trial (see `tuner.engine.trial.run_trial`), each time with the answer to the last."""
    trainer = SimulatedTrainer(spec.config, spec.number, spec.resume_from)
    total_episodes = PPOConfig.from_dict(spec.config).whole_episodes()
    guard, watched = GuardState(), WatchState()
    for report in trainer:
        guard, reason = observe(spec.guard, guard, report, total_episodes)
        watched, is_near = watch(watched, report, spec.kl_budget)
        answer = yield Stepped(report, 1.0, 1.0, reason, is_near_budget=is_near)
        if answer is Answer.EVALUATE:
            report = trainer.evaluated(report)
            answer = yield Stepped(report, 1.0, 1.0, reason, is_again=True)
        if answer is Answer.STOP:
            break
        if answer in (Answer.SAVE, Answer.LEAVE):
            trainer.save(spec.folder, report)
        if answer is Answer.LEAVE:
            yield Left()
            return
    yield Ended()


class SimulatedTrainer(Scripted):
    """Reward and KL curves that follow from the configuration: KL falls in β, and reward grows with its root."""

    evaluate_every = 4
    errors: ClassVar[Mapping[str, float]] = {"eval/reward_se": 0.03, "eval/kl_se": 0.1}

    def __init__(self, config: Mapping[str, HyperValue], number: int, resume_from: Path | None) -> None:
        super().__init__(resume_from)
        chance = random.Random(number)
        rate, beta = (float(str(config[name])) for name in ("learning_rate", "kl_coef"))
        off = math.log10(rate) + 4
        self._kl = 8 * (rate / 1e-4) ** 0.3 * (0.05 / beta) ** 0.8 * math.exp(chance.gauss(0, 0.1))
        gain = 1 - 0.4 * off * off - (float(str(config["lam"])) - 0.95) ** 2 + chance.gauss(0, 0.05)
        self._slope = gain / math.sqrt(10)

    def metrics(self, share: float) -> dict[str, float]:
        """Return a step's metrics."""
        return {
            "objective/kl_exact": self._kl * share,
            "objective/scores": self._slope * math.sqrt(self._kl * share),
            "policy/entropy_avg": 2.0,
            "loss/policy_avg": -0.01,
            "loss/value_avg": 0.5,
            "val/var_explained": share,
        }

    def save(self, folder: Path, report: StepReport) -> None:
        """Write a checkpoint of a few bytes, as a worker's keeper does."""
        evaluation = {name: report.metrics.get(f"eval/{name}") for name in ("reward", "kl", "kl_se")}
        extra: dict[str, Any] = {EPISODE: report.episode}
        checkpoint.write(
            checkpoint.step_folder(folder, report.step),
            {"state.json": lambda path: path.write_text(str(report.step))},
            state={"step": report.step},
            extra=extra if evaluation["kl"] is None else extra | {EVALUATION: evaluation},
        )

"""A store with made-up but realistic PPO curves, for tests of the dashboard and for looking at it.

Two studies: `STUDY` has a number of trials, which are evaluated regularly; `BOUNDED` has a budget, and its trials are
evaluated where their KL is about to cross the KL budget, too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ppo_core.config.declare import HyperValue
from ppo_core.report import Sample, StepReport, TokenReadings
from tuner.judge.guard import GuardState, WatchState, check_step, watch
from tuner.judge.scoring import judged
from tuner.store import Lease, NewTrial, Outcome, Store, TrialRow
from tuner.store.trials import write_pause
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Reason, Status

STUDY = "reviews"
TOTAL_EPISODES = 1920
BASELINE = 0.42

SPEC = StudySpec.from_dict(
    {
        "name": STUDY,
        "task": "reviews",
        "trials": 14,
        "seed": 7,
        "fixed": {"total_episodes": TOTAL_EPISODES, "response_length": 24},
        "search": {
            "learning_rate": {"low": 1e-5, "high": 3e-3, "scale": "log"},
            "batch_size": {"low": 64, "high": 128, "scale": "log2"},
            "num_ppo_epochs": {"low": 2, "high": 8},
            "cliprange": {"low": 0.1, "high": 0.3},
            "kl_coef": {"low": 0.01, "high": 0.3, "scale": "log"},
            "kl_target": {"low": 3, "high": 12, "scale": "log"},
        },
        "kl": {"budget": 10.0, "limit": 15.0},
    },
    "the fake study",
)

BOUNDED = "reviews-bounded"
BOUNDED_SPEC = StudySpec.from_dict(
    {**{key: value for key, value in SPEC.to_dict().items() if key != "trials"}, "name": BOUNDED, "budget": 14},
    "the fake study with a budget",
)
STEP_SECONDS, EVALUATION_SECONDS = 0.8, 0.5

HOSTILE = (
    "<script>alert(1)</script>![x](http://127.0.0.1:9/x.png) **bold** $x^2$ \u202etxt.exe\u202c \x1b[31mred\x00 end"
)
"""Markup, Markdown, a right-to-left override and control characters: all of it must be shown literally."""
STORED = HOSTILE.replace("\0", "\N{REPLACEMENT CHARACTER}")
"""The same as a store holds it."""
PROMPTS = (
    "the film was",
    "we waited an hour and the food",
    "<b>the new phone</b> has a screen that",
    "after two weeks the battery",
)
ENDINGS = ("plain and a bit slow .", "good , really good .", "great and lovely and warm .", "great great great great")


@dataclass(frozen=True)
class Course:
    """One trial: its searched values, how it goes and how it ends."""

    learning_rate: float
    beta: float
    level: float
    """KL that it settles at, in nats per response."""
    status: Status = Status.COMPLETED
    adaptive: bool = False
    epochs: int = 4
    cliprange: float = 0.2
    batch: int = 64
    blow_up: int | None = None
    """Step from which its KL grows by a fifth a step."""
    ends_at: int | None = None
    """Step at which it fails, or to which it has come so far."""
    nan_at: int | None = None
    """Step at which its KL and score are not numbers."""

    @property
    def params(self) -> dict[str, HyperValue]:
        """The searched values as the sampler would propose them."""
        price = {"kl_target": self.beta} if self.adaptive else {"kl_coef": self.beta}
        return {
            "learning_rate": self.learning_rate,
            "batch_size": self.batch,
            "num_ppo_epochs": self.epochs,
            "cliprange": self.cliprange,
            **price,
        }

    def kl(self, step: int) -> float:
        """Return the exact KL of a step without its noise, in nats per response."""
        steps = TOTAL_EPISODES / self.batch
        healthy = self.level * (1 - math.exp(-3.2 * step / steps))
        return healthy if self.blow_up is None else healthy * 1.2 ** max(0, step - self.blow_up)


COURSES = (
    Course(1e-4, 0.05, 4.1),
    Course(2.4e-5, 0.1, 0.6, epochs=2, cliprange=0.12),
    Course(1.9e-3, 0.011, 13.0, Status.PRUNED, epochs=6, blow_up=7),
    Course(1.6e-4, 0.032, 6.2, batch=128),
    Course(3.1e-4, 6.1, 6.4, adaptive=True, epochs=3),
    Course(2.2e-4, 0.024, 8.0, cliprange=0.17),
    Course(7.5e-4, 0.019, 9.5, Status.PRUNED, epochs=8, cliprange=0.28, blow_up=17),
    Course(2.8e-4, 0.045, 9.4, epochs=5),
    Course(4.4e-4, 0.08, 5.0, Status.FAILED, batch=128, ends_at=6),
    Course(3.6e-4, 0.012, 12.4, cliprange=0.23),
    Course(2.7e-3, 0.05, 11.5, Status.PRUNED, epochs=7, nan_at=14),
    Course(3.3e-4, 9.1, 9.0, adaptive=True, batch=128),
    Course(2.6e-4, 0.038, 7.1, epochs=4, cliprange=0.19),
    Course(3.0e-4, 5.2, 5.3, Status.RUNNING, adaptive=True, ends_at=17),
)


BOUNDED_COURSES = (
    Course(1e-4, 0.05, 4.1),
    Course(2.4e-5, 0.1, 0.6, epochs=2, cliprange=0.12),
    Course(2.9e-3, 0.011, 400.0, Status.PRUNED, epochs=8),
    Course(1.6e-4, 0.032, 6.2, batch=128),
    Course(3.1e-4, 6.1, 6.4, adaptive=True, epochs=3),
    Course(3.6e-4, 0.012, 13.6, cliprange=0.23),
    Course(7.5e-4, 0.019, 8.0, epochs=8, cliprange=0.28),
    Course(2.8e-4, 0.045, 9.4, epochs=5),
    Course(4.4e-4, 0.08, 5.0, Status.FAILED, batch=128, ends_at=1),
    Course(2.1e-4, 0.024, 7.0, cliprange=0.17),
    Course(9.5e-4, 0.015, 18.0, Status.PRUNED, epochs=7),
    Course(3.3e-4, 9.1, 8.8, adaptive=True, batch=128),
    Course(2.6e-4, 0.038, 7.1, epochs=4, cliprange=0.19),
    Course(1.2e-4, 0.06, 4.6, Status.PAUSED, ends_at=2),
    Course(5.1e-4, 0.03, 11.0, Status.RUNNING, epochs=5, ends_at=17),
)
"""Of `BOUNDED`: trial 5 ends over the KL budget, 10 is pruned for its KL, 13 a person paused, 14 runs."""
BOUNDED_DONE = tuple(course for course in BOUNDED_COURSES if course.status in (Status.COMPLETED, Status.PRUNED))
"""Without the trials that failed or have not ended: with these the study is finished."""


def build(path: Path, *, courses: tuple[Course, ...] = COURSES, held: bool = False, name: str = STUDY) -> Store:
    """Write a study into the store at `path`; `held`: this process goes on holding its lease."""
    store = Store.open(f"sqlite:///{path}", create=True)
    store.create_study(name, {**SPEC.to_dict(), "name": name})
    lease = store.acquire(name)
    for number, course in enumerate(courses):
        _run(store, lease, number, course)
    finished = all(course.status.is_final for course in courses)
    if courses and finished:
        store.set_finished(lease)
    if not held:
        store.release(lease)
    return store


def build_bounded(
    path: Path, *, courses: tuple[Course, ...] = BOUNDED_COURSES, held: bool = False, name: str = BOUNDED
) -> Store:
    """Write a study with a budget into the store at `path`, as the controller would have recorded it."""
    store = Store.open(f"sqlite:///{path}", create=True)
    store.create_study(name, {**BOUNDED_SPEC.to_dict(), "name": name})
    lease = store.acquire(name)
    for number, course in enumerate(courses):
        _bounded_run(store, lease, number, course)
    if all(course.status.is_final for course in courses):
        store.set_finished(lease)
    if not held:
        store.release(lease)
    return store


def add_live_step(store: Store) -> bool:
    """Go one step on with every running trial, as the controller of this process; False: nothing runs."""
    study = store.study(STUDY)
    lease = Lease(study.id, 1)
    running = [trial for trial in store.trials(study) if trial.status is Status.RUNNING]
    for trial in running:
        course = replace(COURSES[trial.number], ends_at=None, status=Status.COMPLETED)
        for report in reports(trial.number, course):
            if report.episode > trial.episodes:
                store.add_step(lease, trial.id, report, 0.8)
                if report.episode >= TOTAL_EPISODES:
                    store.finish_trial(lease, trial.id, _outcome(store, trial, course, None))
                break
    return bool(running)


def watched_reports(number: int, course: Course) -> Iterator[StepReport]:
    """Yield a trial's steps as `BOUNDED` has them: evaluated where the KL is about to cross its budget, too.

    Each evaluation says how long it took.
    """
    state = WatchState()
    for report in reports(number, course):
        state, is_due = watch(state, report, BOUNDED_SPEC.kl_budget, BOUNDED_SPEC.config({}).eval_interval)
        metrics, samples = dict(report.metrics), report.samples
        if is_due and not report.is_evaluation:
            kl = metrics["objective/kl_exact"]
            reward = metrics["objective/scores"] - 0.02
            metrics |= {"eval/reward": reward, "eval/reward_se": 0.035, "eval/kl": kl, "eval/kl_se": 0.02 * kl}
            samples = _samples(number, kl, reward)
        if "eval/reward" in metrics:
            metrics["time/evaluate"] = EVALUATION_SECONDS
        yield replace(report, metrics=metrics, samples=samples)


def _bounded_run(store: Store, lease: Lease, number: int, course: Course) -> None:
    trial, guarded, reason = _begun(store, lease, number, course), GuardState(), None
    for report in watched_reports(number, course):
        store.add_step(lease, trial.id, report, STEP_SECONDS + (EVALUATION_SECONDS * report.is_evaluation))
        guarded, reason = check_step(BOUNDED_SPEC.guard, guarded, report, TOTAL_EPISODES, BOUNDED_SPEC.kl_budget)
        if reason is not None:
            break
    if course.status is Status.FAILED:
        reason = Reason("out_of_memory", "=cmd() CUDA out of memory: 9.1 GiB asked for, 3.2 GiB free")
    found = judged(store, trial, BOUNDED_SPEC, course.status, reason)
    if course.status is Status.PAUSED:
        store._write(lease, lambda connection: write_pause(connection, trial.id, found))
    elif course.status.is_final:
        store.finish_trial(lease, trial.id, found)


def reports(number: int, course: Course) -> Iterator[StepReport]:
    """Yield a trial's steps, the SFT policy's evaluation first."""
    noise = np.random.default_rng(number)
    last = TOTAL_EPISODES // course.batch if course.ends_at is None else course.ends_at
    every = TOTAL_EPISODES // course.batch // 5
    for step in range(last + 1):
        kl = course.kl(step) * (1 + 0.06 * noise.standard_normal())
        score = BASELINE + 2.1 * (1 - math.exp(-0.32 * math.sqrt(kl))) - 0.03 * max(0.0, kl - 14)
        metrics = {
            "objective/kl_exact": kl,
            "objective/kl": kl * (1 + 0.08 * noise.standard_normal()),
            "objective/scores": score + 0.07 * noise.standard_normal(),
            "policy/clipfrac_avg": 0.03 + 0.01 * kl,
            "policy/entropy_avg": max(0.2, 3.1 - 0.11 * kl),
            "response/length_mean": 17 + 3 * noise.random(),
        }
        if step == course.nan_at:
            metrics |= {"objective/kl_exact": math.nan, "objective/scores": math.nan}
        samples: tuple[Sample, ...] = ()
        if step % every == 0 or step == last or kl > SPEC.kl_limit:
            metrics |= {"eval/reward": score, "eval/reward_se": 0.035, "eval/kl": kl, "eval/kl_se": 0.02 * kl}
            samples = _samples(number, kl, score)
        yield StepReport(step, step * course.batch, metrics, samples)


def _samples(number: int, kl: float, score: float) -> tuple[Sample, ...]:
    told = ENDINGS[min(3, int(kl // 5))]
    rows = []
    for index, prompt in enumerate(PROMPTS):
        response = f"{told} trial {number} says so ." if kl > 0 else "okay ."
        if number == 2 and index == 0 and kl > 0:
            response = HOSTILE
        if number == 6 and index == 1 and kl > 0:
            response = "great " * 900
        reward, its_kl = round(score + 0.1 * index - 0.15, 3), round(kl * (0.9 + 0.05 * index), 3)
        parts = {"liked": reward + 0.1, "<b>brief</b>": -0.1} if number == 2 else {"liked": reward}
        words = response.split()
        rows.append(Sample(index, prompt, response, reward, its_kl, len(words), parts, _tokens(number, words, its_kl)))
    return tuple(rows)


def _tokens(number: int, words: list[str], kl: float) -> TokenReadings | None:
    """Return made-up readings; trial 3 has none, trial 4 no critic. A response's last token moved most."""
    if number == 3:
        return None
    places = range(len(words))
    moved = tuple(2 * kl * (i + 1) / (len(words) * (len(words) + 1)) for i in places)
    signs = tuple(-value if i % 2 else value for i, value in enumerate(moved))
    critic = ((), ()) if number == 4 else (tuple(0.1 * sign for sign in signs), tuple(0.5 for _ in places))
    return TokenReadings(tuple(words), tuple(-1.5 for _ in places), signs, moved, *critic)


def _begun(store: Store, lease: Lease, number: int, course: Course) -> TrialRow:
    config = {"total_episodes": TOTAL_EPISODES, "response_length": 24, "seed": 7, **course.params}
    origin = Origin.SAMPLED if number else Origin.REFERENCE
    trial = store.add_trial(lease, NewTrial(number, origin, config, course.params, threads=1))
    return store.begin_attempt(lease, trial, None)


def _run(store: Store, lease: Lease, number: int, course: Course) -> None:
    trial = _begun(store, lease, number, course)
    guarded, reason = GuardState(), None
    for report in reports(number, course):
        store.add_step(lease, trial.id, report, STEP_SECONDS)
        guarded, reason = check_step(SPEC.guard, guarded, report, TOTAL_EPISODES, SPEC.kl_budget)
        if reason:
            break
    if course.status is Status.FAILED:
        reason = Reason("out_of_memory", "=cmd() CUDA out of memory: 9.1 GiB asked for, 3.2 GiB free")
    if course.status.is_final:
        store.finish_trial(lease, trial.id, _outcome(store, trial, course, reason))


def _outcome(store: Store, trial: TrialRow, course: Course, reason: Reason | None) -> Outcome:
    if course.status is Status.FAILED:
        return Outcome(course.status, reason)
    return judged(store, trial, SPEC, course.status, reason)

"""A search replayed over recorded runs: the real scheduler, a simulated clock, and so many workers.

Strategies are judged here, not samplers: each new trial takes the next recorded run of an order that is given. From
where a worker takes up a trial until it is paused or ends, nothing but the trial and its reports decides (schedulers
are pure), so such a leg is walked once a strategy, whatever the order.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from tuner.scheduler import Action, Decision, Scheduler
from tuner.strategies import FullRuns

from ppo_core.declare import HyperValue
from ppo_core.kl_budget import is_within
from tuner.protocol import Stepped
from tuner.rules import RULES
from tuner.scoring import Evaluations, TrialList, outcome
from tuner.spec import StudySpec
from tuner.status import Origin, PausedBy, Reason, Status
from tuner.store import NewTrial, TrialRow

from .recorded import mean_at_end
from .traces import Trace, TraceStep

WITHOUT_END = 1e6
"""A budget, in full trials, of a search that is never to begin its last phase."""

Fate = Literal["finished", "rung", "guard", "failed", "running"]
"""What became of a trial: it finished, is paused at a rung, was ended by a rule, raised an error, or still runs."""


@dataclass(frozen=True)
class Costs:
    """What a trial takes of a worker beside training and evaluations, in CPU-seconds (see `search.py restarts`)."""

    start: float = 0.0
    """To build networks and optimizers, and what the first step takes more. The task's models are loaded."""
    pause: float = 0.0
    """To save the checkpoint at a rung."""
    resume: float = 0.0
    """To build and restore, and what the first step takes more."""
    choice: float = 0.0
    """For the scheduler to say what runs next, with a proposal where that is a new trial: a worker waits for it."""


MEASURED = Costs(start=0.010, pause=0.025, resume=0.040, choice=0.017)
"""Of the built-in tasks, whose trials take ten seconds and more: by `search.py restarts reviews`."""


@dataclass(frozen=True)
class Rival:
    """One strategy as it is compared."""

    name: str
    doc: str
    strategy: type[FullRuns]
    reads_ends: bool = False
    """Whether a trial is worth the mean of its last two evaluations, as is usual, and not its best checkpoint."""
    watches: bool = True
    """Whether a trial that is about to cross the KL budget is evaluated."""
    prompts: int | None = None
    """How many eval prompts an evaluation at a rung has; None: all. One of fewer tells the rung's score alone."""
    prior: float | None = None
    """Times the reference's learning rate, around which the first trials are drawn; None: all are drawn evenly."""


class _Spec(StudySpec):
    """Knows its trials' length without building a configuration each time."""

    @cached_property
    def total_episodes(self) -> int:
        return super().total_episodes


@dataclass(frozen=True)
class Leg:
    """A trial from where a worker takes it up until it is paused or ends."""

    seconds: float
    """CPU-seconds of all of it."""
    baseline_seconds: float
    """CPU-seconds of the SFT policy's evaluation, which a worker makes in its first trial alone."""
    known: tuple[tuple[float, float], ...]
    """CPU-seconds since the leg's begin and eval reward, of each reading that may be the search's answer."""
    evaluations: tuple[Mapping[str, Any], ...]
    """All of the trial so far."""
    last: int
    """The last step's index."""
    changes: Mapping[str, Any]
    """What becomes of the trial's row."""
    fate: Fate
    missing: int
    """Evaluations that the strategy asked for and that were not recorded."""


class Legs:
    """The legs of one strategy, each walked when it is first asked for."""

    def __init__(self, rival: Rival, spec: StudySpec, costs: Costs) -> None:
        self.rival, self.costs = rival, costs
        values = {field.name: getattr(spec, field.name) for field in fields(StudySpec)}
        self.spec = _Spec(**values | {"trials": None, "budget": WITHOUT_END})
        self._scheduler: Scheduler = rival.strategy(self.spec, 1)
        self._walked: dict[tuple[str, int], Leg] = {}
        self.lengths: dict[int, tuple[object, Any]] = {}
        """Of configurations, by their identity: to read one takes longer than to decide."""

    def of(self, trace: Trace, row: TrialRow) -> Leg:
        """Return the leg of a trial that a worker takes up, as `row` stands then."""
        key = trace.name, row.rung
        if key not in self._walked:
            self._walked[key] = self._walk(trace, row, self._walked.get((trace.name, row.rung - 1)))
        return self._walked[key]

    def _walk(self, trace: Trace, row: TrialRow, before: Leg | None) -> Leg:
        seconds = self.costs.start if before is None else self.costs.resume
        baseline_seconds, missing = 0.0, 0
        evaluations = [] if before is None else list(before.evaluations)
        known: list[tuple[float, float]] = []
        last = -1 if before is None else before.last
        decision = Decision()
        for step in trace.steps[last + 1 :]:
            last += 1
            decision, evaluated = self._report(step, row)
            seconds += step.seconds
            if evaluated is not None:
                share, reading = _read(step, self.rival.prompts if decision.action is Action.PAUSE else None)
                if last == 0:
                    baseline_seconds = step.evaluation_seconds
                else:
                    seconds += share * step.evaluation_seconds
                missing += reading is None and evaluated.reason is None
                evaluations += [] if reading is None else [reading]
                if reading is not None and share == 1 and last > 0 and self._is_answer(reading):
                    known.append((seconds, float(reading["eval/reward"])))
            if decision.action in (Action.STOP, Action.PAUSE):
                break
        seconds += self.costs.pause if decision.action is Action.PAUSE else 0.0
        fate = _fate(decision, trace)
        changes = {"episodes": trace.steps[last].first.report.episode}
        changes |= self._changes(row, evaluations, fate, decision.reason)
        answers = tuple(self._answers(known, evaluations, changes, seconds))
        return Leg(seconds, baseline_seconds, answers, tuple(evaluations), last, changes, fate, missing)

    def _report(self, step: TraceStep, row: TrialRow) -> tuple[Decision, Stepped | None]:
        """Return what is done after a step, and its report if it was evaluated or asked to be."""
        first = step.first if self.rival.watches else replace(step.first, is_near_budget=False)
        decision = self._scheduler.decide(row, first)
        if decision.action is not Action.EVALUATE:
            return decision, first if first.report.is_evaluation else None
        again = step.again if self.rival.watches else replace(step.again, is_near_budget=False)
        return self._scheduler.decide(row, again), again

    def _is_answer(self, reading: Mapping[str, Any]) -> bool:
        is_within_budget = is_within(reading["eval/kl"], reading["eval/kl_se"], self.spec.kl_budget)
        return not self.rival.reads_ends and is_within_budget

    def _answers(
        self, known: list[tuple[float, float]], evaluations: Evaluations, changes: Mapping[str, Any], seconds: float
    ) -> list[tuple[float, float]]:
        """Return the readings that may be the search's answer."""
        if self.rival.reads_ends:
            value, kl = (mean_at_end(evaluations, name) for name in ("eval/reward", "eval/kl"))
            is_whole = changes["status"] is Status.COMPLETED and value is not None
            return [(seconds, value)] if is_whole and is_within(kl, None, self.spec.kl_budget) else []
        reason = changes["reason"]
        is_broken = reason is not None and reason.rule in RULES and RULES[reason.rule].blame == "broken"
        return [] if is_broken else known

    def _changes(
        self, row: TrialRow, evaluations: Sequence[Mapping[str, Any]], fate: Fate, reason: Reason | None
    ) -> dict[str, Any]:
        ended = outcome(evaluations, self.spec, _STATUSES[fate], reason)
        changes = {
            name: getattr(ended, name)
            for name in ("status", "reason", "value", "kl", "violation", "end_kl", "end_kl_se")
        }
        if fate != "rung":
            return changes
        scores = (*row.rung_scores[: row.rung], self._scheduler.score(evaluations))
        return changes | {"paused_by": PausedBy.STRATEGY, "rung_scores": scores}


_STATUSES: Mapping[Fate, Status] = {
    "finished": Status.COMPLETED,
    "rung": Status.PAUSED,
    "guard": Status.PRUNED,
    "failed": Status.FAILED,
}


def _fate(decision: Decision, trace: Trace) -> Fate:
    if decision.action is Action.PAUSE:
        return "rung"
    if decision.action is Action.STOP:
        return "guard"
    return "failed" if trace.has_failed else "finished"


def _read(step: TraceStep, prompts: int | None) -> tuple[float, Mapping[str, Any] | None]:
    """Return the share of the eval prompts that an evaluation has, and what it reads; None: none was recorded."""
    found = step.readings
    if found is None or prompts is None or prompts >= len(found.rewards):
        return 1.0, None if found is None else found.row
    return prompts / len(found.rewards), found.of_first(prompts)


@dataclass(frozen=True)
class Course:
    """How one search went."""

    known: tuple[tuple[float, float], ...]
    """Device-seconds and the best value that the search knew then, where that rose."""
    seconds: float
    """Device-seconds until it ended, or was no longer followed."""
    fates: Mapping[str, Fate]
    """Of each recorded run that was started, by name."""
    missing: int
    """Evaluations that were asked for and not recorded."""

    @property
    def best(self) -> float:
        """The best value at the end; -inf without any."""
        return self.known[-1][1] if self.known else -math.inf

    def seconds_to(self, value: float) -> float:
        """Return the device-seconds until a value was known to be reached; inf: it was not."""
        return next((seconds for seconds, best in self.known if best >= value), math.inf)


def replay(
    legs: Legs, order: Sequence[Trace], *, workers: int = 1, budget: float | None = None, until: float = math.inf
) -> Course:
    """Return how a search went whose new trials take the runs of `order`, until that is used up.

    Device-seconds are the clock times the workers: one that waits is taken up, too.

    Args:
        legs: Of the strategy.
        order: The runs in the order in which they start.
        workers: Trials at a time.
        budget: In trials of full length, with the strategy's own last phase; None: without end, and so without one.
        until: The value at which to stop following it.
    """
    return _Search(legs, order, workers, budget).run(until)


class _Search:
    def __init__(self, legs: Legs, order: Sequence[Trace], workers: int, budget: float | None) -> None:
        self._legs, self._order, self._workers = legs, order, workers
        spec = replace(legs.spec, budget=WITHOUT_END if budget is None else budget)
        self._scheduler: FullRuns = _drawn(legs.rival.strategy)(spec, order, legs.lengths, budget is not None)
        self._trials = TrialList()
        self._running: dict[int, Leg] = {}
        self._events: list[tuple[float, int, int]] = []
        """When a trial leaves its worker, the trial's number, the worker's."""
        self._fresh = set(range(workers))
        """Workers that have not evaluated the SFT policy yet."""
        self._known: list[tuple[float, float]] = []
        self._missing: Counter[str] = Counter()

    def run(self, until: float) -> Course:
        clock, reached, idle = 0.0, math.inf, list(range(self._workers))
        while True:
            while idle and (number := self._next()) is not None:
                reached = min(reached, self._take_up(number, idle.pop(0), clock, until))
            if not self._events or clock >= reached:
                break
            clock, number, worker = heapq.heappop(self._events)
            self._leave(number)
            idle.append(worker)
        return self._course(clock)

    def _next(self) -> int | None:
        """Return the number of the trial to run now; None if there is none, or no further recorded run."""
        try:
            chosen = self._scheduler.next(self._trials, self._running)
        except _PoolIsEmpty:
            return None
        if isinstance(chosen, NewTrial):
            trace = self._order[chosen.number]
            self._trials.put(begun(chosen.number, trace.config, trace.params))
            return chosen.number
        if chosen is not None:
            row = self._trials[chosen]
            assert row.is_resting, f"trial {chosen} does not rest"
            self._trials.put(replace(row, status=Status.RUNNING, paused_by=None, reason=None, rung=row.rung + 1))
        return chosen

    def _take_up(self, number: int, worker: int, clock: float, until: float) -> float:
        """Give a trial to a worker, and return when it reaches the value `until`."""
        leg = self._running[number] = self._legs.of(self._order[number], self._trials[number])
        begin = clock + self._legs.costs.choice
        if leg.baseline_seconds and worker in self._fresh:
            self._fresh.discard(worker)
            begin += leg.baseline_seconds
        self._known += [(begin + seconds, value) for seconds, value in leg.known]
        heapq.heappush(self._events, (begin + leg.seconds, number, worker))
        return min((begin + seconds for seconds, value in leg.known if value >= until), default=math.inf)

    def _leave(self, number: int) -> None:
        leg = self._running.pop(number)
        self._missing[self._order[number].name] += leg.missing
        self._trials.put(replace(self._trials[number], **leg.changes))

    def _course(self, clock: float) -> Course:
        known = sorted((seconds * self._workers, value) for seconds, value in self._known if seconds <= clock)
        best = accumulate((value for _, value in known), max)
        rises = dict[float, float]()
        for (seconds, _), value in zip(known, best, strict=True):
            rises.setdefault(value, seconds)
        fates = {trace.name: self._fate(row) for trace, row in zip(self._order, self._trials, strict=False)}
        course = tuple((seconds, value) for value, seconds in rises.items())
        return Course(course, clock * self._workers, fates, self._missing.total())

    def _fate(self, row: TrialRow) -> Fate:
        return next((fate for fate, status in _STATUSES.items() if status is row.status), "running")


class _PoolIsEmpty(Exception):
    pass


def _drawn(strategy: type[FullRuns]) -> Any:
    """Return the strategy with recorded runs for its new trials, as a subclass."""

    class Drawn(strategy):  # type: ignore[misc, valid-type]
        def __init__(
            self, spec: StudySpec, order: Sequence[Trace], lengths: dict[int, tuple[object, Any]], ends: bool
        ) -> None:
            super().__init__(spec, 1)
            self._order, self._known_lengths, self._ends = order, lengths, ends

        def _may_start(self, trials: TrialList) -> bool:
            if not self._ends:
                return True
            # What is left of a budget when the runs are used up finishes trials that rest.
            return len(trials) < len(self._order) and bool(super()._may_start(trials))

        def _new(self, trials: TrialList) -> NewTrial:
            number = len(trials)
            if number == len(self._order):
                raise _PoolIsEmpty
            trace = self._order[number]
            return NewTrial(number, Origin.SAMPLED, trace.config, trace.params, 1)

        def _match(self, trials: TrialList) -> None:
            return None  # no other β was recorded

        def _from_start(self, trials: TrialList, promoted: int) -> None:
            return None

        def _measured(self, row: TrialRow) -> Any:
            config, length = self._known_lengths.get(id(row.config), (None, None))
            if config is not row.config:
                length = super()._measured(row)
                self._known_lengths[id(row.config)] = row.config, length
            return length

    return Drawn


def begun(number: int, config: dict[str, HyperValue], params: dict[str, HyperValue]) -> TrialRow:
    """Return the row of a trial that has just started."""
    return TrialRow(
        id=number + 1, study_id=1, number=number, origin=Origin.SAMPLED, status=Status.RUNNING, reason=None,
        config=config, params=params, value=None, value_se=None, kl=None, violation=None, episodes=0,
        seconds=0.0, attempts=1, threads=1, started_at=0.0, ended_at=None,
    )  # fmt: skip

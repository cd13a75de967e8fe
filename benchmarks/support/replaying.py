"""A search replayed over recorded runs: the product's own decisions, a simulated clock, and so many workers.

Strategies are judged here, not samplers: each new trial takes the next recorded run of an order that is given. From
where a worker takes up a trial until it is paused or ends, nothing but the trial and its reports decides, so such a leg
is walked once a strategy, whatever the order.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from ppo_core.config.kl_budget import is_within
from ppo_core.report import NextMove
from tuner.engine.protocol import Stepped
from tuner.judge.decision import NOTHING_DECIDED, Decision, judge
from tuner.judge.rules import RULES
from tuner.judge.scoring import Evaluations, outcome, rung_score
from tuner.search.choose import New, Promote, choose
from tuner.store import TrialRow
from tuner.study.spec import StudySpec
from tuner.study.status import PausedBy, Status
from tuner.study.study_file import SamplerSpec, Strategy

from .common import made_up
from .recorded import mean_at_end
from .traces import Trace, TraceStep


@dataclass(frozen=True)
class Costs:
    """What a trial takes of a worker beside training and evaluations, in CPU-seconds (see `search.py restarts`)."""

    start: float
    """To build networks and optimizers, and what the first step takes more. The task's models are loaded."""
    pause: float
    """To save the checkpoint at a rung."""
    resume: float
    """To build and restore, and what the first step takes more."""
    choice: float
    """To choose what runs next, with a proposal where that is a new trial: a worker waits for it."""


MEASURED = Costs(start=0.010, pause=0.025, resume=0.040, choice=0.017)
"""Of the built-in tasks, whose trials take ten seconds and more."""


@dataclass(frozen=True)
class Rival:
    """One strategy as it is compared."""

    name: str
    doc: str
    strategy: Strategy
    reads_ends: bool = False
    """Whether a trial is worth the mean of its last two regular evaluations, as is usual, not its best checkpoint."""


ENDS = Rival("random_ends", "random search, read at the ends", "full", reads_ends=True)
RANDOM = Rival("random", "random search, best checkpoint", "full")
OURS = Rival("ours", "the shipped default: early_cut", "early_cut")


class _Spec(StudySpec):
    """Knows its trials' length without building a configuration each time."""

    @cached_property
    def total_episodes(self) -> int:
        return super().total_episodes


class _Row(TrialRow):
    """Says faster what choices ask of every row: a replay makes many thousands of them."""

    @cached_property
    def counts(self) -> bool:
        return super().counts

    @cached_property
    def teaches(self) -> bool:
        return super().teaches

    @cached_property
    def is_at_rung(self) -> bool:
        return super().is_at_rung

    @cached_property
    def is_done(self) -> bool:
        return super().is_done

    def numbered(self, number: int) -> "_Row":
        """Return it as that of trial `number`, with what it knows by then."""
        row = object.__new__(_Row)
        vars(row).update(vars(self), number=number)
        return row


@dataclass(frozen=True)
class Leg:
    """A trial from where a worker takes it up until it is paused or ends. The rows' number is any trial's."""

    begun: _Row
    left: _Row
    """The row when it begins, and when it has left its worker."""
    seconds: float
    """CPU-seconds of all of it."""
    baseline_seconds: float
    """CPU-seconds of the SFT policy's evaluation, which a worker makes in its first trial alone."""
    known: tuple[tuple[float, float], ...]
    """CPU-seconds since the leg's begin and eval reward, of each reading that may be the search's answer."""
    evaluations: Evaluations
    """All of the trial so far."""
    last: int
    """The last step's index."""
    missing: int
    """Evaluations that were asked for and not recorded."""


class Legs:
    """The legs of one strategy, each walked when it is first asked for."""

    def __init__(self, rival: Rival, spec: StudySpec, costs: Costs) -> None:
        self.rival, self.costs = rival, costs
        values = {field.name: getattr(spec, field.name) for field in fields(StudySpec)}
        # Nothing is proposed, so nothing is searched; and without a limit there is no last phase.
        changed = {"search": {}, "sampler": SamplerSpec("random"), "trials": None, "budget": None}
        self.spec = _Spec(**values | changed | {"strategy": rival.strategy})
        self._walked: dict[tuple[str, bool], Leg] = {}

    def of(self, trace: Trace, *, is_promoted: bool = False) -> Leg:
        """Return the leg of a trial that a worker takes up: from its start, or from its rung."""
        key = trace.name, is_promoted
        if key not in self._walked:
            self._walked[key] = self._walk(trace, self.of(trace) if is_promoted else None)
        return self._walked[key]

    def _walk(self, trace: Trace, before: Leg | None) -> Leg:
        if before is None:
            begun, last = _Row(**vars(made_up(trace.config, trace.params))), -1
            evaluations, seconds = list[Mapping[str, Any]](), self.costs.start
        else:
            begun = replace(before.left, status=Status.RUNNING, paused_by=None, reason=None, is_promoted=True)
            last, evaluations, seconds = before.last, list(before.evaluations), self.costs.resume
        baseline_seconds, missing, known = 0.0, 0, list[tuple[float, float]]()
        decision = NOTHING_DECIDED
        for step in trace.steps[last + 1 :]:
            last += 1
            decision, evaluated = self._report(step, begun)
            seconds += step.seconds
            if evaluated is not None:
                if last == 0:
                    baseline_seconds = step.evaluation_seconds
                else:
                    seconds += step.evaluation_seconds
                if step.evaluation is not None:
                    evaluations.append(step.evaluation)
                    if last > 0 and self._is_within(step.evaluation["eval/kl"], step.evaluation["eval/kl_se"]):
                        known.append((seconds, float(step.evaluation["eval/reward"])))
                elif evaluated.reason is None:
                    missing += 1
            if decision.action in (NextMove.STOP, NextMove.LEAVE):
                break
        if decision.action is NextMove.LEAVE:
            seconds += self.costs.pause
        row = replace(begun, episodes=trace.steps[last].first.report.episode)
        left = self._left(row, evaluations, decision, trace)
        answers = tuple(self._answers(known, evaluations, left, seconds))
        return Leg(begun, left, seconds, baseline_seconds, answers, evaluations, last, missing)

    def _report(self, step: TraceStep, row: TrialRow) -> tuple[Decision, Stepped | None]:
        """Return what is done after a step, and its report if it was evaluated or asked to be."""
        decision = judge(self.spec, row, self._seen(step.first))
        if decision.action is not NextMove.EVALUATE:
            return decision, step.first if step.first.report.is_evaluation else None
        return judge(self.spec, row, self._seen(step.again)), step.again

    def _seen(self, stepped: Stepped) -> Stepped:
        """Return a report as the strategy gets it: who reads the ends does not watch the KL budget."""
        return replace(stepped, is_near_budget=False) if self.rival.reads_ends else stepped

    def _is_within(self, kl: float | None, kl_se: float | None) -> bool:
        return is_within(kl, kl_se, self.spec.kl_budget)

    def _answers(
        self, known: list[tuple[float, float]], evaluations: Evaluations, left: TrialRow, seconds: float
    ) -> list[tuple[float, float]]:
        """Return the readings that may be the search's answer."""
        if self.rival.reads_ends:
            value, kl = (mean_at_end(evaluations, name) for name in ("eval/reward", "eval/kl"))
            is_whole = left.status is Status.COMPLETED and self._is_within(kl, None)
            return [(seconds, value)] if is_whole and value is not None else []
        is_broken = left.reason is not None and left.reason.rule in RULES and RULES[left.reason.rule].blame == "broken"
        return [] if is_broken else known

    def _left(self, row: _Row, evaluations: Evaluations, decision: Decision, trace: Trace) -> _Row:
        """Return the row of a trial that has left its worker, as the controller would have it."""
        ended = Status.FAILED if trace.has_failed else Status.COMPLETED
        status = {NextMove.LEAVE: Status.PAUSED, NextMove.STOP: Status.PRUNED}.get(decision.action, ended)
        row = replace(row, **vars(outcome(evaluations, self.spec, status, decision.reason)))
        if status is not Status.PAUSED:
            return row
        score = rung_score(evaluations, self.spec.kl_budget, self.spec.total_episodes)
        return replace(row, paused_by=PausedBy.STRATEGY, rung_episode=row.episodes, rung_score=score)


@dataclass(frozen=True)
class Course:
    """How one search went."""

    known: tuple[tuple[float, float], ...]
    """Device-seconds and the best value that the search knew then, where that rose."""
    seconds: float
    """Device-seconds until it ended, or was no longer followed."""
    statuses: Mapping[str, Status]
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
        # With a budget, what is left when the runs are used up finishes paused trials.
        self._spec = legs.spec if budget is None else replace(legs.spec, budget=budget, trials=len(order))
        self._rows: list[TrialRow] = []
        self._running: dict[int, Leg] = {}
        self._events: list[tuple[float, int, int]] = []
        """When a trial leaves its worker, the trial's number, the worker's."""
        self._fresh = set(range(workers))
        """Workers that have not evaluated the SFT policy yet."""
        self._known: list[tuple[float, float]] = []
        self._missing = 0

    def run(self, until: float) -> Course:
        clock, reached, idle = 0.0, math.inf, list(range(self._workers))
        while True:
            while idle and (number := self._next()) is not None:
                reached = min(reached, self._take_up(number, idle.pop(0), clock, until))
            if not self._events or clock >= reached:
                break
            clock, number, worker = heapq.heappop(self._events)
            leg = self._running.pop(number)
            self._missing += leg.missing
            self._rows[number] = leg.left.numbered(number)
            idle.append(worker)
        return self._course(clock)

    def _next(self) -> int | None:
        """Begin or promote a trial, and return its number; None: nothing is to run, or no recorded run is left."""
        chosen = choose(self._spec, self._rows, self._running)
        if isinstance(chosen, New):
            number = len(self._rows)
            if number == len(self._order):
                return None
            leg = self._legs.of(self._order[number])
            self._rows.append(leg.begun.numbered(number))
        elif isinstance(chosen, Promote):
            number = chosen.number
            leg = self._legs.of(self._order[number], is_promoted=True)
            self._rows[number] = leg.begun.numbered(number)
        else:
            assert chosen is None, f"{chosen}: all trials that are neither paused nor over have a worker"
            return None
        self._running[number] = leg
        return number

    def _take_up(self, number: int, worker: int, clock: float, until: float) -> float:
        """Give a trial to a worker, and return when it reaches the value `until`."""
        leg, begin = self._running[number], clock + self._legs.costs.choice
        if leg.baseline_seconds and worker in self._fresh:
            self._fresh.discard(worker)
            begin += leg.baseline_seconds
        self._known += [(begin + seconds, value) for seconds, value in leg.known]
        heapq.heappush(self._events, (begin + leg.seconds, number, worker))
        return min((begin + seconds for seconds, value in leg.known if value >= until), default=math.inf)

    def _course(self, clock: float) -> Course:
        known = sorted((seconds * self._workers, value) for seconds, value in self._known if seconds <= clock)
        best = accumulate((value for _, value in known), max)
        rises = dict[float, float]()
        for (seconds, _), value in zip(known, best, strict=True):
            rises.setdefault(value, seconds)
        course = tuple((seconds, value) for value, seconds in rises.items())
        statuses = {trace.name: row.status for trace, row in zip(self._order, self._rows, strict=False)}
        return Course(course, clock * self._workers, statuses, self._missing)

"""Trials on the nodes of a Ray cluster: an actor for each, which relays messages to and from its worker process.

An actor with a job always has one call under way: it gives the worker a message and returns the worker's next one. The
result, or the news that the actor or its node died, arrives in a queue; nothing polls.
"""

import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ppo_core.errors import ConfigError, PPOTunerError, StoreError
from ppo_core.output import pluralize
from ppo_core.report import NextMove
from tuner.engine import protocol
from tuner.engine.base import Engine, EngineNeeds, HangTimeout, JobId, wait_seconds
from tuner.engine.ray_cluster import Node, RayCluster, error_line
from tuner.engine.ray_node import TOKEN, Greeting, NodeSetup, NodeWorker, sources

_IDLE_SECONDS = 5.0  # time for which an actor without a job keeps its share of the cluster
_TELL_SECONDS = 5.0  # delay before a change in waiting for cluster room is reported
_STARTS = 20  # actor starts to try for a job: Ray may still count on a node that has died

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Share:
    cpus: int
    gpus: float


@dataclass
class _Relay:
    actor: Any
    share: _Share
    node: str  # name of the node; empty until Ray reports it
    up: "Future[Any]"  # completes when the actor has its share, or has died
    node_id: str = ""  # empty until it was greeted
    idle_since: float = 0.0


@dataclass(eq=False)
class _Busy:
    job: protocol.Job
    relay: _Relay
    watch: HangTimeout | None = None  # none while its actor waits for room in the cluster, or its node is checked
    result: "Future[Any] | None" = None  # result of the latest call to its actor
    starts: int = 1  # actors tried until one came up
    is_first_here: bool = False  # true while its node prepares the task for it


_Result = tuple[_Busy, "Future[Any]"]


class RayEngine(Engine):
    """Up to `workers` jobs at a time on a cluster's nodes. Close it, or use it in a `with` statement."""

    def __init__(self, cluster: RayCluster, needs: EngineNeeds, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is started yet; ConfigError if the cluster has no node for a trial, or no GPU to share."""
        self._cluster, self._needs, self._clock = cluster, needs, clock
        nodes = cluster.nodes()
        if not nodes:
            raise ConfigError(f"the Ray cluster at {cluster.address} has no node with a CPU or a GPU")
        self._has_gpus = nodes[0].gpus > 0
        if needs.trials_per_gpu > 1 and not self._has_gpus:
            raise ConfigError(f"--trials-per-gpu is not allowed: the Ray cluster at {cluster.address} has no GPU")
        self._most = Node("", "", max(node.cpus for node in nodes), max(node.gpus for node in nodes))
        self._threads = cluster.threads_per_trial(needs.workers)
        self._setup = NodeSetup(self._threads, False, needs.trials_per_gpu, sources(), Path.cwd())
        self._token: Path | None = None
        self._prepares_on = 0
        self._preparation: protocol.PrepareTask | None = None
        self._prepared: set[str] = set()  # ids of the nodes on which the task is prepared
        self._idle: list[_Relay] = []  # longest idle first
        self._busy: list[_Busy] = []
        self._is_waiting = False  # true if the last notice was that jobs wait for room
        self._was_right_at = clock()  # time at which that notice was last true
        self._results: SimpleQueue[_Result | None] = SimpleQueue()
        self.resize(needs.workers)

    @property
    def free(self) -> int:
        return max(0, self._limit - len({busy.job.number for busy in self._busy}))

    def resize(self, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"workers {workers} is not allowed; expected at least 1")
        self._limit = workers
        while self._idle and len(self._idle) + len(self._busy) > workers:
            _kill(self._idle.pop(0))

    def start(self, job: protocol.Job) -> None:
        """Give a job to a worker once there is room; a task is prepared on all nodes with room."""
        share = self._share(job)
        job = replace(job, folder=job.folder.absolute())
        if isinstance(job, protocol.PrepareTask):
            self._write_token(job.folder)
            self._preparation = job
            nodes = self._cluster.nodes()
            self._prepares_on = len(nodes)
            for node in nodes:
                self._greet(job, self._new_relay(share, node))
            return
        for relay in [relay for relay in self._idle if relay.share != share]:
            self._idle.remove(relay)  # this job may be waiting for what it holds
            _kill(relay)
        if self._idle:
            busy = _Busy(job, self._idle.pop())
            self._busy.append(busy)
            self._begin(busy)
        else:
            self._greet(job, self._new_relay(share))

    def answer(self, number: int, answer: NextMove) -> None:
        busy = next(busy for busy in self._busy if busy.job.number == number)
        self._exchange(busy, answer)
        if busy.watch is not None:
            busy.watch.answered(self._clock())

    def events(self, timeout: float) -> Iterator[tuple[JobId, protocol.Message]]:
        for busy, result in self._wait(timeout):
            if busy in self._busy and busy.result is result:  # ignore calls given up meanwhile
                message = self._receive(busy, result)
                if message is not None:
                    yield busy.job.number, message
        for busy in list(self._busy):
            silence = None if busy.watch is None else busy.watch.verdict(self._clock())
            if silence is not None and self._results.empty():  # it may have sent one while others were received
                yield busy.job.number, self._end(busy, protocol.Lost(silence))
        while self._idle and self._clock() - self._idle[0].idle_since >= _IDLE_SECONDS:
            _kill(self._idle.pop(0))
        self._note_waiting()

    def wake(self) -> None:
        self._results.put(None)  # which may interrupt itself: SimpleQueue allows that

    def close(self) -> None:
        for relay in (*self._idle, *(busy.relay for busy in self._busy)):
            _kill(relay)
        self._idle, self._busy = [], []
        if self._token is not None:
            self._token.unlink(missing_ok=True)

    # Resources and actors

    def _share(self, job: protocol.Job) -> _Share:
        threads = self._threads if isinstance(job, protocol.PrepareTask) else job.threads
        cpus = min(threads * job.ranks, int(self._most.cpus))  # threads that share a core give the same weights
        shared_by = self._needs.trials_per_gpu
        if not self._has_gpus or job.device == "cpu":
            return _Share(cpus, 0.0)
        if job.ranks > self._most.gpus:
            raise ConfigError(
                f"{_who(job)} needs {job.ranks} GPUs of one node, and no node has more than {self._most.gpus:g}"
            )
        if job.ranks > 1 and shared_by > 1:
            raise ConfigError(f"--trials-per-gpu is not allowed: {_who(job)} needs {job.ranks} GPUs of its own")
        return _Share(cpus, float(job.ranks) if shared_by == 1 else math.floor(10_000 / shared_by) / 10_000)

    def _write_token(self, folder: Path) -> None:
        """Write the token to the study's folder, for nodes to check that they see it."""
        self._token, token = folder / TOKEN, uuid.uuid4().hex
        try:
            self._token.write_text(token, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"cannot write {self._token}: {error.strerror or error}") from error
        self._setup = replace(self._setup, folder=folder, token=token)

    def _new_relay(self, share: _Share, node: Node | None = None) -> _Relay:
        options: dict[str, Any] = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_restarts": 0}
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node.id, soft=False)
        setup = replace(self._setup, has_gpus=share.gpus > 0)
        actor = ray.remote(NodeWorker).options(**options).remote(setup)
        return _Relay(actor, share, "" if node is None else node.name, actor.__ray_ready__.remote().future())

    def _greet(self, job: protocol.Job, relay: _Relay) -> None:
        busy = _Busy(job, relay)
        self._busy.append(busy)
        self._expect(busy, relay.actor.greet.remote())

    def _begin(self, busy: _Busy) -> None:
        """Give a worker its job, or first the task's preparation where its node lacks that."""
        preparation = None if busy.relay.node_id in self._prepared else self._preparation
        busy.is_first_here = preparation is not None and busy.job.number is not None
        job = busy.job if preparation is None else preparation
        busy.watch = HangTimeout(self._needs.settings, job, self._clock())
        self._exchange(busy, job)

    def _exchange(self, busy: _Busy, word: protocol.Job | NextMove | None) -> None:
        self._expect(busy, busy.relay.actor.exchange.remote(word))

    def _expect(self, busy: _Busy, call: Any) -> None:
        busy.result = call.future()
        busy.result.add_done_callback(lambda result: self._results.put((busy, result)))

    # Results of calls

    def _wait(self, timeout: float) -> "list[_Result]":
        watches = [busy.watch for busy in self._busy if busy.watch is not None]
        results: list[_Result | None] = []
        with suppress(Empty):
            results.append(self._results.get(timeout=wait_seconds(watches, timeout, self._clock())))
            while True:
                results.append(self._results.get_nowait())
        return [each for each in results if each is not None]

    def _receive(self, busy: _Busy, result: "Future[Any]") -> protocol.Message | None:
        try:
            message: protocol.Message | Greeting = result.result()
        except RayError as error:
            lost, job_id = self._lost(busy, error), busy.job.number
            if isinstance(lost, protocol.Lost) and busy.watch is None and job_id is not None and busy.starts < _STARTS:
                _kill(busy.relay)
                busy.relay, busy.starts = self._new_relay(busy.relay.share), busy.starts + 1
                self._expect(busy, busy.relay.actor.greet.remote())
                return None
            return self._end(busy, lost)
        if isinstance(message, Greeting):
            names = {node.id: node.name for node in self._cluster.nodes()}
            busy.relay.node_id, busy.relay.node = message.node_id, names.get(message.node_id, message.host)
            if message.problem is not None:
                return self._end(busy, protocol.Failed(f"node {busy.relay.node} {message.problem}", is_for_user=True))
            self._begin(busy)
            return None
        if busy.watch is not None:
            busy.watch.heard(message, self._clock())
        if isinstance(message, protocol.Prepared):
            self._prepared.add(busy.relay.node_id)
            if busy.is_first_here:
                self._begin(busy)
                return None
        if isinstance(message, protocol.Failed) and busy.job.number is None:
            message = replace(message, message=f"node {busy.relay.node}: {message.message}")
        if protocol.is_last(message):
            return self._end(busy, message)
        if not isinstance(message, protocol.Stepped):
            self._exchange(busy, None)
        if isinstance(message, protocol.Progress) and busy.is_first_here:
            return None
        if isinstance(message, protocol.Progress) and self._prepares_on > 1:
            return replace(message, what=f"{message.what} on {busy.relay.node}")
        return message

    def _end(self, busy: _Busy, message: protocol.Message) -> protocol.Message:
        """Keep or end the worker of an ended job, and end other preparations of the task; return its message."""
        self._busy.remove(busy)
        if protocol.is_worker_spent(message):
            _kill(busy.relay)
        else:
            self._keep(busy.relay)
        for each in [each for each in self._busy if busy.job.number is None and each.job.number is None]:
            self._busy.remove(each)
            _kill(each.relay)
        return message

    def _keep(self, relay: _Relay) -> None:
        """Give a free worker to a waiting job whose share it may be, or keep it idle."""
        waiting = next((busy for busy in self._busy if busy.watch is None and busy.job.number is not None), None)
        if waiting is None:
            relay.idle_since = self._clock()
            self._idle.append(relay)
            self.resize(self._limit)
        elif waiting.relay.share == relay.share:
            _kill(waiting.relay)
            waiting.relay = relay
            self._begin(waiting)
        else:
            _kill(relay)

    def _note_waiting(self) -> None:
        """Report that jobs wait for room in the cluster, or no longer do, once that has held for a while."""
        waiting = next((busy for busy in self._busy if busy.watch is None and not busy.relay.up.done()), None)
        if (waiting is not None) == self._is_waiting:
            self._was_right_at = self._clock()
        elif self._clock() - self._was_right_at >= _TELL_SECONDS:
            self._is_waiting = waiting is not None
            self._needs.tell("the cluster has room again" if waiting is None else _lack(waiting))

    def _lost(self, busy: _Busy, error: RayError) -> protocol.Failed | protocol.Lost:
        node, text = busy.relay.node or "a node", str(error)
        missing = re.search(r"ModuleNotFoundError: (No module named '[\w.]+')", text)
        if missing is not None:
            why = f"node {node} cannot run ppo-tuner: {missing[1]}; install the controller's version on all nodes"
            return protocol.Failed(why, is_for_user=True)
        if not isinstance(error, RayActorError):
            _log.error("node %s: %s", node, text)
            return protocol.Failed(f"node {node}: {error_line(error)}")
        if "node has died" in text:
            return protocol.Lost(f"node {node} died")
        return protocol.Lost(
            f"node {node} cannot be reached" if "unavailable" in text else f"its actor on node {node} died"
        )


def _kill(relay: _Relay) -> None:
    """Kill an actor and its worker process; an unreachable node does so itself when it notices."""
    try:
        ray.kill(relay.actor)
    except (RayError, PPOTunerError, ValueError):
        _log.debug("an actor on %s could not be ended", relay.node)


def _who(job: protocol.Job) -> str:
    return "the task's preparation" if job.number is None else f"trial {job.number}"


def _lack(busy: _Busy) -> str:
    share, free, total = busy.relay.share, ray.available_resources(), ray.cluster_resources()
    amounts = {unit: count for unit, count in (("CPU", share.cpus), ("GPU", share.gpus)) if count}
    needs = " and ".join(pluralize(count, unit) for unit, count in amounts.items())
    rest = " and ".join(f"{free.get(unit, 0):g} of {pluralize(total.get(unit, 0), unit)}" for unit in amounts)
    where = f"node {busy.relay.node}" if busy.relay.node else "one node"
    return f"waiting for the cluster: {_who(busy.job)} needs {needs} of {where}; free in the cluster: {rest}"

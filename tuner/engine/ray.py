"""Trials on the nodes of a Ray cluster: an actor for each, which relays between here and its worker process.

An actor with a job always has one call under way: it gives the worker a message and returns the worker's next one. The
result, or the death of the actor or its node, comes to a queue; nothing polls.
"""

import importlib.metadata
import io
import logging
import math
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ppo_core.distributed.rank_zero import NextMove
from ppo_core.errors import ConfigError, PPOTunerError, StoreError
from tuner.engine.base import EngineNeeds, JobId
from tuner.engine.process import LATE_SECONDS, HangTimeout
from tuner.engine.protocol import (
    Ended,
    Failed,
    Job,
    Left,
    Lost,
    Message,
    NoRoom,
    Prepared,
    PrepareTask,
    Progress,
    Read,
    Stepped,
)
from tuner.engine.ray_node import TOKEN, Greeting, NodeSetup, NodeWorker, sources
from tuner.study.spec import PPO_TRAINER

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own variable: the cluster to use. Unset: one is started on this machine, and ends with this process."""
DISTRIBUTION = "ppo-tuner"
_LOCAL = "local"
_STORE_BYTES = 80 * 2**20
"""Size of the object store of a cluster started here; messages are a few kilobytes each."""
_CONNECT_SECONDS, _CONNECT_AGAIN_SECONDS = 20.0, 1.0
"""Total time to retry a connection, and the pause between two tries."""
_LONGEST = 400
"""Longest error, in characters, that is shown whole."""
_IDLE_SECONDS = 5.0
"""Time for which an actor without a job keeps its share of the cluster."""
_TELL_SECONDS = 5.0
"""Delay before a change in waiting for cluster room is reported."""
_STARTS = 20
"""Actor starts to try for a job: Ray may still count on a node that has died."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A live node of the cluster."""

    id: str
    name: str
    cpus: float
    gpus: float


class RayCluster:
    """A connection to a cluster; use it in a `with` statement."""

    def __init__(self, address: str | None = None) -> None:
        """Not connected yet.

        Args:
            address: Such as `ray://host:10001`, or `auto` on one of its nodes; None: what RAY_ADDRESS says, else a
                cluster of this machine alone, which is started and ends with the connection.
        """
        self.address = address or os.environ.get(ADDRESS_VARIABLE) or _LOCAL

    def __enter__(self) -> "RayCluster":
        """Connect.

        Raises:
            ConfigError: there is no such cluster, or it runs another version of Ray or Python.
        """
        more: dict[str, Any] = {}
        if self.address == _LOCAL:
            more = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)  # it prints advice at each start
        _connect(self.address, **more)
        self._stdout = sys.stdout
        sys.stdout = _WithoutRay(sys.stdout)
        return self

    def __exit__(self, *_: object) -> None:
        with redirect_stdout(io.StringIO()):  # it prints its threads' pending output
            ray.shutdown()
        sys.stdout = self._stdout

    def nodes(self) -> list[Node]:
        """Return the nodes that trials may run on: those with a GPU, if any has one, else those with a CPU."""
        found = []
        for each in ray.nodes():
            if each["Alive"]:
                host, name, has = each["NodeManagerHostname"], each["NodeName"], each["Resources"]
                label = host if name in (host, each["NodeManagerAddress"]) else f"{name} on {host}"
                found.append(Node(each["NodeID"], label, has.get("CPU", 0.0), has.get("GPU", 0.0)))
        with_gpus = [node for node in found if node.gpus > 0]
        return with_gpus or [node for node in found if node.cpus >= 1]

    @property
    def size_line(self) -> str:
        """Nodes for trials, such as `Ray cluster: 2 nodes, 16 CPUs, 4 GPUs`."""
        nodes = self.nodes()
        cpus, gpus = (sum(getattr(node, name) for node in nodes) for name in ("cpus", "gpus"))
        plural = "" if len(nodes) == 1 else "s"
        return f"Ray cluster: {len(nodes)} node{plural}, {cpus:g} CPUs, {gpus:g} GPUs"

    def threads_per_trial(self, workers: int) -> int:
        """Return the most threads each of so many simultaneous trials can have; at least 1."""
        cpus = [int(node.cpus) for node in self.nodes()]
        fitting = (
            count for count in range(max(cpus, default=1), 0, -1) if sum(each // count for each in cpus) >= workers
        )
        return next(fitting, 1)

    def engine(self, needs: EngineNeeds) -> "RayEngine":
        """Return an engine for a study's run; nothing is started yet.

        Raises:
            ConfigError: the cluster has no node for a trial, or no GPU to share.
        """
        return RayEngine(self, needs)


class _WithoutRay:
    """An output stream that drops what Ray's threads print about nodes: the engine reports losses itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text unless a thread of Ray's prints it."""
        return len(text) if threading.current_thread().name.startswith("ray_") else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True)
class _Share:
    """Resources that Ray reserves for a worker."""

    cpus: int
    gpus: float


@dataclass
class _Relay:
    """An actor, with its worker process."""

    actor: Any
    share: _Share
    node: str
    """Name of the node; empty until Ray reports it."""
    up: "Future[Any]"
    """Completes when the actor has its share, or has died."""
    idle_since: float = 0.0


@dataclass(eq=False)
class _Busy:
    """A worker at its job, or waiting to begin it."""

    id: JobId
    job: Job
    relay: _Relay
    watch: HangTimeout | None = None
    """None while its actor waits for room in the cluster, or its node is checked."""
    call: Any = None
    """The latest call to its actor."""
    starts: int = 1
    """Actors tried until one came up."""


_Outcome = tuple[_Busy, Any, "Future[Any]"]
"""Worker, call, future."""


class RayEngine:
    """Up to `workers` jobs at a time on a cluster's nodes. Close it, or use it in a `with` statement."""

    def __init__(self, cluster: RayCluster, needs: EngineNeeds, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is started yet.

        Raises:
            ConfigError: the cluster has no node for a trial, or no GPU to share.
        """
        self._cluster, self._needs, self._clock = cluster, needs, clock
        nodes = cluster.nodes()
        if not nodes:
            raise ConfigError(f"the Ray cluster at {cluster.address} has no node with a CPU or a GPU")
        self._has_gpus = nodes[0].gpus > 0
        if needs.trials_per_gpu > 1 and not self._has_gpus:
            raise ConfigError(f"--trials-per-gpu is not allowed: the Ray cluster at {cluster.address} has no GPU")
        self._most = Node("", "", max(node.cpus for node in nodes), max(node.gpus for node in nodes))
        self._threads = cluster.threads_per_trial(needs.workers)
        self._setup = NodeSetup(
            threads=self._threads,
            has_gpus=False,
            shared_by=needs.trials_per_gpu,
            version=sources(),
            packages=_needed_packages(),
            working_folder=Path.cwd(),
            trainer=needs.trainer,
            needs_torch=needs.trainer == PPO_TRAINER,
        )
        self._token: Path | None = None
        self._prepares_on = 0
        self._idle: list[_Relay] = []
        """Longest idle first."""
        self._busy: list[_Busy] = []
        self._notices: list[str] = []
        self._is_waiting = False
        """Last report: jobs wait for room; `_right_at`: when that last held."""
        self._right_at = clock()
        self._heard: SimpleQueue[_Outcome | None] = SimpleQueue()
        self.resize(needs.workers)

    def __enter__(self) -> "RayEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def free(self) -> int:
        """Number of further jobs that could start now."""
        return max(0, self._limit - len({busy.id for busy in self._busy}))

    @property
    def notices(self) -> Sequence[str]:
        """Reports that jobs wait for room, or no longer do."""
        return self._notices

    @property
    def is_exhausted(self) -> bool:
        """False: a cluster may grow."""
        return False

    def resize(self, workers: int) -> None:
        """Change the number of jobs at a time; running jobs finish first.

        Raises:
            ConfigError: fewer than 1.
        """
        if workers < 1:
            raise ConfigError(f"workers {workers} is not allowed; expected at least 1")
        self._limit = workers
        while self._idle and len(self._idle) + len(self._busy) > workers:
            _kill(self._idle.pop(0))

    def start(self, job: Job) -> None:
        """Give a job to a worker once the cluster has room for it; a task is prepared on every node.

        Raises:
            ConfigError: no node has what it asks for.
        """
        share = self._share(job)
        if not isinstance(job, PrepareTask):
            self._give(job.number, replace(job, folder=job.folder.absolute()), share)
            return
        job = replace(job, folder=job.folder.absolute())
        self._write_token(job.folder)
        nodes = self._cluster.nodes()
        self._prepares_on = len(nodes)
        for node in nodes:
            relay = self._new_relay(share, node)
            self._greet(_Busy(None, job, relay))

    def answer(self, number: int, answer: NextMove) -> None:
        """Answer a trial's last report."""
        busy = next(busy for busy in self._busy if busy.id == number)
        self._exchange(busy, answer)
        if busy.watch is not None:
            busy.watch.answered(self._clock())

    def events(self, timeout: float) -> Iterator[tuple[JobId, Message]]:
        """Wait up to `timeout` seconds for messages and yield them, each with its job.

        A worker that has owed one for too long is killed, and `Lost`.
        """
        for busy, call, outcome in self._wait(timeout):
            if busy in self._busy and busy.call is call:  # ignore calls given up meanwhile
                message = self._hear(busy, outcome)
                if message is not None:
                    yield busy.id, message
        for busy in list(self._busy):
            silence = None if busy.watch is None else busy.watch.verdict(self._clock())
            if silence is not None and self._heard.empty():  # it may have spoken while others were heard
                message = self._ended(busy, Lost(silence))
                if message is not None:
                    yield busy.id, message
        while self._idle and self._clock() - self._idle[0].idle_since >= _IDLE_SECONDS:
            _kill(self._idle.pop(0))
        self._note_waiting()

    def wake(self) -> None:
        """Make a waiting `events` call, or the next one, return at once. Safe in signal handlers."""
        self._heard.put(None)  # which may interrupt itself: SimpleQueue allows that

    def close(self) -> None:
        """Kill all workers and their actors."""
        for relay in (*self._idle, *(busy.relay for busy in self._busy)):
            _kill(relay)
        self._idle, self._busy = [], []
        if self._token is not None:
            self._token.unlink(missing_ok=True)

    # What a job gets

    def _share(self, job: Job) -> _Share:
        ranks = 1 if isinstance(job, PrepareTask) else job.ranks
        threads = self._threads if isinstance(job, PrepareTask) else job.threads
        cpus = min(threads * ranks, int(self._most.cpus))  # threads may share a core: the weights are the same
        shared_by = self._needs.trials_per_gpu
        if not self._has_gpus or job.device == "cpu":
            return _Share(cpus, 0.0)
        if ranks > self._most.gpus:
            raise ConfigError(
                f"{_who(job)} needs {ranks} GPUs of one node, and no node has more than {self._most.gpus:g}"
            )
        if ranks > 1 and shared_by > 1:
            raise ConfigError(f"--trials-per-gpu is not allowed: {_who(job)} needs {ranks} GPUs of its own")
        return _Share(cpus, float(ranks) if shared_by == 1 else math.floor(10_000 / shared_by) / 10_000)

    def _write_token(self, folder: Path) -> None:
        """Write the token to the study's folder, for nodes to check that they see it.

        Raises:
            StoreError: it cannot be written.
        """
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

    def _give(self, job_id: JobId, job: Job, share: _Share) -> None:
        others = [relay for relay in self._idle if relay.share != share]
        for relay in others:  # what they hold may be what this one waits for
            self._idle.remove(relay)
            _kill(relay)
        if self._idle:
            busy = _Busy(job_id, job, self._idle.pop())
            self._busy.append(busy)
            self._begin(busy)
        else:
            self._greet(_Busy(job_id, job, self._new_relay(share)))

    def _greet(self, busy: _Busy) -> None:
        self._busy.append(busy)
        self._expect(busy, busy.relay.actor.greet.remote())

    def _begin(self, busy: _Busy) -> None:
        busy.watch = HangTimeout(self._needs.settings, busy.job, self._clock())
        self._exchange(busy, busy.job)

    def _exchange(self, busy: _Busy, word: Job | NextMove | None) -> None:
        self._expect(busy, busy.relay.actor.exchange.remote(word))

    def _expect(self, busy: _Busy, call: Any) -> None:
        busy.call = call
        call.future().add_done_callback(lambda outcome: self._heard.put((busy, call, outcome)))

    # What comes back

    def _wait(self, timeout: float) -> "list[_Outcome]":
        """Wait for a call to end, a deadline, or `wake`; return the calls that ended."""
        watches = [busy.watch for busy in self._busy if busy.watch is not None]
        before = self._clock()
        seconds = max(0.0, min(timeout, min((watch.deadline for watch in watches), default=math.inf) - before))
        found: list[_Outcome | None] = []
        try:
            found.append(self._heard.get(timeout=seconds))
            while True:
                found.append(self._heard.get_nowait())
        except Empty:
            pass
        late = self._clock() - before - seconds
        if late > LATE_SECONDS:
            for watch in watches:
                watch.excuse(late)
        return [each for each in found if each is not None]

    def _hear(self, busy: _Busy, outcome: "Future[Any]") -> Message | None:
        """Convert a call's result to a message for the controller, or None; then ask the worker for the next."""
        try:
            said = outcome.result()
        except RayError as error:
            lost = self._lost(busy, error)
            if isinstance(lost, Lost) and busy.watch is None and busy.id is not None and busy.starts < _STARTS:
                _kill(busy.relay)
                busy.relay, busy.starts = self._new_relay(busy.relay.share), busy.starts + 1
                self._expect(busy, busy.relay.actor.greet.remote())
                return None
            return self._ended(busy, lost)
        if isinstance(said, Greeting):
            return self._met(busy, said)
        message: Message = said
        if busy.watch is not None:
            busy.watch.heard(message, self._clock())
        if isinstance(message, Prepared | Read | Ended | Left | Failed | Lost):
            return self._ended(busy, message)
        if not isinstance(message, Stepped | NoRoom):
            self._exchange(busy, None)
        if isinstance(message, Progress) and self._prepares_on > 1:
            return replace(message, what=f"{message.what} on {busy.relay.node}")
        return message

    def _met(self, busy: _Busy, greeting: Greeting) -> Message | None:
        """Begin the job if its node has everything it needs."""
        busy.relay.node = busy.relay.node or greeting.host
        if greeting.problem is not None:
            return self._ended(busy, Failed(f"node {busy.relay.node} {greeting.problem}", "", is_for_user=True))
        self._begin(busy)
        return None

    def _ended(self, busy: _Busy, message: Message) -> Message | None:
        """Keep or end the worker of an ended job; return its message, or None while other nodes prepare the task."""
        self._busy.remove(busy)
        is_spent = isinstance(message, Failed | Lost) or (isinstance(message, Ended) and message.is_worker_spent)
        if is_spent:
            _kill(busy.relay)
        else:
            self._keep(busy.relay)
        if busy.id is not None:
            return message
        others = [each for each in self._busy if each.id is None]
        if not is_spent:
            return None if others else message
        for each in others:
            self._busy.remove(each)
            _kill(each.relay)
        if self._prepares_on > 1 and isinstance(message, Failed) and not message.message.startswith("node "):
            return replace(message, message=f"node {busy.relay.node}: {message.message}")
        return message

    def _keep(self, relay: _Relay) -> None:
        """Give a free worker to a waiting job whose share it may be, or keep it idle."""
        waiting = next((busy for busy in self._busy if busy.watch is None and busy.id is not None), None)
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
            self._right_at = self._clock()
        elif self._clock() - self._right_at >= _TELL_SECONDS:
            self._is_waiting = waiting is not None
            self._notices.append("the cluster has room again" if waiting is None else _lack(waiting))

    def _lost(self, busy: _Busy, error: RayError) -> Failed | Lost:
        """Return the message to report for an actor that did not answer."""
        node, text = busy.relay.node or "a node", str(error)
        missing = re.search(r"ModuleNotFoundError: (No module named '(?:tuner|ppo_core|ray)[\w.]*')", text)
        if missing is not None:
            why = f"node {node} cannot run ppo-tuner: {missing[1]}; install the controller's version on all nodes"
            return Failed(why, text, is_for_user=True)
        if not isinstance(error, RayActorError):
            return Failed(f"node {node}: {_line(error)}", text)
        if "node has died" in text:
            return Lost(f"node {node} died")
        return Lost(f"node {node} cannot be reached" if "unavailable" in text else f"its actor on node {node} died")


def _connect(address: str, **more: Any) -> None:
    """Connect to a cluster, retrying while a node that has only just started is not ready.

    Raises:
        ConfigError: nobody listens at the address, or connecting fails for `_CONNECT_SECONDS`.
    """
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **more)
            return
        except Exception as error:  # a connection fails in many ways, and each has a class of its own
            if isinstance(error, ConnectionError | ValueError) or time.monotonic() > until:
                raise ConfigError(f"cannot use the Ray cluster at {address}: {_line(error)}") from error
            ray.shutdown()
            time.sleep(_CONNECT_AGAIN_SECONDS)


def _kill(relay: _Relay) -> None:
    """Kill an actor and its worker process; an unreachable node does so itself when it notices."""
    try:
        ray.kill(relay.actor)
    except (RayError, PPOTunerError, ValueError):
        _log.debug("an actor on %s could not be ended", relay.node)


def _who(job: Job) -> str:
    return "the task's preparation" if isinstance(job, PrepareTask) else f"trial {job.number}"


def _lack(busy: _Busy) -> str:
    """Return a line on the resources that a job needs and those free in the cluster."""
    share, free, total = busy.relay.share, ray.available_resources(), ray.cluster_resources()
    amounts = (("CPU", share.cpus), ("GPU", share.gpus))
    needs = " and ".join(f"{count:g} {unit}{'' if count == 1 else 's'}" for unit, count in amounts if count)
    rest = " and ".join(f"{free.get(unit, 0):g} of {total.get(unit, 0):g} {unit}s" for unit, count in amounts if count)
    where = f"node {busy.relay.node}" if busy.relay.node else "one node"
    return f"waiting for the cluster: {_who(busy.job)} needs {needs} of {where}; {rest} are free in the cluster"


def _needed_packages() -> Sequence[str]:
    """Return the packages that this project requires; none if it is not installed as a package."""
    from packaging.requirements import Requirement

    try:
        declared = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(each.name for each in declared if each.marker is None or each.marker.evaluate())


def _line(error: Exception) -> str:
    """Return one of Ray's errors in one line: the whole error, or the last line of a long one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    return (text if len(text) <= _LONGEST else lines[-1]) if lines else type(error).__name__

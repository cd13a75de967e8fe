"""The connection to a Ray cluster, and its nodes' resources."""

import io
import logging
import os
import sys
import threading
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Self, TextIO

import ray

from ppo_core.errors import ConfigError
from ppo_core.output import pluralize

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own variable: the cluster to use. Unset: one is started on this machine, and ends with this process."""
_LOCAL = "local"
_STORE_BYTES = 80 * 2**20  # size of the object store of a cluster started here; messages are a few kilobytes each
_CONNECT_SECONDS, _CONNECT_AGAIN_SECONDS = 20.0, 1.0
"""Total time to retry a connection, and the pause between two tries."""
_LONGEST = 400  # longest error, in characters, that is shown whole


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
        """Not connected yet. `address`: `ray://host:10001` or `auto`; None: RAY_ADDRESS, else one started here."""
        self.address = address or os.environ.get(ADDRESS_VARIABLE) or _LOCAL

    def __enter__(self) -> Self:
        is_local = self.address == _LOCAL
        options = {"include_dashboard": False, "object_store_memory": _STORE_BYTES} if is_local else {}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)  # it prints advice at each start
        _connect(self.address, **options)
        self._stdout = sys.stdout
        sys.stdout = _WithoutRay(sys.stdout)
        return self

    def __exit__(self, *_: object) -> None:
        with redirect_stdout(io.StringIO()):  # it prints its threads' pending output
            ray.shutdown()
        sys.stdout = self._stdout

    def nodes(self) -> list[Node]:
        """Return the nodes that trials may run on: those with a GPU, if any has one, else those with a CPU."""
        nodes = []
        for each in ray.nodes():
            if each["Alive"]:
                host, name, has = each["NodeManagerHostname"], each["NodeName"], each["Resources"]
                label = host if name in (host, each["NodeManagerAddress"]) else f"{name} on {host}"
                nodes.append(Node(each["NodeID"], label, has.get("CPU", 0.0), has.get("GPU", 0.0)))
        return [node for node in nodes if node.gpus > 0] or [node for node in nodes if node.cpus >= 1]

    @property
    def size_line(self) -> str:
        """Nodes for trials, such as `Ray cluster: 2 nodes, 16 CPUs, 4 GPUs`."""
        nodes = self.nodes()
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
        return f"Ray cluster: {pluralize(len(nodes), 'node')}, {pluralize(cpus, 'CPU')}, {pluralize(gpus, 'GPU')}"

    def threads_per_trial(self, workers: int) -> int:
        """Return the most threads that each of `workers` simultaneous trials can have; at least 1."""
        cpus = [int(node.cpus) for node in self.nodes()]
        counts = range(max(cpus, default=1), 0, -1)
        return next((count for count in counts if sum(each // count for each in cpus) >= workers), 1)


class _WithoutRay:
    """An output stream that drops text of Ray's threads on lost nodes, which the engine reports itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text unless a thread of Ray's prints it."""
        return len(text) if threading.current_thread().name.startswith("ray_") else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _connect(address: str, **options: Any) -> None:
    """Connect, retrying while a node that has just started is not ready; ConfigError: nobody listens, or time is up."""
    until = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception as error:  # of many classes
            if isinstance(error, ConnectionError | ValueError) or time.monotonic() > until:
                raise ConfigError(f"cannot use the Ray cluster at {address}: {error_line(error)}") from error
            ray.shutdown()
            time.sleep(_CONNECT_AGAIN_SECONDS)


def error_line(error: Exception) -> str:
    """Return one of Ray's errors on one line: the whole error, or the last line of a long one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines)
    return text if len(text) <= _LONGEST else lines[-1]

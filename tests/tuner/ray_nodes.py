"""Real Ray clusters of several nodes on this machine, of which a test may lose one."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import end_family
from tests.waiting import until

ROOT = Path(__file__).parents[2]
STORE_BYTES = 80 * 2**20
# Ray listens on a network. The nodes and the controllers of a test inherit its token; Ray reads it when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
pytest.importorskip("ray")


class Nodes:
    """A head without a CPU, so that no trial runs on it, and the nodes that a test adds."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        args = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False} | head
        self._cluster = Cluster(initialize_head=True, head_node_args=args)
        self._nodes: dict[str, Any] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """What RAY_ADDRESS says."""
        address: str = self._cluster.address
        return address

    def add(self, name: str, **resources: Any) -> None:
        """Add a node with one CPU, unless told otherwise."""
        wanted = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "node_name": name} | resources
        self._nodes[name] = self._cluster.add_node(**wanted)

    def add_process(self, name: str, gpus: int) -> None:
        """Add a node with one CPU and GPUs that it only counts, by `ray start`."""
        program = str(Path(sys.executable).with_name("ray"))
        resources = ["--num-cpus=1", f"--num-gpus={gpus}", f"--object-store-memory={STORE_BYTES}"]
        start = [program, "start", f"--address={self.address}", f"--node-name={name}", *resources, "--block"]

        def came() -> bool:
            if name not in self._started or self._started[name].poll() is not None:  # on a busy machine Ray gives up
                self._started[name] = subprocess.Popen(
                    start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
                )
            return name in self.alive()

        until(came, lambda: f"node {name} does not come: {self.alive()}")

    def alive(self) -> list[str]:
        """Return the names of the nodes that are alive."""
        table = self._cluster.global_state.node_table()
        return [node["NodeName"] for node in table if node["Alive"]]

    def remove(self, name: str) -> None:
        """Take a node away, with all that runs on it."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def kill(self, name: str) -> None:
        """Kill a node's raylet alone, as the kernel does where memory runs out."""
        self._nodes[name].all_processes["raylet"][0].process.send_signal(signal.SIGKILL)

    def end_process(self, name: str) -> None:
        """Kill all processes of a node that was added as one."""
        end_family(self._started.pop(name))

    def end(self) -> None:
        """End all nodes."""
        try:
            for name in list(self._started):
                self.end_process(name)
        finally:
            self._cluster.shutdown()


@contextmanager
def nodes(*names: str, **head: Any) -> Iterator[Nodes]:
    """Start a cluster with a head and nodes of these names, and see that nothing of it outlives the test."""
    made = Nodes(**head)
    try:
        for name in names:
            made.add(name)
        yield made
    finally:
        made.end()

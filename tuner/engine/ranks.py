"""The other processes of a trial that several train together: its worker is rank 0, starts them, and ends them.

They belong to the worker's process group, so whatever ends the worker ends them. Where one of them dies, the worker
ends at once, in the middle of whatever it waits for: the trial is then `Lost`, and resumes from its checkpoint.
"""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess

from ppo_core import leading

_END_SECONDS = 10.0
"""How long the others have to end once they were dismissed."""
_NOTICE_SECONDS = 2.0
"""How much sooner a broken connection may be noticed than the death that broke it."""
_LOST_A_RANK = 1
"""The worker's exit code where one of them died."""


@contextmanager
def started(count: int) -> Iterator[None]:
    """Have this process be rank 0 of `count` inside, with the others started; for one, nothing is done."""
    if count == 1:
        yield
        return
    variables = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port()}
    os.environ.update({name: str(value) for name, value in variables.items()} | {"RANK": "0", "LOCAL_RANK": "0"})
    context = get_context("spawn")
    others = [context.Process(target=_follow, args=(rank,), name=f"rank {rank}") for rank in range(1, count)]
    for process in others:
        process.start()
    dismissed = threading.Event()
    watch = threading.Thread(target=_watch, args=(others, dismissed), daemon=True)
    watch.start()
    try:
        yield
    except RuntimeError:
        watch.join(_NOTICE_SECONDS)  # where another one's death is the cause, the watch says so and ends this one
        raise
    finally:
        dismissed.set()
        leading.dismiss()
        for process in others:
            process.join(_END_SECONDS)
            process.kill()
        for name in (*variables, "RANK", "LOCAL_RANK"):
            del os.environ[name]


def _follow(rank: int) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    sys.exit(leading.follow())


def _watch(others: list[BaseProcess], dismissed: threading.Event) -> None:
    """End this process where one of the others ends before it was dismissed."""
    ended = connection.wait([process.sentinel for process in others])
    if dismissed.is_set():
        return
    for rank, process in enumerate(others, start=1):
        if process.sentinel in ended:
            process.join(1)
            print(f"rank {rank} of {len(others) + 1} ended with exit code {process.exitcode}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(_LOST_A_RANK)


def _port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])

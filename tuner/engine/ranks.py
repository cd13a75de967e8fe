"""The other processes of a trial that several train together: its worker is rank 0, starts them, and ends them.

They belong to the worker's process group, so whatever ends the worker ends them. Where one of them raises an error or
dies, the worker ends at once, in the middle of whatever it waits for: the trial has `Failed` with that error, or is
`Lost`, and resumes from its checkpoint.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from typing import TypeAlias

from ppo_core import leading
from tuner.protocol import Failed

_END_SECONDS = 10.0
"""How long the others have to end once they were dismissed."""
_NOTICE_SECONDS = 2.0
"""How much sooner a broken connection may be noticed than the death that broke it."""
_LOST_A_RANK = 1
"""The worker's exit code where one of them died."""
_Pipe: TypeAlias = "connection.Connection[Failed, Failed]"


@contextmanager
def started(count: int, fail: Callable[[Failed], None]) -> Iterator[None]:
    """Have this process be rank 0 of `count` inside, with the others started; for one, nothing is done.

    Where one of the others raises an error, `fail` is called with it, and this process ends.
    """
    if count == 1:
        yield
        return
    variables = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port()}
    os.environ.update({name: str(value) for name, value in variables.items()} | {"RANK": "0", "LOCAL_RANK": "0"})
    context = get_context("spawn")
    others: list[BaseProcess] = []
    pipes: list[_Pipe] = []
    for rank in range(1, count):
        pipe, theirs = context.Pipe(duplex=False)
        process: BaseProcess = context.Process(target=_follow, args=(rank, theirs), name=f"rank {rank}")
        process.start()
        theirs.close()  # so that the pipe ends when the process does
        others.append(process)
        pipes.append(pipe)
    dismissed = threading.Event()
    watch = threading.Thread(target=_watch, args=(others, pipes, fail, dismissed), daemon=True)
    watch.start()
    try:
        yield
    except RuntimeError:
        watch.join(_NOTICE_SECONDS)  # where another one is the cause, the watch says so and ends this one
        raise
    finally:
        dismissed.set()
        seconds = 0.0
        try:
            seconds = _END_SECONDS if leading.dismiss() else 0.0
        finally:
            for process in others:
                process.join(seconds)
                process.kill()
            for name in (*variables, "RANK", "LOCAL_RANK"):
                del os.environ[name]


def _follow(rank: int, pipe: _Pipe) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    sys.exit(leading.follow(lambda error: pipe.send(Failed.of(error))))


def _watch(
    others: Sequence[BaseProcess], pipes: Sequence[_Pipe], fail: Callable[[Failed], None], dismissed: threading.Event
) -> None:
    """End this process where one of the others fails or ends before it was dismissed."""
    ready = connection.wait([*pipes, *(process.sentinel for process in others)])
    if dismissed.is_set():
        return
    try:
        for rank, (process, pipe) in enumerate(zip(others, pipes, strict=True), start=1):
            which = f"rank {rank} of {len(others) + 1}"
            failed = _received(pipe)
            if failed is not None:
                print(f"{which} failed: {failed.message}", file=sys.stderr)
                fail(failed)
                break
            if pipe in ready or process.sentinel in ready:
                process.join(1)
                print(f"{which} ended with exit code {process.exitcode}", file=sys.stderr)
        sys.stderr.flush()
    finally:
        os._exit(_LOST_A_RANK)


def _received(pipe: _Pipe) -> Failed | None:
    """Return the error that one of the others told of; None: it told of none."""
    try:
        return pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None


def _port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])

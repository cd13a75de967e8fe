"""Work in a process of its own, with a time limit: what breaks or hangs there ends with that process."""

import multiprocessing
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

GRACE_SECONDS = 15.0
"""For a process that has done its work, or was told to end, to be gone."""


class Failed(Exception):
    """What was tried failed; the text says why, in one line."""


def one_line(error: BaseException) -> str:
    """Return an error's kind and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return message if isinstance(error, Failed) else f"{type(error).__name__}: {message}"


def in_own_process(seconds: float, work: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Return what `work` returns in a new process.

    A CUDA error leaves a process without a usable GPU; one of its own leaves the next measurement alone.

    Raises:
        Failed: it raised an error, its process died, or it took longer than `seconds`.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, work, arguments, options))
    process.start()
    sender.close()  # so that the pipe ends with the process
    try:
        if not receiver.poll(seconds):
            raise Failed(f"did not end within {seconds:.0f} s")
        result, error = receiver.recv()
        process.join(GRACE_SECONDS)
    except EOFError:
        process.join(GRACE_SECONDS)
        raise Failed(f"its process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise Failed(error)
    found: Result = result
    return found


def _report(sender: "Connection[Any, Any]", work: Callable[..., Any], arguments: Any, options: Any) -> None:
    try:
        result, error = work(*arguments, **options), None
    except Exception as raised:
        traceback.print_exc()
        result, error = None, one_line(raised)
    sender.send((result, error))


def run_limited(
    seconds: float, command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run a command in a folder; return its status, None where it was ended after `seconds`, and what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:  # no pipe, which what is left behind would hold open
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        status = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        return status, log.read()

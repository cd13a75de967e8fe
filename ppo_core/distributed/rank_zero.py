"""One run in several processes: each runs the same loop with its own trainer, and rank 0 decides.

torchrun, `accelerate launch` and a study's worker start the same program W times. Work for one process alone is done
by rank 0, inside `on_rank_zero`: choose folders, write files, show steps, read clocks, ask the driver. All processes
then continue with its result.

Our own errors are raised in all processes. Any other error ends its process at once; the launcher then ends the rest.
Torch is imported only if there are several processes.
"""

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ppo_core.distributed import launch as launched

T = TypeVar("T")


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` in rank 0, and return its result in all processes, or raise our own error in all.

    The `work` of other processes is ignored. The result must pickle.
    """
    if launched.size() == 1:
        return work()
    from ppo_core.distributed.world import init_process_group, run_on_rank_zero

    return run_on_rank_zero(init_process_group(), work)


def first_from_any_rank(value: T | None) -> T | None:
    """Return the value of the first process that has one, in all processes."""
    if launched.size() == 1:
        return value
    from ppo_core.distributed.world import init_process_group

    return next((each for each in init_process_group().gather_objects([value]) if each is not None), None)


def drive(work: Callable[[], int]) -> int:
    """Run a program's `work` in all processes of its launch and return its result; rank 0 alone prints.

    Raises ConfigError if the launcher asks for something unsupported.
    """
    launched.require_known()
    if launched.size() == 1:
        return work()
    from ppo_core.distributed.world import init_process_group

    if launched.rank() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the rest of the process
    try:
        status = work()
        init_process_group().agree(True)  # no process leaves while another still needs it
    except BaseException as error:
        is_success = isinstance(error, SystemExit) and not error.code  # --help
        atexit.register(_end_at_once, 0 if is_success else 1)
        raise
    atexit.register(_end_at_once, status)
    return status


def _end_at_once(status: int) -> None:
    """End this process without torch's own shutdown, which waits for the others or aborts."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)

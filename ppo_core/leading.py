"""Several processes for one run: rank 0 drives it, and the others do with their trainer what it does with its own.

torchrun, `accelerate launch` and a study's worker start the same program W times. Rank 0 alone reads the command line,
writes files, shows steps and judges them; the others wait to be asked. So whatever drives a trainer drives several
processes without a line of its own: `ppo_core.trainer.ppo_trainer` hands out a `Leader`. Torch is imported only where
there is something to train.

    rank 0                      the others
    make(...)                   make(...)           `Leader.of`; an error of one is raised in all
    next(trainer)               next(trainer)       each step, together
    evaluated, tested           the same
    save, save_model            the same, to hand over sharded weights; rank 0 writes
    dismiss()                   end

An error of ours is raised in all of them, and the run may go on. Any other one leaves the others in the middle of a
call that nobody finishes: where rank 0 raised it, it asks for nothing more and ends; where another one did, that one
ends at once. Whatever started the processes then ends the rest.
"""

import atexit
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ppo_core.errors import OUT_OF_MEMORY, PPOTunerError, is_out_of_memory
from ppo_core.launched import rank, require_known, size
from ppo_core.report import SplitReading, StepReport

if TYPE_CHECKING:
    from ppo_core.process_group import ProcessGroup

T = TypeVar("T")

# Rank 0.


@dataclass(frozen=True)
class _Call:
    """What all processes do next."""

    what: str
    arguments: tuple[Any, ...] = ()


class Leader:
    """Rank 0's trainer: what is asked of it is asked of the others', too.

    Once one of its calls raised what is no error of ours, each further one raises RuntimeError.
    """

    def __init__(self, world: "ProcessGroup", trainer: Any) -> None:
        self._world, self._trainer = world, trainer

    @classmethod
    def of(cls, world: "ProcessGroup", make: Callable[..., Any], *arguments: Any) -> "Leader":
        """Return the trainer `make(*arguments)`, a function of a module, that all processes make.

        Raises:
            PPOTunerError: one of them could not.
        """
        call = _Call("make", (make, arguments, _threads()))
        return cls(world, _by_all(world, call, lambda: _made(world, make, arguments)))

    def __iter__(self) -> Iterator[StepReport]:
        """Yield the steps' reports, which are of all processes."""
        steps = iter(self._trainer)
        while True:
            report = self._by_all(_Call("step"), lambda: next(steps, None))
            if report is None:
                return
            yield report

    def evaluated(self, report: StepReport) -> StepReport:
        """Return the step's report with an evaluation of the policy as it is now."""
        evaluated: StepReport = self._by_all(_Call("evaluated", (report,)), lambda: self._trainer.evaluated(report))
        return evaluated

    def tested(self) -> SplitReading | None:
        """Return what the policy comes to on the task's test prompts; None: the task has none."""
        reading: SplitReading | None = self._by_all(_Call("tested"), self._trainer.tested)
        return reading

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint; any number of processes can resume from it."""
        self._by_all(_Call("save", (folder, extra)), lambda: self._trainer.save(folder, extra))

    def checkpoint_bytes(self) -> int:
        """Return about how large a checkpoint is, in bytes."""
        return int(self._trainer.checkpoint_bytes())

    def save_model(self, folder: Path) -> None:
        """Write the trained policy as a folder that transformers or peft loads."""
        self._by_all(_Call("save_model", (folder,)), lambda: self._trainer.save_model(folder))

    def _by_all(self, call: _Call, work: Callable[[], T]) -> T:
        return _by_all(self._world, call, work)


def _by_all(world: "ProcessGroup", call: _Call, work: Callable[[], T]) -> T:
    """Return what `work` returns, which is this process's part of a call.

    Raises:
        RuntimeError: an earlier call broke off here, and the others are still in it.
    """
    if world.is_broken:
        raise RuntimeError("an error of an earlier call left this run's other processes behind; nothing can follow it")
    try:
        world.from_first(call)
        return work()
    except PPOTunerError:
        raise
    except BaseException:
        world.is_broken = True
        raise


def drive(work: Callable[[], int]) -> int:
    """Return what a program's `work` returns, done by rank 0 alone of the processes of its launch.

    Raises:
        ConfigError: the launcher asks for what is not done here.
    """
    require_known()
    if rank() != 0:
        return follow(_say_out_of_memory)
    try:
        return work()
    finally:
        if not dismiss():
            atexit.register(_end_at_once)


def dismiss() -> bool:
    """End the other processes of this launch, whether or not they were ever asked for anything.

    Returns:
        Whether they end by themselves; if not, whatever started them has to end them.
    """
    if size() == 1:
        return True
    from ppo_core import process_group

    with suppress(RuntimeError):  # one of them died, or they never met
        world = _world()
        if not world.is_broken:
            world.from_first(_Call("end"))
            process_group.leave()
            return True
    return False


def _end_at_once() -> None:
    """End this process without torch's own leave-taking, which waits for the others or aborts."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


# The others.


def follow(tell: Callable[[Exception], None]) -> int:
    """Do what rank 0 does until it says that it is done, and return the exit status.

    An error that is none of ours is printed and given to `tell`, and ends this process.
    """
    from ppo_core import process_group

    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 gets them too, and stops the run in good order
        signal.signal(number, signal.SIG_IGN)

    world = _world()
    trainer: Any = None
    steps: Iterator[StepReport] = iter(())
    while True:
        call = world.from_first()
        assert isinstance(call, _Call)
        try:
            match call.what:
                case "make":
                    make, arguments, threads = call.arguments
                    trainer, steps = None, iter(())  # before another one is loaded
                    _set_threads(threads)
                    trainer = _made(world, make, arguments)
                    steps = iter(trainer)
                case "step":
                    next(steps, None)
                case "end":
                    process_group.leave()
                    return 0
                case what:
                    getattr(trainer, what)(*call.arguments)
        except PPOTunerError:
            pass  # raised in all processes: rank 0 says what becomes of the run
        except BaseException as error:
            traceback.print_exc()
            with suppress(OSError):  # whoever is told may have ended
                if isinstance(error, Exception):
                    tell(error)
                sys.stderr.flush()
            os._exit(1)  # at once, so that the others, which wait for this one, learn of it


def _say_out_of_memory(error: Exception) -> None:
    if is_out_of_memory(error):
        print(f"ppo_core: error: {OUT_OF_MEMORY}", file=sys.stderr)


def _world() -> "ProcessGroup":
    """Return the world of this process of several."""
    from ppo_core import process_group

    world = process_group.joined()
    assert isinstance(world, process_group.ProcessGroup)
    return world


def _made(world: "ProcessGroup", make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    from ppo_core.world import together

    return together(world, lambda: make(*arguments))


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)

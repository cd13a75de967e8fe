"""File work beside the controller's loop: one thread that does one piece after the other, in the order given. No torch.

Hashing, copying and removing checkpoints takes from a second to minutes. The loop, which alone uses the store, goes on
meanwhile, and takes up what is done in its own thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class FileWork:
    """Pieces of work and what follows from each. Close it, or use it in a `with` statement."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        """Called in the other thread when a piece is done: there is something to `collect`."""
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "FileWork":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None or not issubclass(kind, KeyboardInterrupt))

    @property
    def is_busy(self) -> bool:
        """Whether there is work that is not done, or not collected."""
        return self._open > 0

    def give(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Have `work` done in the other thread, after all that was given before.

        `collect` calls `then` with its outcome. `work` must use neither the store nor what the loop changes.
        """
        outcome: Future[T] = Future()

        def piece() -> None:
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)
            self._done.put(lambda: then(outcome))

        self._open += 1
        self._given.put(piece)
        if self._thread is None:
            # A daemon: a second Ctrl-C ends the process at once; a checkpoint that is cut off does not exist.
            self._thread = threading.Thread(target=self._work, name="file work", daemon=True)
            self._thread.start()

    def collect(self) -> None:
        """Do in this thread what follows from each piece that is done; what that raises is raised here."""
        while True:
            try:
                follow = self._done.get_nowait()
            except Empty:
                return
            self._open -= 1
            follow()

    def close(self, *, wait: bool = True) -> None:
        """Forget what has not begun and, unless told not to `wait`, let what has begun come to its end."""
        try:
            while True:
                self._given.get_nowait()
        except Empty:
            self._given.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (piece := self._given.get()) is not None:
            piece()
            self.on_done()

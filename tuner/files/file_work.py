"""A thread for work on files: hashing, copying and deleting checkpoints takes from a second to minutes.

It does one piece after the other, while the controller's loop, which alone uses the store, goes on and collects the
results.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Self, TypeVar

T = TypeVar("T")


class FileWork:
    """A queue of file work with follow-ups. Close it, or use it in a `with` statement."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        """Called in the worker thread when a piece is done and ready to `collect`."""
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open = 0
        # A daemon: a second Ctrl-C ends the process at once; a checkpoint that is cut off does not exist.
        self._thread = threading.Thread(target=self._work, name="file work", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None or not issubclass(kind, KeyboardInterrupt))

    @property
    def is_busy(self) -> bool:
        """True if any work is not done or not collected."""
        return self._open > 0

    def give(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Queue `work` for the worker thread, in order.

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

    def collect(self) -> None:
        """Run the follow-ups of finished work in this thread; their errors are raised here."""
        while not self._done.empty():
            follow = self._done.get()
            self._open -= 1
            follow()

    def close(self, *, wait: bool = True) -> None:
        """Drop queued work and, unless `wait` is false, let the current piece finish."""
        try:
            while True:
                self._given.get_nowait()
        except Empty:
            self._given.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (piece := self._given.get()) is not None:
            piece()
            self.on_done()

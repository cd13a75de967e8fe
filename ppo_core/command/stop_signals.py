"""Ctrl-C and SIGTERM while a run goes on: the first asks for an orderly stop, the second ends at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted"
_REASONS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: "told to end by SIGTERM"}


class StopRequest:
    """Whether a stop was asked for, and why."""

    def __init__(self) -> None:
        self.why: str | None = None
        self.on_request: Callable[[], None] = lambda: None
        """Called in the signal's handler, to end a wait."""

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Note the first signal; raise KeyboardInterrupt at the second."""
        if self.why is not None:
            raise KeyboardInterrupt
        self.why = _REASONS[signal.Signals(number)]
        self.on_request()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Handle the signals for as long as the context lasts (only the main thread can; elsewhere none arrives)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in _REASONS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)

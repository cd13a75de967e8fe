"""Ctrl-C and SIGTERM during a run: the first asks for an orderly stop, the second ends at once."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ppo_core.distributed import launch as launched

INTERRUPTED = "interrupted"
_REASONS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: "ended by SIGTERM"}
_PASSED_ON_SECONDS = 5.0
"""A repeated signal within this time counts as one: launchers forward a Ctrl-C that their processes
also got from the terminal.
"""


class StopRequest:
    """A request to stop, with its reason."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._since = 0.0
        self.on_request: Callable[[], None] = lambda: None
        """Called in the signal's handler, to end a wait."""

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Note the first signal; raise KeyboardInterrupt at the second."""
        if self.why is not None:
            if launched.size() > 1 and time.monotonic() - self._since < _PASSED_ON_SECONDS:
                return
            raise KeyboardInterrupt
        self._since = time.monotonic()
        self.why = _REASONS[signal.Signals(number)]
        self.on_request()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Handle the signals inside the context (in the main thread; elsewhere none arrive)."""
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

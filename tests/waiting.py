"""Waiting in a test for a state that is to come. The deadline is generous: a machine under load may be very slow."""

import time
from collections.abc import Callable

SECONDS = 240.0
"""How long a test waits for anything; below pytest's own limit, so that the assertion says what it waited for."""


def until(is_so: Callable[[], object], why: Callable[[], object] = lambda: "it never came") -> None:
    """Wait until the condition holds, asking again and again; after the deadline fail with `why`."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)

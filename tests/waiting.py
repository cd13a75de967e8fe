"""Waiting in a test for a state that is to come. The deadline is generous: a machine under load may be very slow."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 240.0
"""How long a test waits for anything; below pytest's own limit, so that the assertion says what it waited for."""


def until(look: Callable[[], T], why: Callable[[], object] = lambda: "it never came") -> T:
    """Look again and again until what is seen is true, and return it; after the deadline fail with `why`."""
    deadline = time.monotonic() + SECONDS
    while not (seen := look()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)
    return seen

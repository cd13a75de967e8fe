"""What the dashboard's tests share: a browser, and one page under test kept from being seen by another test."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser

from tests.chromium import NoBrowser
from tests.dashboard import browser as real


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; without one its tests are skipped, and `make test` fails at its end."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(real.chromium())
        except NoBrowser as error:
            pytest.skip(str(error))
        yield started


@pytest.fixture(autouse=True)
def same_main_module() -> Iterator[None]:
    """`AppTest` leaves the page's script as `__main__`; a process spawned later would run it."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before

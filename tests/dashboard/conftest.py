"""Keeps one page under test from being seen by another test."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_main_module() -> Iterator[None]:
    """`AppTest` leaves the page's script as `__main__`; a process spawned later would run it."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before

"""What all tests share."""

import os

import pytest
from hypothesis import settings

from ppo_core.task import TaskAssets, get_task

# One thread for every process the tests start: results then do not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# New examples are for those who develop; continuous integration repeats the same ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def assets() -> TaskAssets:
    """The reviews task as it ships."""
    return get_task("reviews").prepare(None)

"""What all tests share."""

import os

import pytest
from hypothesis import settings

from ppo_core.task import TaskAssets
from ppo_core.task_file import get_task

# One thread for every process the tests start: results then do not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes start here: they compile the modules once, also where a container says otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# New examples are for those who develop; continuous integration repeats the same ones. No test asserts a time.
settings.register_profile("own", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("own")


@pytest.fixture(scope="session")
def assets() -> TaskAssets:
    """The reviews task as it ships."""
    return get_task("reviews").prepare(None)

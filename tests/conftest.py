"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

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
def task_cache(pytestconfig: pytest.Config) -> Iterator[Path]:
    """Where tasks are prepared: pytest's own cache, which lasts between runs (folders are named by what they hold)."""
    assert pytestconfig.cache
    folder = pytestconfig.cache.mkdir("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPO_TUNER_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def assets(task_cache: Path) -> TaskAssets:
    """The reviews task as it ships."""
    return get_task("reviews").prepare(None)

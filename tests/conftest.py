"""What all tests share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.data.task import TaskAssets
from ppo_core.loading.task_file import get_task
from tests.chromium import COMMAND, NO_BROWSER

# One thread for every process the tests start: results then do not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Commands to copy begin with the program's name alone, as where its environment is activated.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# Hundreds of processes start here: they compile the modules once, also where a container says otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

try:
    from hypothesis import settings
except ImportError:  # `make gpu` runs tests that need no hypothesis where it is not installed
    pass
else:
    # New examples are for those who develop; continuous integration repeats the same ones. No test asserts a time.
    settings.register_profile("own", deadline=None, derandomize=bool(os.environ.get("CI")))
    settings.load_profile("own")


MAIN = sys.modules["__main__"]


@pytest.fixture(autouse=True)
def main_module() -> None:
    """`AppTest` leaves a page's script as `__main__`, which a process spawned later would run."""
    sys.modules["__main__"] = MAIN


@pytest.fixture(scope="session")
def assets() -> TaskAssets:
    """The reviews task as it ships."""
    return get_task("reviews").prepare(None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Say in the last line how many tests had no browser; in continuous integration that is a failure."""
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker of several
        return
    skipped = [report for report in reporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if skipped:
        reporter.ensure_newline()
        reporter.write_line(
            f"Tests in a browser that were skipped: {len(skipped)}. No Chromium starts here; get one with: {COMMAND}"
        )
        if os.environ.get("CI"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

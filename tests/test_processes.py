"""What a test starts does not outlive it."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.processes import spawned
from tests.waiting import until

PARENT = """
import subprocess
child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_nothing_outlives_a_block_that_fails() -> None:
    with (
        pytest.raises(AssertionError, match="the test failed"),
        spawned([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent,
    ):
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGSTOP)  # a halted process answers nothing gentler than a kill
        raise AssertionError("the test failed")
    assert parent.returncode == -signal.SIGKILL
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)

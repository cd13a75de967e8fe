"""GPUs of this machine: which torch sees, and several worker processes on one of them.

Workers that share a GPU have a process and a CUDA context each. NVIDIA's MPS lets their kernels run side by side where
it can be started; without it they take turns (docs.nvidia.com/deploy/mps). Each may allocate its share of the memory
and no more, so that a trial that grows does not take its neighbours' room. A CUDA error ends its own process; MPS
reports it to the others on that GPU, too, and what it ends resumes from its checkpoint like any trial that failed.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ppo_core.errors import ConfigError
from tuner.protocol import GPU_VARIABLE, SHARED_BY_VARIABLE

_SEES_A_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
_QUIT_SECONDS = 10.0

_log = logging.getLogger(__name__)


def require_gpus(gpus: Sequence[str]) -> None:
    """Raise ConfigError where torch does not see one of the GPUs, as CUDA_VISIBLE_DEVICES names them."""
    unseen = unseen_gpus(gpus)
    if unseen:
        which = f"GPU{'s' if len(unseen) > 1 else ''} {', '.join(unseen)}"
        raise ConfigError(f"--gpus {','.join(gpus)} is not allowed: torch does not see {which} on this machine")


def unseen_gpus(gpus: Sequence[str]) -> list[str]:
    """Return those of the GPUs that torch does not see, as CUDA_VISIBLE_DEVICES names them.

    A process for each of them asks, with that GPU alone, as a worker has it: this one loads neither torch nor CUDA.
    """
    command = [sys.executable, "-c", _SEES_A_GPU]
    asked = {
        gpu: subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, stderr=subprocess.DEVNULL)
        for gpu in gpus
    }
    return [gpu for gpu, process in asked.items() if process.wait() != 0]


def _sees_a_gpu(environment: Mapping[str, str]) -> bool:
    asked = subprocess.run([sys.executable, "-c", _SEES_A_GPU], env=environment, stderr=subprocess.DEVNULL)
    return asked.returncode == 0


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them; none where it sees none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    counted = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True).stdout.strip()
    count = int(counted) if counted.isdigit() else 0
    names = [name.strip() for name in named.split(",")] if named else [str(index) for index in range(count)]
    return tuple(names[:count])


class Mps:
    """NVIDIA's MPS for the workers of one engine: a daemon that this one started, one that runs already, or none."""

    _SCRIPT = "nvidia-cuda-mps-control -d && { read -r _; echo quit | nvidia-cuda-mps-control; }"
    """Ends the daemon when its input ends, so also when the process that holds it was killed."""

    def __init__(self) -> None:
        """Start the daemon where there is one to start and none is named by CUDA_MPS_PIPE_DIRECTORY."""
        self.variables: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        if "CUDA_MPS_PIPE_DIRECTORY" in os.environ or shutil.which("nvidia-cuda-mps-control") is None:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="ppo-tuner-mps-", ignore_cleanup_errors=True)
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": self._folder.name,
            "CUDA_MPS_LOG_DIRECTORY": str(Path(self._folder.name, "log")),
        }
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | self.variables,
            start_new_session=True,
        )
        if not _sees_a_gpu(os.environ | self.variables) and _sees_a_gpu(os.environ):
            _log.warning("MPS starts here, but no GPU is seen under it: workers take turns on each GPU instead")
            self.close()
            self.variables = {}

    def close(self) -> None:
        """End the daemon that this one started; its clients are to have ended."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._folder.cleanup()


# In the worker

_CONTEXT_BYTES = 512 * 2**20
"""About what CUDA and torch's kernels take of a GPU for each process, beside what it allocates."""


def require_own_gpu() -> None:
    """Raise ConfigError where this worker was given a GPU that torch does not see: it would train on the CPU."""
    torch, gpu = sys.modules.get("torch"), os.environ.get(GPU_VARIABLE)
    if torch is not None and gpu is not None and not torch.cuda.is_available():
        raise ConfigError(f"--gpus names GPU {gpu}, and torch sees no such GPU here")


def limit_memory() -> None:
    """Let this worker allocate its share of the GPU that it was given, and no more; torch must have been imported."""
    torch, shared_by = sys.modules.get("torch"), int(os.environ.get(SHARED_BY_VARIABLE, "1"))
    if torch is not None and shared_by > 1 and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_share(total, shared_by))


def memory_share(total: int, shared_by: int) -> float:
    """Return which share of a GPU's bytes each of so many processes may allocate, beside its context.

    Raises:
        ConfigError: the contexts alone take all of it.
    """
    share = 1 / shared_by - _CONTEXT_BYTES / total
    if share <= 0:
        raise ConfigError(
            f"--trials-per-gpu {shared_by} is not allowed: CUDA alone takes {_CONTEXT_BYTES / 2**30:g} GiB for each, "
            f"and the GPU has {total / 2**30:.1f} GiB"
        )
    return share

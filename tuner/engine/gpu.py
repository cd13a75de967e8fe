"""This machine's GPUs: list those that torch sees, and share one among several workers.

Workers that share a GPU have a process and a CUDA context each. NVIDIA's MPS, which the user starts, lets their kernels
run side by side (docs.nvidia.com/deploy/mps). Each worker's memory is capped at its share, so that a growing trial does
not starve its neighbours. A CUDA error ends its process; with MPS also the others', which resume from checkpoints.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ppo_core.errors import ConfigError
from tuner.engine.protocol import GPU_VARIABLE, SHARED_BY_VARIABLE
from tuner.environment import to_copy

_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
_SEES_SECONDS = 120.0  # timeout for torch to answer: its first import from a network file system is slow
_MPS_CONTROL = "nvidia-cuda-mps-control"
_MPS_SECONDS = 10.0
_CONTEXT_BYTES = 512 * 2**20
"""Approximate memory of a process on a GPU for CUDA and torch's kernels, beside its allocations."""


def require_gpus(gpus: Sequence[str]) -> None:
    """Raise ConfigError if torch does not see one of the GPUs, each tried in a process of its own, as a worker is."""
    with ThreadPoolExecutor() as pool:
        counts = zip(gpus, pool.map(lambda gpu: _count({"CUDA_VISIBLE_DEVICES": gpu}), gpus), strict=True)
        unseen = [gpu for gpu, count in counts if not count]
    if unseen:
        which = f"GPU{'s' if len(unseen) > 1 else ''} {', '.join(unseen)}"
        raise ConfigError(f"--gpus {','.join(gpus)} is not allowed: torch does not see {which} on this machine")


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that torch sees, in the form of CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: torch does not answer, for example because the driver hangs.
    """
    count = _count({})
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return tuple(name.strip() for name in names.split(",")[:count])


def _count(variables: Mapping[str, str]) -> int:
    """Return how many GPUs torch sees with these variables, in a new process: this one loads neither torch nor CUDA."""
    command, environment = [sys.executable, "-c", _COUNT_GPUS], os.environ | variables
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SEES_SECONDS)
    except subprocess.TimeoutExpired:
        why = f"torch does not answer within {_SEES_SECONDS:g} s which GPUs it sees; see: nvidia-smi"
        raise ConfigError(why) from None
    return int(done.stdout) if done.stdout.strip().isdigit() else 0


def mps_line() -> str:
    """Return a line that says if CUDA's multi-process service (MPS) runs here."""
    try:
        subprocess.run(
            [_MPS_CONTROL], input=b"get_server_list\n", check=True, capture_output=True, timeout=_MPS_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return f"CUDA MPS does not answer: trials that share a GPU take turns; to start it: {_MPS_CONTROL} -d"
    return "CUDA MPS answers: trials that share a GPU run side by side"


def require_own_gpu() -> None:
    """Raise ConfigError if torch does not see the GPU assigned to this worker, which would train on the CPU."""
    torch, gpu = sys.modules.get("torch"), os.environ.get(GPU_VARIABLE)
    if torch is not None and gpu is not None and not torch.cuda.is_available():
        raise ConfigError(f"this worker was given GPU {gpu}, and torch sees no such GPU; see: {to_copy(['doctor'])}")


def limit_memory() -> None:
    """Cap this worker's allocations at its share of the GPU; torch must have been imported."""
    torch, shared_by = sys.modules.get("torch"), int(os.environ.get(SHARED_BY_VARIABLE, "1"))
    if torch is not None and shared_by > 1 and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_share(total, shared_by))


def memory_share(total: int, shared_by: int) -> float:
    """Return the fraction of a GPU's memory that each of its workers may allocate, without their contexts.

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

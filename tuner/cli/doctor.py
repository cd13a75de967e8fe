"""`ppo-tuner doctor`: whether this machine has what studies need. It writes nothing that stays, and never hangs."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from ppo_core import checkpoint, output
from ppo_core.errors import PPOTunerError
from ppo_core.fits import amount
from ppo_core.run.command_line import EXIT_ERROR, EXIT_OK
from tuner.cli import storage
from tuner.environment import RUNS_FOLDER, existing
from tuner.store import Store
from tuner.store.connect import file_of
from tuner.store.schema import parse_url, redacted

State = Literal["ok", "warning", "problem"]
STATES: tuple[State, ...] = get_args(State)

DISTRIBUTION = "ppo-tuner"
LEAST_PYTHON = (3, 11)
LEAST_FREE = 5 * 10**9
"""Free bytes of a disk below which checkpoints may soon not fit."""
SECONDS = 60.0
"""Longest that a question to torch or to the store may take; a driver or a server that is stuck would hang it."""


@dataclass(frozen=True)
class Finding:
    """One line of what was found."""

    state: State
    about: str
    found: str
    todo: str | None = None
    """What to do about it; None: nothing needs to be done."""


def doctor(args: argparse.Namespace) -> int:
    """Print what was found, one line each; return 1 where something that is needed is broken."""
    findings = list(examine(args.storage))
    if args.json:
        print(output.dumps([asdict(finding) for finding in findings]))
    else:
        out = output.console()
        for finding in findings:
            todo = "" if finding.todo is None else f"; {finding.todo}"
            out.print(f"{finding.state:8}{finding.about}: {output.plain(finding.found + todo)}", soft_wrap=True)
    return EXIT_ERROR if any(finding.state == "problem" for finding in findings) else EXIT_OK


def examine(given_storage: str | None) -> Iterator[Finding]:
    """Yield what is found; `given_storage` is what `--storage` says."""
    yield _python()
    yield from packages()
    yield from devices()
    memory = psutil.virtual_memory()
    yield Finding("ok", "memory", f"{amount(memory.total)}, {amount(memory.available)} of it available")
    yield store(storage.location(given_storage))
    yield folder("runs folder", RUNS_FOLDER)
    yield folder("model cache", _cache())


# What is installed.


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] < LEAST_PYTHON:
        return Finding("problem", "Python", version, f"install Python {'.'.join(map(str, LEAST_PYTHON))} or later")
    return Finding("ok", "Python", version)


def packages() -> Iterator[Finding]:
    """Yield each package that the project declares: needed ones one by one, those of an extra in one line."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        yield Finding("warning", DISTRIBUTION, "is not installed, so its requirements are unknown", "pip install -e .")
        return
    extras: dict[str, list[Any]] = {}
    for text in declared:
        requirement = Requirement(text)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        if extra is not None:
            extras.setdefault(extra[1], []).append(requirement)
        elif requirement.marker is None or requirement.marker.evaluate():
            yield _package(requirement)
    for name, wanted in extras.items():
        missing = [each.name for each in wanted if _package(each).state != "ok"]
        if missing:
            yield Finding(
                "ok",
                f"extra {name}",
                f"not installed; it adds {', '.join(missing)}",
                f"pip install '{DISTRIBUTION}[{name}]'",
            )
        else:
            yield Finding("ok", f"extra {name}", "installed")


def _package(requirement: Any) -> Finding:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("problem", requirement.name, "is not installed", f"pip install '{requirement}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(
            "problem", requirement.name, f"{version} is not {requirement.specifier}", f"pip install '{requirement}'"
        )
    return Finding("ok", requirement.name, version)


# Devices: asked in a process of their own, since a stuck driver would hang this one.

_ASK = """
import json, torch
from torch.backends import cuda
found = {"threads": torch.get_num_threads(), "built_for": torch.version.cuda, "gpus": [], "mps": False}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        flash = cuda.flash_sdp_enabled() and about.major >= 8
        found["gpus"].append({"name": about.name, "capability": [about.major, about.minor], "total": total,
                              "free": free, "bf16": bf16, "flash": flash, "graphs": True})
mps = getattr(torch.backends, "mps", None)
found["mps"] = bool(mps and mps.is_available())
print(json.dumps(found))
"""


def devices() -> Iterator[Finding]:
    """Yield what torch finds to train on, and what it can do."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        found = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        yield Finding(
            "problem", "devices", f"torch did not answer within {SECONDS:.0f} s", "check the GPU's driver: nvidia-smi"
        )
        return
    except (OSError, ValueError, IndexError):
        last = next(iter(asked.stderr.strip().splitlines()[::-1]), "no answer")
        yield Finding("problem", "devices", f"torch cannot be used: {last}", "install torch again")
        return
    for index, gpu in enumerate(found["gpus"]):
        yield _gpu(index, gpu)
    if not found["gpus"]:
        yield _no_gpu(found)
    else:
        yield _mps_daemon()
    if found["mps"]:
        yield Finding("ok", "Apple GPU", "is there, but has no float64, which sampling needs: runs use the CPU")
    yield Finding("ok", "CPU", f"{os.cpu_count()} cores, torch uses {found['threads']} threads")


def _gpu(index: int, gpu: dict[str, Any]) -> Finding:
    names = {"bf16": "bf16", "flash": "flash attention", "graphs": "CUDA graphs"}
    can = ", ".join(name for key, name in names.items() if gpu[key])
    memory = f"{amount(gpu['total'])}, {amount(gpu['free'])} of it free"
    text = f"{gpu['name']}, {memory}, compute {'.'.join(map(str, gpu['capability']))}: {can}"
    if not gpu["bf16"]:
        return Finding("warning", f"GPU {index}", text, "it has no bf16: leave the hyperparameter bf16 at false")
    if gpu["free"] < gpu["total"] / 2:
        return Finding("warning", f"GPU {index}", text, "another process holds most of it: see nvidia-smi")
    return Finding("ok", f"GPU {index}", text)


def _no_gpu(found: dict[str, Any]) -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("ok", "GPU", "none: runs use the CPU")
    why = "this torch is built without CUDA" if found["built_for"] is None else "torch does not see one"
    return Finding(
        "warning", "GPU", f"{why}, though nvidia-smi is there", "see pytorch.org for the torch of your driver"
    )


def _mps_daemon() -> Finding:
    """Say whether CUDA's multi-process service runs, with which trials share a GPU without taking turns."""
    runs = any(process.info["name"] == "nvidia-cuda-mps-control" for process in psutil.process_iter(["name"]))
    if runs:
        return Finding("ok", "CUDA MPS", "its daemon runs: workers share a GPU at the same time")
    return Finding("ok", "CUDA MPS", "its daemon does not run: workers on one GPU take turns")


# Where studies, checkpoints and models are kept.


def store(where: str) -> Finding:
    """Return whether the store can be reached and written; it is opened, and nothing is written."""
    try:
        url = parse_url(where)
        path = file_of(url)
        if path is not None:
            return _store_file(path)
        return _holds(where, redacted(url))
    except PPOTunerError as error:
        return Finding("problem", "store", str(error), "name another one with --storage, or start its server")


def _store_file(path: Path) -> Finding:
    if not path.exists():
        place = existing(path.parent)
        if os.access(place, os.W_OK):
            return Finding("ok", "store", f"{path} will be made by the first run")
        return Finding(
            "problem", "store", f"{path} cannot be made", f"make {place} writable, or name another store with --storage"
        )
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return Finding("problem", "store", f"{path} cannot be written", "make it and its folder writable")
    try:
        return _holds(str(path), str(path))
    except PPOTunerError as error:
        return Finding("problem", "store", str(error), "ppo-tuner migrate brings an older store to this version")


def _holds(where: str, name: str) -> Finding:
    with closing(Store.open(where)) as opened:
        count = len(opened.studies())
    return Finding("ok", "store", f"{name} holds {count} {'study' if count == 1 else 'studies'}")


def folder(about: str, path: Path) -> Finding:
    """Return whether a folder, or the one that it will be made in, can be written, and what its disk has left."""
    place = existing(path)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding("problem", about, f"{path} cannot be written: {error.strerror}", f"make {place} writable")
    free = shutil.disk_usage(place).free
    text = f"{path}, {checkpoint.size(free)} free"
    if free < LEAST_FREE:
        return Finding("warning", about, text, "checkpoints and models may not fit: free some space")
    return Finding("ok", about, text)


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)

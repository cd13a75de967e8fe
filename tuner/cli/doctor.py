"""`ppo-tuner doctor`: check that this machine has what studies need. It leaves no files, and never hangs.

With `--train` it trains, too (`tuner.cli.self_check`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import psutil

from ppo_core import output
from ppo_core.checkpoint import size
from ppo_core.cli.command_line import EXIT_ERROR, EXIT_OK
from ppo_core.errors import PPOTunerError
from tuner.engine.gpu import mps_line
from tuner.environment import RUNS_FOLDER, existing
from tuner.store import connect, location, opened, schema

NEEDED = ("python", "ppo-tuner", "torch", "transformers", "peft", "optuna", "sqlalchemy", "streamlit")
OPTIONAL = ("ray", "psycopg", "bitsandbytes")
_PRINT_GPUS = "import json; from tuner.cli.doctor import gpus; print(json.dumps(gpus()))"


class Check(NamedTuple):
    """The result of a check; its state is `ok`, `warn` or `fail`."""

    state: str
    about: str
    found: str


def doctor(args: argparse.Namespace) -> int:
    """Print one line per check; return 1 if something required is broken."""
    checks = [versions(), *devices(), store(location(args.storage)), folder("runs folder", RUNS_FOLDER)]
    if not args.json:
        for check in checks:
            _print(check)
    if args.train:
        checks += _trained(None if args.json else _print)
    if args.json:
        print(output.dumps([check._asdict() for check in checks]))
    return EXIT_ERROR if any(check.state == "fail" for check in checks) else EXIT_OK


def _print(check: Check) -> None:
    print(f"{check.state:5}{check.about}: {output.plain(check.found)}", flush=True)


def _trained(tell: Callable[[Check], None] | None) -> list[Check]:
    """Check the trainer by three short runs; each is told as it ends."""
    from tuner.cli.self_check import TASKS, self_check  # it loads torch

    checks = []
    for name, right in TASKS.items():
        found = self_check(right)
        checks.append(Check("ok" if found.is_sound else "fail", f"training, {name}", found.text))
        if tell is not None:
            tell(checks[-1])
    return checks


def versions() -> Check:
    installed = {each.name.lower(): each.version for each in distributions()} | {"python": sys.version.split()[0]}
    named = [f"{name} {installed.get(name, 'not installed')}" for name in (*NEEDED, *OPTIONAL)]
    return Check("ok" if installed.keys() >= set(NEEDED) else "fail", "versions", ", ".join(named))


def devices() -> list[Check]:
    """Check the devices that torch finds, in a child process because a stuck driver would hang this one."""
    try:
        answer = subprocess.check_output([sys.executable, "-c", _PRINT_GPUS], text=True, timeout=60)
    except subprocess.SubprocessError:  # its error is on stderr
        return [Check("fail", "devices", "torch failed, or did not answer within a minute; see nvidia-smi")]
    cpu = Check("ok", "CPU", f"{os.cpu_count()} cores, {size(psutil.virtual_memory().available)} of memory free")
    return [*(Check(*each) for each in json.loads(answer.splitlines()[-1])), cpu]


def gpus() -> list[Check]:
    """Check the GPUs that torch finds; called in the process that `devices` starts."""
    import torch

    checks = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        has_bf16 = properties.major >= 8
        state = "ok" if has_bf16 and free > total / 2 else "warn"
        bf16 = "bf16" if has_bf16 else "no bf16"
        checks.append(Check(state, f"GPU {index}", f"{properties.name}, {size(free)} of {size(total)} free, {bf16}"))
    if checks:
        return [*checks, Check("ok", "MPS", mps_line())]
    state = "warn" if shutil.which("nvidia-smi") else "ok"
    return [Check(state, "GPU", f"torch {torch.__version__} sees none; runs use the CPU")]


def store(where: str) -> Check:
    """Check that the store can be used; nothing is written."""
    try:
        path = connect.file_of(schema.parse_url(where))
        if path is not None and not path.exists():
            return folder("store", path)
        with opened(where) as found:
            studies = f"studies: {len(found.studies())}"
    except PPOTunerError as error:
        return Check("fail", "store", str(error))
    if path is not None and not os.access(path, os.W_OK):
        return Check("fail", "store", f"{path} cannot be written")
    return Check("ok", "store", f"{output.without_secrets(where)}, schema {schema.SCHEMA_VERSION}, {studies}")


def folder(about: str, path: Path) -> Check:
    """Check that a path, or its nearest existing parent, is writable and has room."""
    try:
        with tempfile.TemporaryFile(dir=existing(path)):
            free = shutil.disk_usage(existing(path)).free
    except OSError as error:
        return Check("fail", about, f"{existing(path)} cannot be written: {error.strerror}")
    return Check("ok" if free >= 5e9 else "warn", about, f"{path}, {size(free)} of disk space free")

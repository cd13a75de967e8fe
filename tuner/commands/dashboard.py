"""The command that opens the dashboard: Streamlit on this machine alone, without usage statistics."""

import argparse
import os
import socket
import sys
from importlib import resources
from pathlib import Path

from ppo_core.errors import ConfigError
from tuner.commands import storage
from tuner.commands.arguments import STORAGE_VARIABLE
from tuner.store.schema import parse_url

HOST = "127.0.0.1"
FIRST_PORT = 8501


def dashboard(args: argparse.Namespace) -> int:
    """Become the dashboard's server; it ends with Ctrl-C."""
    where = storage.location(args.storage)
    parse_url(where)
    chosen = _port(args.port)
    print(f"dashboard: http://{HOST}:{chosen} (Ctrl-C ends it)", flush=True)
    os.execve(sys.executable, streamlit_command(chosen), os.environ | {STORAGE_VARIABLE: where})


def streamlit_command(port: int) -> list[str]:
    """Return the command that serves the dashboard on a port."""
    app = Path(str(resources.files("dashboard"))) / "app.py"
    return [
        *(sys.executable, "-m", "streamlit", "run", str(app)),
        *("--server.address", HOST, "--server.port", str(port), "--server.headless", "true"),
        *("--browser.gatherUsageStats", "false", "--server.fileWatcherType", "none"),
        *("--client.showErrorDetails", "none", "--client.toolbarMode", "minimal"),
    ]


def _port(wanted: int | None) -> int:
    """Return the wanted port, or the first free one; ConfigError where there is none."""
    candidates = range(FIRST_PORT, FIRST_PORT + 50) if wanted is None else [wanted]
    for candidate in candidates:
        if _is_free(candidate):
            return candidate
    ports = f"{candidates[0]}" if wanted else f"{candidates[0]} to {candidates[-1]}"
    raise ConfigError(f"port {ports} is in use or not allowed; name another with --port")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True

"""The command that opens the dashboard: Streamlit on this machine alone, without usage statistics."""

import argparse
import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path

from ppo_core.errors import ConfigError
from tuner.environment import READ_ONLY_VARIABLE, STORAGE_VARIABLE, TOKEN_PARAMETER, TOKEN_VARIABLE
from tuner.store import Store, location
from tuner.store.schema import parse_url

HOST = "127.0.0.1"
FIRST_PORT = 8501


def dashboard(args: argparse.Namespace) -> int:
    """Replace this process by the dashboard's server, which ends with Ctrl-C."""
    where = location(args.storage)
    url = parse_url(where)
    if url.get_backend_name() == "sqlite" and Path(url.database or "").exists():  # a missing one may appear later
        Store.open(where).close()  # raises StoreError if it is not readable
    port = _port(args.port)
    address = f"http://{HOST}:{port}/"
    variables = {STORAGE_VARIABLE: where}
    if args.read_only:
        variables[READ_ONLY_VARIABLE] = "1"
        print(f"dashboard: {address} (read-only; Ctrl-C ends it)", flush=True)
    else:
        variables[TOKEN_VARIABLE] = secrets.token_urlsafe(24)
        print(f"dashboard: {address}?{TOKEN_PARAMETER}={variables[TOKEN_VARIABLE]} (Ctrl-C ends it)", flush=True)
    os.execve(sys.executable, streamlit_command(port), os.environ | variables)


def streamlit_command(port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "dashboard"),
        *("--server.address", HOST, "--server.port", str(port), "--server.headless", "true"),
        *("--server.allowedHosts", HOST, "--server.allowedHosts", "localhost"),
        *("--server.corsAllowedOrigins", f"http://{HOST}:{port}", "--server.enableCORS", "true"),
        *("--server.enableXsrfProtection", "true", "--server.enableStaticServing", "false"),
        *("--server.enableAgentApi", "false"),
        *("--server.fileWatcherType", "none", "--browser.gatherUsageStats", "false"),
        # Streamlit would log a stack trace for a widget with both a default and session state.
        *("--global.disableWidgetStateDuplicationWarning", "true"),
        *("--client.showErrorDetails", "none", "--client.showErrorLinks", "false", "--client.toolbarMode", "minimal"),
    ]


def _port(wanted: int | None) -> int:
    """Return the wanted port, or the first free one; ConfigError if there is none."""
    candidates = range(FIRST_PORT, FIRST_PORT + 50) if wanted is None else [wanted]
    for candidate in candidates:
        with socket.socket() as probe, suppress(OSError, OverflowError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, candidate))
            return candidate
    ports = str(wanted) if wanted else f"{candidates[0]} to {candidates[-1]}"
    raise ConfigError(f"port {ports} is in use or not allowed; name another with --port")

"""The two servers that the browser looks at, and what a page receives."""

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator

from playwright.sync_api import Error, Page, WebSocket

LONGEST = 60_000
"""Milliseconds that anything may take before the benchmark gives up."""


@contextlib.contextmanager
def server(
    command: Callable[[int], list[str]], health: str, environment: dict[str, str] | None = None
) -> Iterator[str]:
    """Run the server of `command`, made for a free port, and yield its address once the path `health` answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    filled, null = command(port), subprocess.DEVNULL
    process = subprocess.Popen(filled, env=os.environ | (environment or {}), stdout=null, stderr=null)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}{health}", timeout=2)
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"{' '.join(filled)} did not start")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(20)


class Received:
    """Counts the bytes that a page receives, by WebSocket and by HTTP."""

    def __init__(self, page: Page) -> None:
        self.by_socket = 0
        self.by_http: list[tuple[str, int]] = []
        """Addresses and sizes of the bodies of answers."""
        page.on("websocket", self._listen)
        page.on("requestfinished", lambda request: self._note(request))

    def _listen(self, socket: WebSocket) -> None:
        socket.on("framereceived", self._count)

    def _count(self, payload: str | bytes) -> None:
        self.by_socket += len(payload)

    def _note(self, request: object) -> None:
        with contextlib.suppress(Error):
            sizes = request.sizes()  # type: ignore[attr-defined]
            self.by_http.append((request.url, sizes["responseBodySize"]))  # type: ignore[attr-defined]

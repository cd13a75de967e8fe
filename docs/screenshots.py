"""Take the pictures of the dashboard that the README shows.

    make demo && .venv/bin/python docs/screenshots.py

Starts the dashboard on the default store, opens it in the browser that tests/chromium.py finds, and writes PNG files to
docs/images/.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chromium import launch

IMAGES = Path(__file__).parent / "images"
PAGES = {
    "answer": ("", ".st-key-all-trials [data-testid=stDataFrame]"),
    "why": ("why", ".js-plotly-plot"),
    "curves": ("runs", "canvas"),
    "reward_kl": ("runs?view=Reward+and+KL", ".js-plotly-plot"),
    "trial": ("runs?view=One+trial", "canvas"),
    "compare": ("runs?view=Compare", "[data-testid=stDataFrame]"),
    "samples": ("samples", "[data-testid=stCode], [data-testid=stText]"),
    "control": ("control", "[data-testid=stDataFrame]"),
    "studies": ("studies", "[data-testid=stDataFrame]"),
}
"""Each page's path, and what stands there once it is drawn."""


@contextlib.contextmanager
def dashboard() -> Iterator[str]:
    """Run the dashboard on a free port of this machine and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tuner.cli.main", "dashboard", "--port", str(port)]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/_stcore/health", timeout=1)
                break
            if time.monotonic() > deadline or server.poll() is not None:
                raise SystemExit("the dashboard did not start")
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait(10)


def main() -> None:
    """Take every picture."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with dashboard() as address, sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(viewport={"width": 1440, "height": 1080}, device_scale_factor=1)
        for name, (path, drawn) in PAGES.items():
            page.goto(f"{address}/{path}")
            page.locator(drawn).first.wait_for(timeout=180_000)
            page.locator("[data-testid=stSkeleton]").first.wait_for(state="detached", timeout=180_000)
            page.wait_for_timeout(4_000)  # the charts' own animation
            page.screenshot(path=str(IMAGES / f"{name}.png"))
        browser.close()
    print(f"wrote {', '.join(sorted(path.name for path in IMAGES.glob('*.png')))}")


if __name__ == "__main__":
    main()

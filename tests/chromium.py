"""Find and start Chromium for the tests, benchmarks and pictures of the dashboard, and install it if it is missing.

`python -m tests.chromium [--system]` prints which browser the tests use, and installs one where there is none. It tries:

1. nothing, where a Chromium that starts is there: Playwright's own or the system's,
2. Playwright's own build, which needs no root,
3. Debian's package by apt-get: as root in continuous integration, or with `--system` (then by sudo, if not root).
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # all tests read this module's texts, also where Playwright is not installed
    from playwright.sync_api import Browser, Playwright

SYSTEM_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "microsoft-edge-stable")
"""Browsers that a system may have, in the order of trying."""
COMMAND = "make browser"
"""The one command that gets a browser wherever it can."""
NO_BROWSER = f"no Chromium that starts; install it with: {COMMAND}"
"""Why a test in a browser is skipped."""
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)
"""Start it as root and without a GPU, and have it ask for nothing but its pages."""
START_SECONDS = 60
"""The longest that a browser may take to print its version."""
Run = Callable[[Sequence[str]], bool]


class NoBrowser(SystemExit):
    """There is no Chromium that starts. A script that does not catch it ends with the message: how to get one."""


def executable(playwright: "Playwright") -> str:
    """Return the path of a Chromium that starts: Playwright's own, else the system's.

    Raises:
        NoBrowser: there is none.
    """
    found = next(filter(starts, candidates(playwright.chromium.executable_path)), None)
    if found is None:
        raise NoBrowser(NO_BROWSER)
    return found


def launch(playwright: "Playwright") -> "Browser":
    """Return a started browser: Playwright's own Chromium, else the system's.

    Raises:
        NoBrowser: there is none.
    """
    return playwright.chromium.launch(executable_path=executable(playwright), args=list(FLAGS))


def candidates(own: str) -> Iterator[str]:
    """Yield where a Chromium may be: Playwright's `own`, its headless shell beside it, then the system's."""
    yield own
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path(own).parents[2])
    yield from sorted(map(str, folder.glob("chromium_headless_shell-*/*/*headless*shell*")))
    yield from filter(None, map(shutil.which, SYSTEM_NAMES))


def starts(path: str) -> bool:
    """Return whether the browser at `path` runs here: a build may lack libraries, a package may be only a stub."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=START_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install(is_there: Callable[[], bool], run: Run, environment: Mapping[str, str], *, system: bool) -> bool:
    """Install Chromium where there is none, and return whether there is one now.

    Args:
        is_there: Tells whether a Chromium that starts is there.
        run: Runs a command and returns whether it succeeded.
        environment: The process's variables; CI says that this is continuous integration.
        system: Whether the user asked for a system's package, too.
    """
    if is_there():
        return True
    print("no Chromium here; trying Playwright's own build", flush=True)
    if run([sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"]) and is_there():
        return True
    as_root = _root_prefix(system) if system or (environment.get("CI") and os.geteuid() == 0) else None
    if as_root is None or shutil.which("apt-get") is None:
        return False
    print("no build of Playwright's that starts here; trying Debian's package", flush=True)
    apt = [*as_root, "apt-get", "-o", "DPkg::Lock::Timeout=120"]
    run([*apt, "update"])  # one source of several may fail; what counts is whether the package can be had
    return run([*apt, "install", "--yes", "--no-install-recommends", "chromium"]) and is_there()


def _root_prefix(system: bool) -> list[str] | None:
    """Return what to put before a command that needs root; None where there is no way to be root."""
    if os.geteuid() == 0:
        return []
    return ["sudo"] if system and shutil.which("sudo") else None


def _is_there() -> bool:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        try:
            print(f"browser: {executable(playwright)}", flush=True)
            return True
        except NoBrowser:
            return False


def _run(command: Sequence[str]) -> bool:
    return subprocess.run(command, check=False, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}).returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Find a browser, or install one; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chromium")
    parser.add_argument("--system", action="store_true", help="use apt-get where Playwright's own build fails")
    system = parser.parse_args(arguments).system
    if install(_is_there, _run, os.environ, system=system):
        return 0
    print("Chromium could not be installed; install your system's" if system else NO_BROWSER, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

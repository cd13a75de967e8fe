"""The real dashboard in a real browser: its server on a free port of this machine, and Chromium."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, expect, sync_playwright

from tests.chromium import launch
from tests.processes import free_port
from tests.waiting import SECONDS, until

ROOT = Path(__file__).parents[2]
DRAWINGS = '[data-testid="stEChartsChart"] canvas, [data-testid="data-grid-canvas"], .js-plotly-plot'
"""Charts, tables and figures on a page."""


_WORDS = r"""() => {
    const left_out = "[data-testid=stDataFrame], [data-testid=stEChartsChart], .js-plotly-plot, [data-testid^=stIcon], "
        + "[data-testid=stSliderTickBar], .response, [class*=st-key-said], a[href^='#'], script, style";
    const words = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
        const holder = text.parentElement, range = document.createRange();
        if (!holder || holder.closest(left_out) || getComputedStyle(holder).fontFamily.includes("Material") || !holder.checkVisibility({checkVisibilityCSS: true})) continue;
        range.selectNodeContents(text);
        const box = range.getBoundingClientRect();
        if (box.width < 2 || box.bottom <= 0 || box.top >= innerHeight || box.right <= 0) continue;
        words.push(...text.textContent.split(/\s+/).filter(word => /[\p{L}\p{N}]/u.test(word)));
    }
    return words;
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser; raises NoBrowser."""
    expect.set_options(timeout=1_000 * SECONDS)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Server:
    """A dashboard that is served."""

    process: "subprocess.Popen[str]"
    link: str
    """As it was printed, with the token."""
    output: Path
    """All that it printed."""

    @property
    def address(self) -> str:
        """Its address, without a path."""
        return f"http://{urlsplit(self.link).netloc}"

    @property
    def token(self) -> str:
        """Its token; empty where it is read-only."""
        return urlsplit(self.link).query.removeprefix("token=")

    def end(self) -> int:
        """End it as Ctrl-C does, and return its exit status."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def serve(
    storage: str,
    folder: Path,
    *,
    port: int | None = None,
    flags: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Serve the dashboard on a store, as `ppo-tuner dashboard` does, from a working folder."""
    port = port or free_port()
    output = folder / f"server-{port}.txt"
    command = [sys.executable, "-m", "tuner.cli.main", "dashboard", "--storage", storage, "--port", str(port), *flags]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(variables or {})}
    with output.open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    server = Server(process, "", output)
    try:
        until(lambda: _answers(f"http://127.0.0.1:{port}/_stcore/health", process, output))
        server.link = output.read_text().split()[1]
        yield server
    finally:
        server.end()


@dataclass
class Visit:
    """A page, and what happened on it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """What the browser's console called an error, and dialogs that scripts opened."""
    requests: list[str] = field(default_factory=list)
    """Every address that was asked for."""

    def open(self, address: str) -> "Visit":
        """Go to an address, and wait until all of it is drawn."""
        self.page.goto(address)
        self.settle()
        return self

    def settle(self) -> None:
        """Wait until the page has drawn itself."""
        self.page.locator(
            '[data-testid="stMain"] :is(h1, h2, h3, [data-testid="stAlert"], [data-testid="stTabs"])'
        ).first.wait_for()
        self.page.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for()

    def button(self, label: str) -> None:
        """Press the button of this label; in a dialog, where there is one."""
        dialog = self.page.get_by_role("dialog")
        place = dialog if dialog.count() else self.page.locator("body")
        place.get_by_role("button", name=label, exact=True).click()

    def choose(self, label: str, option: str) -> None:
        """Choose an option of a list."""
        self.page.get_by_role("combobox", name=label, exact=True).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def pick(self, label: str, option: str) -> None:
        """Choose one more option of a list that takes several, and close the list."""
        box = self.page.get_by_role("combobox", name=label, exact=True)
        box.press_sequentially(option)
        self.page.get_by_role("option", name=option, exact=True).click()
        self.page.keyboard.press("Tab")
        expect(box).to_have_attribute("aria-expanded", "false")

    def slide(self, label: str, *keys: str) -> None:
        """Move a slider with keys."""
        self.page.locator(f'input[type="range"][aria-label="{label}"]').focus()
        for key in keys:
            self.page.keyboard.press(key)

    def scroll_to(self, place: Locator) -> None:
        """Scroll the page until something stands near its top, as far as the page goes."""
        place.evaluate("one => one.scrollIntoView({block: 'start', behavior: 'instant'})")

    def sees(self, text: str) -> None:
        """Wait until a text is on the page."""
        self.page.get_by_text(text).filter(visible=True).first.wait_for()

    def words(self) -> list[str]:
        """Return the words in the window, without those of tables and charts, and of prompts and responses."""
        return list(self.page.evaluate(_WORDS))

    def outside(self, address: str) -> list[str]:
        """Return what was asked for elsewhere than at the server."""
        own = (f"{address}/", address.replace("http", "ws", 1) + "/", "data:", "blob:")
        return [url for url in self.requests if not url.startswith(own)]


@contextmanager
def visit(browser: Browser, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Visit]:
    """Open a page in a browser profile of its own, so many pixels large, for a reader who likes it `dark` or not."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
    context.set_default_timeout(1_000 * SECONDS)
    page = context.new_page()
    made = Visit(page)

    def note(message: ConsoleMessage) -> None:
        # Below a view's path Streamlit first looks for its server there, and then at the root.
        is_search = urlsplit(message.location.get("url", "")).path.endswith(("/_stcore/health", "/_stcore/host-config"))
        if message.type == "error" and not is_search:
            made.errors.append(f"{message.text} {message.location.get('url', '')}")

    page.on("console", note)
    page.on("pageerror", lambda error: made.errors.append(str(error)))
    page.on("request", lambda request: made.requests.append(request.url))
    page.on("websocket", lambda websocket: made.requests.append(websocket.url))

    def dismiss(dialog: Dialog) -> None:
        made.errors.append("a script opened a dialog")
        dialog.dismiss()

    page.on("dialog", dismiss)
    try:
        yield made
    finally:
        context.close()


@contextmanager
def opened(
    browser: Browser, server: Server, place: str, *, width: int = 1280, height: int = 900, dark: bool = False
) -> Iterator[Visit]:
    """Open a view of the store; nothing on it may go wrong until the end of the block."""
    with visit(browser, width=width, height=height, dark=dark) as made:
        made.open(f"{server.address}/{place}")
        yield made
        assert made.page.locator('[data-testid="stException"]').count() == 0
        assert made.errors == []


def _answers(address: str, process: "subprocess.Popen[str]", output: Path) -> bool:
    assert process.poll() is None, output.read_text()
    try:
        with urllib.request.urlopen(address, timeout=SECONDS) as response:
            return bool(response.read() == b"ok")
    except urllib.error.URLError:
        return False


def zoom(made: Visit) -> None:
    """Zoom into the middle of the first curves, as a reader does: press the lens, then drag over a part of the run."""
    chart = made.page.locator('[data-testid="stEChartsChart"]:not([class*="st-key-three-numbers"] *)').first
    made.settle()  # what is above it may still grow
    made.scroll_to(chart)
    box = chart.bounding_box()
    assert box is not None
    mouse = made.page.mouse
    mouse.click(box["x"] + box["width"] - 26, box["y"] + 25)
    mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 120)
    mouse.down()
    mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 120, steps=5)
    mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 120, steps=5)
    mouse.up()
    made.sees("of the run: show all")
    made.settle()

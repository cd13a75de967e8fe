"""Streamlit's own page and scripts, served so that the first chart shows sooner.

Streamlit fetches the script of a chart, a selector or a button only once one is drawn, and its page asks twice where
the server is, first below the address of the page. `FrontEnd` has the page start those scripts at once, says where the
server is, and answers from memory: a visit without a browser cache takes about a hundred files.
"""

import mimetypes
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit import file_util

SCRIPTS = ("Selectbox", "Multiselect", "Slider", "ButtonGroup", "EChartsChart", "Button", "DownloadButton", "Html")
"""What every page or the first one draws, as Streamlit names its scripts; one that a version lacks is left out."""
KEPT = "public, immutable, max-age=31536000"
"""As Streamlit has it: the names of these files change with what is in them."""
_FOLDER = "/static/"


class FrontEnd:
    """Serves Streamlit's files from memory, and its page with the scripts of `SCRIPTS` and the server's address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._root = Path(file_util.get_static_dir())
        self._files = {
            f"{_FOLDER}{path.relative_to(self._root / 'static').as_posix()}": path
            for path in (self._root / "static").rglob("*")
            if path.is_file()
        }
        self._read: dict[str, Response] = {}
        self._head = head(self._root / "static" / "js").encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
        elif scope["path"] in self._files:
            await self._file(scope["path"])(scope, receive, send)
        elif _asks_for_page(scope):
            headers = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
            await self._app({**scope, "headers": headers}, receive, _Page(send, self._head))
        else:
            await self._app(scope, receive, send)

    def _file(self, path: str) -> Response:
        if path not in self._read:
            file = self._files[path]
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            self._read[path] = Response(file.read_bytes(), media_type=kind, headers={"Cache-Control": KEPT})
        return self._read[path]


def head(scripts: Path) -> str:
    """Return what is added to the page's head; `scripts` is the folder of Streamlit's scripts."""
    # Relative to the page, as its own scripts are: also right behind a proxy that puts a path in front.
    where = '<script>window.__streamlit={BACKEND_BASE_URL:new URL(".",location.href).href}</script>'
    names = [path.name for name in SCRIPTS for path in sorted(scripts.glob(f"{name}.*.js"))]
    return where + "".join(f'<script type="module">import("./static/js/{name}")</script>' for name in names)


class _Page:
    """Passes an answer on; into a page it puts `head` where the page's own ends."""

    def __init__(self, send: Send, head: bytes) -> None:
        self._send = send
        self._head = head
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and _is_page(message):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(self._start)

    async def _end(self, start: Message) -> None:
        body = self._body.replace(b"</head>", self._head + b"</head>", 1)
        headers = [pair for pair in start["headers"] if pair[0].lower() not in _OF_THE_FILE]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


_OF_THE_FILE = (b"content-length", b"etag", b"last-modified")
"""Headers that are not true any more of a page with a longer head."""


def _asks_for_page(scope: Scope) -> bool:
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def _is_page(start: Message) -> bool:
    kind = next((value for name, value in start["headers"] if name.lower() == b"content-type"), b"")
    return bool(start["status"] == 200 and kind.startswith(b"text/html"))

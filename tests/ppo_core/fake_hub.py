"""As much of the Hugging Face Hub as pushing a small folder needs, on this machine: who asks, repositories, commits."""

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_test"


@dataclass
class FakeHub:
    """A hub that is served, and all that it was told."""

    address: str = ""
    refusals: dict[str, int] = field(default_factory=dict)
    """Statuses to answer with, by a part of the path."""
    made: list[Mapping[str, Any]] = field(default_factory=list)
    """Repositories as they were asked for."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What was committed, by `user/name/path`."""
    messages: list[str] = field(default_factory=list)
    """Of the commits."""
    asked: list[str] = field(default_factory=list)
    """Paths."""

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of a request's answer."""
        self.asked.append(path)
        for part, status in self.refusals.items():
            if part in path:
                return status, {"error": f"no {part} for you"}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.made.append(asked)
            return 200, {"url": f"{self.address}/{asked['organization'] or 'me'}/{asked['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            return 200, {"files": modes}
        if "/commit/" in path:
            return 200, self._commit(path.removeprefix("/api/models/").split("/commit/")[0], body)
        return 404, {"error": f"no {method} {path} here"}

    def _commit(self, repo: str, body: bytes) -> Any:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                content = base64.b64decode(line["value"]["content"])
                self.files[f"{repo}/{line['value']['path']}"] = content
        return {"commitUrl": f"{self.address}/{repo}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def served() -> Iterator[FakeHub]:
    """Serve a hub on a free port of this machine."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = self.headers.get("Authorization", "")
            status, answer = hub.answer(self.command, self.path.partition("?")[0], token, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            if status >= 400:
                self.send_header("X-Error-Message", answer["error"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""Asking several things at once, in threads: answers in order; what is no longer needed ends at once."""

import contextlib
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event, Lock
from typing import Any, TypeVar
from urllib.request import HTTPHandler, HTTPSHandler, Request

Question = TypeVar("Question")
Result = TypeVar("Result")


class Line:
    """One question under way. Another thread may cut it: its waits end at once, and its connection breaks off."""

    def __init__(self) -> None:
        self._cut = Event()
        self._socket: socket.socket | None = None
        self._lock = Lock()

    @property
    def is_cut(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._cut.is_set()

    def wait(self, seconds: float) -> None:
        """Wait so long, or until the line is cut."""
        self._cut.wait(seconds)

    def hold(self, connected: socket.socket) -> None:
        """Take the socket that the question is asked through."""
        with self._lock:
            self._socket = connected
            if self.is_cut:
                self._break_off()

    def cut(self) -> None:
        """End it. A connection that is still being made ends with its own timeout."""
        with self._lock:
            self._cut.set()
            self._break_off()

    def _break_off(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # Not the method of an SSL socket, which would take its state away from the thread that reads from it.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def ask_all(ask: Callable[[Question, Line], Result], questions: Iterable[Question], at_once: int) -> list[Result]:
    """Return the answers in the order of the questions, of which at most so many are asked at a time.

    The error raised is that of the first question in order that fails, as one after the other. Later ones are then cut
    or never asked, earlier ones waited for. No thread outlives the call.
    """
    asked = [(question, Line()) for question in questions]

    def end(first: int) -> None:
        for _, line in asked[first:]:
            line.cut()

    def answer(number: int) -> Result:
        question, line = asked[number]
        if line.is_cut:
            raise CancelledError
        try:
            return ask(question, line)
        except BaseException:
            end(number + 1)
            raise

    with ThreadPoolExecutor(max(1, min(at_once, len(asked))), "reward") as threads:
        try:
            return list(threads.map(answer, range(len(asked))))
        finally:
            end(0)


class LinedRequest(Request):
    """A request whose socket its line holds, where `LinedHTTP` and `LinedHTTPS` open it."""

    def __init__(self, line: Line, url: str, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(url, body, headers, method="POST")
        self.line = line


def _holding(kind: Any, line: Line) -> Callable[..., Any]:
    """Return what makes connections of a class of `http.client`, whose sockets the line holds."""

    def make(host: str, **options: Any) -> Any:
        connection = kind(host, **options)
        connect = connection.connect

        def connect_and_hold() -> None:
            connect()
            line.hold(connection.sock)

        connection.connect = connect_and_hold
        return connection

    return make


class LinedHTTP(HTTPHandler):
    """Opens `LinedRequest`s."""

    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        return super().do_open(_holding(http_class, req.line), req, **options)


class LinedHTTPS(HTTPSHandler):
    """Opens `LinedRequest`s, encrypted."""

    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        return super().do_open(_holding(http_class, req.line), req, **options)

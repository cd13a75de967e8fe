"""Rewards by an HTTP endpoint: a real server on loopback, which answers as each test tells it to."""

import json
import logging
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Event, Lock, Thread
from time import sleep
from typing import Any

import pytest
import torch

from ppo_core.data.task import Prompt, RewardPart
from ppo_core.errors import RewardError, RewardOutage, TaskError
from ppo_core.rewards.batch import Batch
from ppo_core.rewards.combined import load_reward
from ppo_core.rewards.endpoint import EndpointReward
from tests.processes import spawned
from tests.waiting import SECONDS, until

BATCH = Batch(
    [Prompt("a", {"answer": 1}), Prompt("b", {"day": datetime(2026, 1, 2)}), Prompt("ü")],
    ["one", "three", ""],
    [["one"], ["th", "ree"], []],
    [True, False, True],
)


@dataclass
class Server:
    """What the server is to answer, one after the other, and what it was asked."""

    url: str
    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    released: Event = field(default_factory=Event)
    """Until it is set, the server says nothing where it has no answer left."""
    gate: Barrier | None = None
    """Where it is set, the server answers when so many requests are there."""
    waits_for: dict[str, Event] = field(default_factory=dict)
    """What it waits for before it answers a request whose first response is this text."""
    asked_for: dict[str, Event] = field(default_factory=lambda: defaultdict(Event))
    """Set when a request with this first response is there."""
    by_text: bool = False
    """Whether it scores each response by its own text: a number, or a status that refuses the request."""
    at_once: int = 0
    """Most requests that were there at a time."""
    answered: list[str] = field(default_factory=list)
    """The first responses of the requests that it has answered."""

    def will(self, answer: object, status: int = 200, **headers: str) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.answers.append((status, {name.replace("_", "-"): value for name, value in headers.items()}, body))

    @property
    def host(self) -> str:
        return self.url.split("/")[2]

    @property
    def part(self) -> RewardPart:
        return RewardPart("judge", "http", self.url, retries=2)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    lock, under_way = Lock(), list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                under_way.append(asked)
                told.at_once = max(told.at_once, len(under_way))
            told.asked.append(asked)
            told.headers.append(dict(self.headers.items()))
            text = asked["responses"][0]
            told.asked_for[text].set()
            if told.gate is not None:
                told.gate.wait(20)
            if text in told.waits_for:
                told.waits_for[text].wait(20)
            with lock:
                under_way.remove(asked)
                told.answered.append(text)
            if told.by_text:
                refused = text.startswith("status ")
                self.send_response(int(text.split()[1]) if refused else 200)
                self.end_headers()
                self.wfile.write(b"" if refused else json.dumps([float(t) for t in asked["responses"]]).encode())
                return
            if not told.answers:
                told.released.wait()
                return
            status, headers, body = told.answers.pop(0)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told = Server(f"http://127.0.0.1:{http.server_port}/score?v=1")
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield told
    told.released.set()
    http.shutdown()
    thread.join()
    http.server_close()


def refused(part: RewardPart, waits: list[float] | None = None) -> str:
    """Return the error of scoring the batch; it must name the part."""
    with pytest.raises(RewardError) as caught:
        EndpointReward(part, sleep=(waits if waits is not None else []).append)(BATCH)
    return str(caught.value)


@pytest.mark.parametrize(
    ("status", "is_outage"), [(503, True), (429, True), (425, True), (408, True), (404, False), (200, False)]
)
def test_only_what_may_pass_is_an_outage(server: Server, status: int, is_outage: bool) -> None:
    for _ in range(3):
        server.will({"rewards": ["no number"] * len(BATCH)}, status)
    with pytest.raises(RewardError) as caught:
        EndpointReward(server.part, sleep=lambda _: None)(BATCH)
    assert isinstance(caught.value, RewardOutage) is is_outage


# --- asking and answering


def test_responses_are_sent_in_batches_with_their_columns(server: Server) -> None:
    server.will({"rewards": [1, 2.5]})
    server.will([-3])
    reward = load_reward([replace(server.part, batch_size=2, concurrency=1, weight=2.0)], torch.device("cpu"))
    scored = reward(BATCH.prompts, BATCH.responses, BATCH.tokens, BATCH.ended)
    assert scored.parts == {"judge": [1.0, 2.5, -3.0]} and scored.totals == [2.0, 5.0, -6.0]
    assert server.asked == [
        {
            "prompts": ["a", "b"],
            "responses": ["one", "three"],
            "ended": [True, False],
            "columns": {"answer": [1, None], "day": [None, "2026-01-02 00:00:00"]},
        },
        {"prompts": ["ü"], "responses": [""], "ended": [True], "columns": {}},
    ]
    assert server.headers[0]["Content-Type"] == "application/json"


def test_a_login_in_the_url_becomes_a_header(server: Server) -> None:
    server.will([1, 2, 3])
    EndpointReward(replace(server.part, where=server.url.replace("//", "//me:p%40ss@")))(BATCH)
    assert server.headers[0]["Authorization"] == "Basic bWU6cEBzcw=="  # base64 of me:p@ss
    assert server.headers[0]["Host"] == server.host


# --- several requests at a time


def batch_of(*responses: str) -> Batch:
    return Batch([Prompt("p")] * len(responses), responses, [[text] for text in responses], [True] * len(responses))


def test_requests_overlap_and_their_answers_are_in_order(server: Server) -> None:
    # A request is answered when three others are there, too.
    server.by_text, server.gate = True, Barrier(4)
    batch = batch_of(*map(str, range(16)))
    scores = EndpointReward(replace(server.part, batch_size=2, concurrency=4, retries=0))(batch).scores
    assert scores == list(range(16))
    assert len(server.asked) == 8 and server.at_once == 4


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_error_is_that_of_the_first_request_in_order(server: Server, concurrency: int) -> None:
    server.by_text = True
    if concurrency > 1:  # the first one to fail is not the first in order
        server.waits_for["status 400"] = server.asked_for["status 404"]
    with pytest.raises(RewardError) as caught:
        EndpointReward(replace(server.part, batch_size=1, concurrency=concurrency))(
            batch_of("1", "status 400", "status 404")
        )
    assert str(caught.value) == f'reward part "judge": {server.host} answered 400 Bad Request, after 1 attempt'


def test_an_error_waits_for_no_request_after_it(server: Server) -> None:
    server.by_text = True
    server.waits_for["2"] = server.released  # not answered before the error is there
    server.waits_for["status 400"] = server.asked_for["2"]
    part = replace(server.part, batch_size=1, concurrency=2, timeout=1e6)
    with pytest.raises(RewardError, match="answered 400 Bad Request, after 1 attempt"):
        EndpointReward(part)(batch_of("status 400", "2", "3", "4"))
    assert "status 400" in server.answered and "2" not in server.answered


INTERRUPTED = """
import signal, sys
from ppo_core.rewards.batch import Batch
from ppo_core.rewards.endpoint import EndpointReward
from ppo_core.data.task import Prompt, RewardPart
signal.signal(signal.SIGINT, signal.default_int_handler)
part = RewardPart("judge", "http", sys.argv[1], batch_size=1, concurrency=2, timeout=1e6)
EndpointReward(part)(Batch([Prompt("p")] * 3, ["1", "2", "3"], [[]] * 3, [True] * 3))
"""


def test_ctrl_c_ends_a_process_whose_server_says_nothing(server: Server) -> None:
    with spawned([sys.executable, "-c", INTERRUPTED, server.url], stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(server.asked) == 2)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=SECONDS)[1].endswith("KeyboardInterrupt\n")
    assert len(server.asked) == 2


# --- trying again


def test_what_passes_is_tried_again_and_told(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.will("", 503)
    server.will("", 429)
    server.will([1, 2, 3])
    waits: list[float] = []
    with caplog.at_level(logging.WARNING):
        assert EndpointReward(server.part, sleep=waits.append)(BATCH).scores == [1, 2, 3]
    assert waits == [0.5, 1.0]
    assert "503 Service Unavailable (attempt 1 of 3); again in 0.5 s" in caplog.messages[0]


@pytest.mark.parametrize(
    ("after", "wait"),
    [("7", 7.0), ("3600", 30.0), ("soon", 0.5), ("-1", 0.5)],
    ids=["seconds", "an hour", "no number", "negative"],
)
def test_the_server_says_when_up_to_half_a_minute(server: Server, after: str, wait: float) -> None:
    server.will("", 429, Retry_After=after)
    server.will([1, 2, 3])
    waits: list[float] = []
    EndpointReward(server.part, sleep=waits.append)(BATCH)
    assert waits == [wait]


def test_an_answer_that_breaks_off_is_asked_for_again(server: Server) -> None:
    server.will(b"[1, 2, 3", Content_Length="9")
    server.will([1, 2, 3])
    assert EndpointReward(server.part, sleep=lambda _: None)(BATCH).scores == [1, 2, 3]


def test_silence_ends_with_the_timeout(server: Server) -> None:
    message = refused(replace(server.part, timeout=0.05, retries=1))
    assert message == f'reward part "judge": {server.host} gave no answer within 0.05 s, after 2 attempts'
    until(lambda: len(server.asked) == 2)  # it may hear of them later than they were given up


@pytest.mark.parametrize("drips", ["a body of a length", "a body without one"])
def test_an_answer_that_drips_for_ever_ends_with_the_timeout(drips: str) -> None:
    """No byte comes late, so that a limit of a silence would not notice."""
    starts = {
        "a body of a length": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
        "a body without one": b"HTTP/1.0 200 OK\r\n\r\n",
    }
    gone: list[bool] = []

    def drip(connection: socket.socket) -> None:
        try:
            connection.sendall(starts[drips])
            while True:
                connection.sendall(b" ")
                sleep(0.01)
        except OSError:
            gone.append(True)

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    Thread(target=drip, args=[listening.accept()[0]], daemon=True).start()

        Thread(target=serve, daemon=True).start()
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(RewardOutage) as caught:
            EndpointReward(RewardPart("judge", "http", f"http://{host}", timeout=0.3, retries=1), lambda _: None)(BATCH)
        assert str(caught.value) == f'reward part "judge": {host} gave no answer within 0.3 s, after 2 attempts'
        until(lambda: len(gone) == 2)  # no connection is left open


# --- what is refused at once


@pytest.mark.parametrize("status", [400, 401, 404, 302, 307])
def test_a_refusal_and_a_redirection_are_not_repeated(server: Server, status: int) -> None:
    server.will("", status, Location=server.url)
    message = refused(replace(server.part, where=server.url.replace("//", "//me:secret@")))
    assert message.startswith(f'reward part "judge": {server.host} answered {status} ')
    assert message.endswith(", after 1 attempt") and "secret" not in message
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"<html>", "did not answer with JSON: b'<html>'"),
        ({"scores": [1]}, "answered with an object without \"rewards\": it has ['scores']"),
        ({"rewards": None}, "gave None, not a list of one number per response"),
        (b"[1, NaN, 3]", "gave nan for sample 1 (prompt 'b', response 'three'), not a finite number in float32"),
        ([[1], [2, 3], []], "gave [1] for sample 0 (prompt 'a', response 'one'), not a number"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_score_names_the_sample(server: Server, answer: object, message: str) -> None:
    server.will(answer)
    assert refused(server.part) == f'reward part "judge": {server.host} {message}'


@pytest.mark.parametrize(
    "where",
    [
        "localhost:80",
        "ftp://me:secret@host",
        "http://",
        "http://me:sec/ret@host",
        "http://me:secret@host:port",
        "http://host/a b?secret",
        "http://host/ü?secret",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_showing_it(where: str) -> None:
    with pytest.raises(TaskError) as caught:
        EndpointReward(RewardPart("judge", "http", where))
    assert str(caught.value).startswith('reward part "judge": its URL is not allowed; expected http(s)://host:port/')
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__

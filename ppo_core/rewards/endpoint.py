"""Rewards by an HTTP endpoint.

    POST {"prompts": [...], "responses": [...], "ended": [...], "columns": {name: [...]}}
    ->   {"rewards": [...]} or [...]

`ended` is true for each response that ended by itself rather than being cut at response_length.

One request per `batch_size` responses, `concurrency` of them at a time. A request that fails on the way, or is answered
with 429 or 5xx, is sent again.
"""

import base64
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException, IncompleteRead
from threading import Event, Thread
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ppo_core.data.task import RewardPart
from ppo_core.errors import RewardError, RewardOutage, TaskError
from ppo_core.rewards.batch import Batch, PartScores, cut, one_line, read_answer

logger = logging.getLogger(__name__)
FIRST_WAIT = 0.5
"""Seconds before the first retry; doubled each time."""
LONGEST_WAIT = 30.0
"""Maximum seconds between two attempts, even if Retry-After says more."""
TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects: a redirected POST would become a GET, and its password would be sent to another host."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        return None


class EndpointReward:
    """A part that is an HTTP endpoint.

    `sleep(seconds)` waits between attempts; by default the wait ends early if the batch fails.

    Raises:
        TaskError: the URL, or one of the part's limits, cannot be used.
    """

    def __init__(self, part: RewardPart, sleep: Callable[[float], object] | None = None) -> None:
        _require_limits(part)
        address = _split_url(part)
        self.part = part
        self.host = f"{address.hostname}:{address.port}" if address.port else str(address.hostname)
        self.who = f'reward part "{part.name}": {self.host}'
        self._url = urlunsplit(address._replace(netloc=address.netloc.rpartition("@")[2], fragment=""))
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "ppo-tuner"}
        if address.username is not None:
            login = f"{unquote(address.username)}:{unquote(address.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        self._open = build_opener(_NoRedirects).open
        self._sleep = sleep

    def __call__(self, batch: Batch) -> PartScores:
        """Score the batch.

        Raises:
            RewardOutage: the endpoint cannot be reached, or fails for now.
            RewardError: it refuses, or answers with something else than numbers.
        """
        size = self.part.batch_size
        return PartScores(self._ask_all([batch.rows(start, start + size) for start in range(0, len(batch), size)]))

    def _ask_all(self, batches: Sequence[Batch]) -> list[float]:
        """Return the scores of all batches, several requested at a time. The first error in order is raised.

        Pending requests are then abandoned, also at Ctrl-C: their threads are daemons, so they keep no process alive,
        and end with the answer or the timeout.
        """
        scores: list[Future[list[float]]] = [Future() for _ in batches]
        waiting, over = deque(zip(batches, scores, strict=True)), Event()

        def work() -> None:
            while waiting:
                try:
                    batch, future = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    future.set_result(self._score(batch, over))
                except Exception as error:
                    waiting.clear()  # those behind it; before the error is seen
                    future.set_exception(error)

        try:
            for _ in range(min(self.part.concurrency, len(batches))):
                Thread(target=work, name="reward", daemon=True).start()
            return [score for future in scores for score in future.result()]
        finally:
            waiting.clear()
            over.set()

    def _score(self, batch: Batch, over: Event) -> list[float]:
        asked = {
            "prompts": batch.texts,
            "responses": list(batch.responses),
            "ended": list(batch.ended),
            "columns": batch.columns(),
        }
        # Columns may hold dates and the like, which JSON has no word for.
        body = self._answer(json.dumps(asked, default=str).encode(), over)
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise RewardError(f"{self.who} did not answer with JSON: {cut(body)}") from error
        if isinstance(answer, dict):
            if "rewards" not in answer:
                raise RewardError(f'{self.who} answered with an object without "rewards": it has {cut(list(answer))}')
            answer = answer["rewards"]
        return read_answer(answer, batch, self.who).scores

    def _answer(self, body: bytes, over: Event) -> bytes:
        """Return the endpoint's body from the first successful attempt; attempts stop once `over`."""
        attempts = self.part.retries + 1
        for attempt in range(1, attempts + 1):
            try:
                return self._send(Request(self._url, body, self._headers, method="POST"))
            except HTTPError as error:
                error.close()
                problem, wait = f"answered {error.code} {error.reason}", _retry_after(error.headers)
                cause: Exception = error
                if error.code != TOO_MANY_REQUESTS and error.code < SERVER_ERROR:
                    raise RewardError(f"{self.who} {problem}, after {_times(attempt)}") from error
            except (OSError, HTTPException) as error:  # unreachable, cut off or timed out
                problem, wait, cause = self._trouble(error), None, error
            if attempt < attempts and not over.is_set():
                pause = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1) if wait is None else wait)
                logger.warning("%s %s (attempt %d of %d); again in %g s", self.who, problem, attempt, attempts, pause)
                (self._sleep or over.wait)(pause)
            if over.is_set():
                break
        raise RewardOutage(f"{self.who} {problem}, after {_times(attempt)}") from cause

    def _send(self, request: Request) -> bytes:
        deadline = time.monotonic() + self.part.timeout
        pieces: list[bytes] = []
        with self._open(request, timeout=self.part.timeout) as response:
            # The socket's timeout restarts with every byte, so an answer that trickles needs a deadline.
            while piece := response.read1():
                pieces.append(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError
            if response.length:  # read1 takes a connection that breaks off for the end
                raise IncompleteRead(b"".join(pieces), response.length)
        return b"".join(pieces)

    def _trouble(self, error: OSError | HTTPException) -> str:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            return f"gave no answer within {self.part.timeout:g} s"
        return f"cannot be reached ({one_line(reason) if isinstance(reason, BaseException) else reason})"


def _times(attempts: int) -> str:
    return "1 attempt" if attempts == 1 else f"{attempts} attempts"


def _retry_after(headers: Message) -> float | None:
    """Return the seconds in a Retry-After header, given in seconds or as a date."""
    text = headers.get("Retry-After")
    if text is None:
        return None
    try:
        seconds = float(text) if text.strip().isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
    except ValueError:
        return None
    return max(0.0, seconds)


def _split_url(part: RewardPart) -> SplitResult:
    try:
        address = urlsplit(part.where)
        plain = part.where.isascii() and part.where.isprintable() and " " not in part.where
        usable = plain and address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # its message would show a part of the URL, maybe of the password
        usable = False
    if not usable:
        raise TaskError(
            f'reward part "{part.name}": its URL is not allowed; expected http(s)://host:port/path, with special '
            "characters (a password's, too) percent-encoded"
        ) from None
    return address


def _require_limits(part: RewardPart) -> None:
    limits = (("retries", part.retries, 0), ("batch_size", part.batch_size, 1), ("concurrency", part.concurrency, 1))
    for name, value, least in limits:
        if value < least:
            raise TaskError(f'reward part "{part.name}": {name} = {value} is not allowed; expected at least {least}')
    if not 0 < part.timeout < float("inf"):
        raise TaskError(
            f'reward part "{part.name}": timeout = {part.timeout} is not allowed; expected a number of seconds over 0'
        )

"""Rewards by an HTTP endpoint.

    POST {"prompts": [...], "responses": [...], "ended": [...], "columns": {name: [...]}}
    ->   {"rewards": [...]} or [...]

`ended` is true for each response that ended by itself rather than being cut at response_length.

One request per `batch_size` responses, `concurrency` of them at a time. A request that fails on the way, waits longer
than `timeout` for the server or its whole body, or is answered with 408, 425, 429 or 5xx, is sent again.
"""

import base64
import json
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException, IncompleteRead
from multiprocessing.pool import ThreadPool
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ppo_core.data.task import RewardPart
from ppo_core.errors import RewardError, RewardOutage, TaskError, cut, one_line
from ppo_core.output import pluralize
from ppo_core.rewards.batch import Batch, PartScores, read_answer

logger = logging.getLogger(__name__)
FIRST_WAIT = 0.5
"""Seconds before the first retry; doubled each time."""
LONGEST_WAIT = 30.0
"""Maximum seconds between two attempts, even if Retry-After says more."""
SERVER_ERROR = 500
PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
"""Statuses below SERVER_ERROR that are worth another attempt."""


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects: a redirected POST would become a GET, and its password would be sent to another host."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        return None


class EndpointReward:
    """A part that is an HTTP endpoint, or TaskError if its URL cannot be used; `sleep` waits between attempts."""

    def __init__(self, part: RewardPart, sleep: Callable[[float], object] = time.sleep) -> None:
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
        parts = [batch.rows(start, start + size) for start in range(0, len(batch), size)]
        # Its threads are daemons: those that still wait when a request fails, or at Ctrl-C, hold nothing up.
        with ThreadPool(min(self.part.concurrency, len(parts))) as threads:
            return PartScores([score for scores in threads.imap(self._score, parts) for score in scores])

    def _score(self, batch: Batch) -> list[float]:
        asked = {
            "prompts": batch.texts,
            "responses": list(batch.responses),
            "ended": list(batch.ended),
            "columns": batch.columns(),
        }
        # Columns may hold dates and the like, which JSON has no word for.
        body = self._answer(json.dumps(asked, default=str).encode())
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise RewardError(f"{self.who} did not answer with JSON: {cut(body)}") from error
        if isinstance(answer, dict):
            if "rewards" not in answer:
                raise RewardError(f'{self.who} answered with an object without "rewards": it has {cut(list(answer))}')
            answer = answer["rewards"]
        return read_answer(answer, batch, self.who).scores

    def _answer(self, body: bytes) -> bytes:
        """Return the endpoint's body from the first successful attempt."""
        attempts = self.part.retries + 1
        for attempt in range(1, attempts + 1):
            try:
                return self._body(Request(self._url, body, self._headers, method="POST"))
            except HTTPError as error:
                error.close()
                problem, wait = f"answered {error.code} {error.reason}", error.headers.get("Retry-After", "")
                cause: Exception = error
                if error.code not in PASSING and error.code < SERVER_ERROR:
                    raise RewardError(f"{self.who} {problem}, after {pluralize(attempt, 'attempt')}") from error
            except (OSError, HTTPException) as error:  # unreachable, cut off or timed out
                problem, wait, cause = self._trouble(error), "", error
            if attempt < attempts:
                pause = min(LONGEST_WAIT, float(wait) if wait.isdecimal() else FIRST_WAIT * 2 ** (attempt - 1))
                logger.warning("%s %s (attempt %d of %d); again in %g s", self.who, problem, attempt, attempts, pause)
                self._sleep(pause)
        raise RewardOutage(f"{self.who} {problem}, after {pluralize(attempts, 'attempt')}") from cause

    def _body(self, request: Request) -> bytes:
        """Return the answer's body; TimeoutError if it is not whole in time, however steadily it comes."""
        deadline, chunks = time.monotonic() + self.part.seconds, []
        with self._open(request, timeout=self.part.seconds) as response:
            while chunk := response.read1():
                chunks.append(chunk)
                if time.monotonic() > deadline:
                    raise TimeoutError
            if response.length:  # a read by pieces does not say that bytes are missing
                raise IncompleteRead(b"", response.length)
        return b"".join(chunks)

    def _trouble(self, error: OSError | HTTPException) -> str:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            return f"gave no answer within {self.part.seconds:g} s"
        return f"cannot be reached ({one_line(reason) if isinstance(reason, BaseException) else reason})"


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

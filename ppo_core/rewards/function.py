"""Rewards by a Python function: `package.module:function`, `path/to/file.py:function` or `path/to/file.pkl:function`.

Arguments are passed by name, and only those that the signature asks for:

    prompts     list of B texts                 responses   list of B texts
    tokens      list of B lists of token texts  messages    list of B chats, where prompts are chats
    ended       list of B bools: whether the response ended by itself, and was not cut at response_length
    completions the responses, as TRL has them: of a chat, a list of one message of the assistant; a function that
                asks for them has also the `prompts` of chats as messages
    any other   that column of the dataset: a list of B values, None where a row lacks it

A function with `**kwargs` is given all of them. It returns one number per response; or, to reward token by token,
one list per response with one number per token. Lists, arrays and tensors will do. An `async def` is awaited, those of
all parts together, and so are the items of a list.
"""

import asyncio
import ctypes
import functools
import inspect
import logging
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Thread, current_thread, main_thread
from types import FunctionType
from typing import Any, cast

from ppo_core.config.lookup import attribute_hint, import_file, import_module, importable, not_found, user_path
from ppo_core.data.task import RewardPart
from ppo_core.errors import RewardError, RewardOutage, TaskError, nearest, one_line, raised_at
from ppo_core.rewards import pickled
from ppo_core.rewards.batch import Batch, PartScores, read_answer

logger = logging.getLogger(__name__)
COMPLETIONS = "completions"
"""TRL's name of the responses."""
ALWAYS = ("prompts", "responses", COMPLETIONS, "tokens", "ended")
"""Arguments that every function may have, with any dataset."""
FILE_SUFFIX = ".py"


class _TimeUp(BaseException):
    """A call takes too long. It is no Exception, since rewards catch those to skip a sample."""


class _TimerEvent(ctypes.Structure):
    """C's `sigevent`: a signal to the process, where `notify` is 0."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


_LIBC = ctypes.CDLL(None)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeUp in what is done inside after that time, and again each time that it passes.

    A timer's signal does it, which also ends a wait, or C code that lets no other thread run, such as `re`'s. Linux has
    timers beside the alarm, which is left to the user; elsewhere it is the alarm, and a function that sets its own has
    no other limit. Only the main thread can be interrupted.
    """
    if current_thread() is not main_thread():
        yield
        return

    def end(*_: object) -> None:
        if not is_done:
            raise _TimeUp

    is_done = False
    number = signal.SIGVTALRM if hasattr(_LIBC, "timer_create") else signal.SIGALRM
    before = signal.signal(number, end)
    stop = _start_timer(seconds) if number == signal.SIGVTALRM else _start_alarm(seconds)
    try:
        try:
            yield
        finally:
            is_done = True
    finally:
        stop()  # first: its signal ends a process that does not handle it
        signal.signal(number, before or signal.SIG_DFL)


def _start_timer(seconds: float) -> Callable[[], object]:
    """Have Linux send SIGVTALRM each time that the seconds pass, until what is returned is called."""
    timer, event = ctypes.c_void_p(), _TimerEvent(signal=signal.SIGVTALRM)
    if _LIBC.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0:
        return lambda: None
    every = divmod(round(seconds * 1e9), 10**9)
    _LIBC.timer_settime(timer, 0, (ctypes.c_long * 4)(*every, *every), None)
    return lambda: _LIBC.timer_delete(timer)


def _start_alarm(seconds: float) -> Callable[[], object]:
    """Have the system send SIGALRM each time that the seconds pass, until what is returned is called."""
    before = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    return lambda: signal.setitimer(signal.ITIMER_REAL, *before)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all rewards, which runs for good: clients that they keep belong to it."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _leave_blocked_loop() -> None:
    """Have the next call begin another loop if a coroutine blocks this one, which would hold up all others."""
    if wait([asyncio.run_coroutine_threadsafe(asyncio.sleep(0), _event_loop())], timeout=1.0).not_done:
        _event_loop.cache_clear()


def _waits(raw: Any) -> bool:
    return inspect.isawaitable(raw) or (isinstance(raw, list | tuple) and any(map(inspect.isawaitable, raw)))


async def _settled(raw: Any) -> Any:
    """Return an answer, awaited if need be; so are the items of a list, together."""
    while _waits(raw):
        raw = await (raw if inspect.isawaitable(raw) else asyncio.gather(*map(_settled, raw)))
    return raw


class FunctionReward:
    """A part that is a Python function.

    Where the dataset's `columns` are known the signature is checked at once, and a column that no row of a batch has is
    still there, as Nones.

    Raises:
        TaskError: the function cannot be loaded, or asks for something that is not a column.
    """

    def __init__(self, part: RewardPart, columns: Sequence[str] | None = None) -> None:
        self.part = part
        self.who = f'reward part "{part.name}": {part.where}'
        self.function = load_function(part)
        self.columns = () if columns is None else tuple(columns)
        self._parameters = _parameters(self.function, self.who)
        self._is_async = any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))
        source = part.where.rpartition(":")[0]
        self._folder = user_path(source).resolve().parent if source.endswith(FILE_SUFFIX) else None
        complaint = None if columns is None else self._lacking((*ALWAYS, *columns))
        if complaint:
            raise TaskError(complaint)

    def __call__(self, batch: Batch) -> PartScores:
        """Score the batch; errors as of `begun`'s scores."""
        with self.begun(batch) as scores:
            return scores()

    @contextmanager
    def begun(self, batch: Batch) -> Iterator[Callable[[], PartScores]]:
        """Begin to score the batch, if the function is an `async def`; yield what returns the scores.

        Raises (and so does what is yielded):
            RewardOutage: the function takes longer than its timeout. The sample is looked for, as long again, and where
                none alone takes so long the batch is scored once more.
            RewardError: the function has an argument that is not a column, raises, or does not return numbers.
        """
        complaint = self._lacking((*ALWAYS, *batch.columns(self.columns)))
        if complaint:
            raise RewardError(complaint)
        begun = asyncio.run_coroutine_threadsafe(self._begin(batch), _event_loop()) if self._is_async else None
        try:
            yield lambda: read_answer(self._answer(batch, begun), batch, self.who, tokenwise=True)
        finally:
            if begun is not None:
                begun.cancel()

    def _answer(self, batch: Batch, begun: "Future[Any] | None") -> Any:
        try:
            with _time_limit(self.part.seconds):
                return self._call(batch) if begun is None else begun.result()
        except (Exception, SystemExit) as error:
            blamed = self._culprit(batch) or _together(batch)
            raise RewardError(f"{self.who} raised {one_line(error)} at {raised_at(error)}; on {blamed}") from error
        except _TimeUp:
            pass
        if begun is not None:
            begun.cancel()
        culprit = self._culprit(batch)
        problem = f"{self.who} gave no answer within {self.part.seconds:g} s; on {culprit or _together(batch)}"
        if culprit is None:
            logger.warning("%s; once again", problem)
            with suppress(Exception, SystemExit, _TimeUp), _time_limit(self.part.seconds):
                return self._call(batch)
        raise RewardOutage(problem)

    async def _begin(self, batch: Batch) -> Any:
        with self._neighbours():
            return await _settled(self.function(**self._arguments(batch)))

    def _call(self, batch: Batch) -> Any:
        with self._neighbours():
            raw = self.function(**self._arguments(batch))
            if not _waits(raw):
                return raw
            future = asyncio.run_coroutine_threadsafe(_settled(raw), _event_loop())
            try:
                return future.result()
            finally:
                future.cancel()

    def _neighbours(self) -> AbstractContextManager[None]:
        return nullcontext() if self._folder is None else importable(self._folder)

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        asked = {parameter.name for parameter in self._parameters}
        chats = [prompt.messages for prompt in batch.prompts]
        given: dict[str, Any] = batch.columns(self.columns)
        given |= {
            "prompts": batch.texts,
            "responses": list(batch.responses),
            COMPLETIONS: [
                response if chat is None else [{"role": "assistant", "content": response}]
                for response, chat in zip(batch.responses, chats, strict=True)
            ],
            "tokens": [list(tokens) for tokens in batch.tokens],
            "ended": list(batch.ended),
        }
        if COMPLETIONS in asked:
            given["prompts"] = [
                text if chat is None else [dict(message) for message in chat]
                for text, chat in zip(batch.texts, chats, strict=True)
            ]
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self._parameters):
            return given
        return {name: values for name, values in given.items() if name in asked}

    def _lacking(self, names: Collection[str]) -> str | None:
        """Return the problem if the signature needs a name outside `names`, or None."""
        for parameter in self._parameters:
            variadic = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            if parameter.name not in names and not variadic and parameter.default is inspect.Parameter.empty:
                return (
                    f'{self.who} asks for "{parameter.name}", which is not a column; available: {", ".join(names)}'
                    f"{nearest(parameter.name, names)}"
                )
        return None

    def _culprit(self, batch: Batch) -> str | None:
        """Return the first sample on which the function fails by itself; None: on none.

        All samples together have as long as a call: where that is up the sample whose turn it is may be innocent, so
        it is told apart.
        """
        row = 0
        _leave_blocked_loop()
        try:
            with _time_limit(self.part.seconds):
                for row in range(len(batch)):
                    self._call(batch.rows(row, row + 1))
        except (Exception, SystemExit):
            return batch.sample(row)
        except _TimeUp:
            return f"{batch.sample(row)}, where trying one by one took as long again"
        return None


def _together(batch: Batch) -> str:
    return f"{len(batch)} samples together but on none of them alone; the first is {batch.sample(0)}"


def load_function(part: RewardPart) -> Callable[..., Any]:
    """Import the function that a part names; TaskError if there is no such one, or importing it fails."""
    who = f'reward part "{part.name}"'
    source, _, name = part.where.rpartition(":")
    if not source or not name:
        raise TaskError(f"{who}: {part.where} is not a function such as my_package.rewards:score or rewards.py:score")
    try:
        if source.endswith((FILE_SUFFIX, pickled.PICKLE_SUFFIX)):
            path = user_path(source).resolve()
            if not path.is_file():
                raise TaskError(f"{who}: file {not_found(path)}")
            if path.suffix == pickled.PICKLE_SUFFIX:
                return cast(Callable[..., Any], pickled.load(path))
            module = import_file(path)
        else:
            module, _ = import_module(part.where, f"{who}: function", TaskError)
    except TaskError:
        raise
    except (Exception, SystemExit) as error:  # the user's module may raise any class
        raise TaskError(f"{who}: importing {source} raised {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        hint = attribute_hint(module, FunctionType, name)
        raise TaskError(f'{who}: {source} has no function "{name}"{hint}')
    return cast(Callable[..., Any], function)


def _parameters(function: Callable[..., Any], who: str) -> tuple[inspect.Parameter, ...]:
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except ValueError as error:  # some functions written in C
        raise TaskError(f"{who} has no readable signature; wrap it in a def") from error
    if any(parameter.kind is inspect.Parameter.POSITIONAL_ONLY for parameter in parameters):
        raise TaskError(f"{who} takes arguments by position only; they are passed by name")
    return parameters

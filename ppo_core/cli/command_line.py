"""Shared by all commands: parsing, one line per error, exit statuses, and signals."""

import argparse
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ppo_core import output
from ppo_core.config.checks import convert
from ppo_core.distributed import launch as launched
from ppo_core.errors import OUT_OF_MEMORY, ConfigError, PPOTunerError, TaskError, is_out_of_memory, nearest

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PIPE = 0, 1, 2, 130, 141


class Parser(argparse.ArgumentParser):
    """An argument parser that takes - and _ in a flag's name alike, and raises ConfigError instead of exiting."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, with each flag as it was declared."""
        flags = {flag.replace("-", "_"): flag for flag in self._option_string_actions if flag.startswith("--")}
        words = []
        for word in sys.argv[1:] if args is None else args:
            given, equals, value = word.partition("=")
            flag = flags.get(given.replace("-", "_")) if given.startswith("--") else None
            words.append(word if flag is None else f"{flag}{equals}{value}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the mistake instead of printing it."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def refuse_unknown(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    """Raise ConfigError for arguments that `parse_known_args` left over, naming the nearest flag of `parser`."""
    if not rest:
        return
    flag = next((text for text in rest if text.startswith("-")), None)
    if flag is None:
        raise ConfigError(f'unexpected argument "{rest[0]}"; see {parser.prog} --help')
    name = flag.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    raise ConfigError(f'unknown flag "{name}"{nearest(name, known)}; see {parser.prog} --help')


def positive_int(text: str) -> int:
    """Return a whole number over 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """Return a number over 0."""
    number = convert(text, float)
    if not isinstance(number, float) or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a number over 0")
    return number


def import_from_working_folder() -> None:
    """Make modules in the working folder importable, as `python -m` does; workers inherit it."""
    folder = str(Path.cwd())
    if not sys.flags.safe_path and not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)


def run(name: str, work: Callable[[], int]) -> int:
    """Run a command's `work` and return its exit status; `name` prefixes its messages on stderr.

    0: done; 1: it failed; 2: a mistake in the command line, a configuration or a task; 130: interrupted; 141: the
    output's reader ended.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # so that printing "β" cannot fail in an old locale
    import_from_working_folder()
    try:
        status = work()
        sys.stdout.flush()
        return status
    except PPOTunerError as error:
        if launched.rank() == 0:  # the other processes of the launch report the same
            print(f"{name}: error: {output.plain(' '.join(str(error).split()))}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | TaskError) else EXIT_ERROR
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"{name}: error: {OUT_OF_MEMORY}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        output.discard(sys.stdout)
        return EXIT_PIPE
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        print(f"{name}: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


INTERRUPTED = "interrupted"
_REASONS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: "ended by SIGTERM", signal.SIGHUP: "ended by SIGHUP"}
_PASSED_ON_SECONDS = 5.0
"""A repeated signal within this time counts as one: launchers forward a Ctrl-C that their processes
also got from the terminal, and a shell passes on the end of its terminal."""


class StopRequest:
    """A request to stop, with its reason: the first Ctrl-C, SIGTERM or SIGHUP; the second ends the program at once."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._since = 0.0
        self._terminals = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        self.on_request: Callable[[], None] = lambda: None
        """Called in the signal's handler, to end a wait."""

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """Note the first signal; raise KeyboardInterrupt at the second."""
        is_hangup = number == signal.SIGHUP
        for stream in self._terminals if is_hangup else ():
            if not stream.isatty():  # the terminal is gone
                output.discard(stream)
        if self.why is not None:
            if (launched.size() > 1 or is_hangup) and time.monotonic() - self._since < _PASSED_ON_SECONDS:
                return
            raise KeyboardInterrupt
        self._since = time.monotonic()
        self.why = _REASONS[signal.Signals(number)]
        self.on_request()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Handle the signals inside the context (in the main thread; elsewhere none arrive)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = [*_REASONS] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else [signal.SIGINT, signal.SIGTERM]
    before = {number: signal.signal(number, request.receive) for number in numbers}  # `nohup` outlives its terminal
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)

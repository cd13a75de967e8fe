"""What stands around a command: one line for every error, and the exit status that belongs to it."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ppo_core.command.parsing import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_USAGE
from ppo_core.errors import ConfigError, PPOTunerError


def import_from_working_folder() -> None:
    """Let `module:attribute` name what lies in the working folder, as `python -m` does; workers inherit it."""
    folder = str(Path.cwd())
    if not sys.flags.safe_path and not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)


def run(name: str, work: Callable[[], int]) -> int:
    """Do a command's `work` and return its exit status; `name` is the program's, before what it says on stderr.

    0: done; 1: it failed; 2: a mistake in the command line or a configuration; 130: interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old locale must not turn a "β" into a traceback
    import_from_working_folder()
    try:
        status = work()
        sys.stdout.flush()
        return status
    except PPOTunerError as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        print(f"{name}: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED

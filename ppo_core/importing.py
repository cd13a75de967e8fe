"""Finding what a user names as `module:attribute`, and Python files of theirs."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ppo_core.errors import PPOTunerError


def import_module(path: str, what: str, error: type[PPOTunerError]) -> tuple[ModuleType, str]:
    """Return the module and the attribute's name of `module:attribute`.

    Raises:
        PPOTunerError: of the class `error`, where there is no such module; `what` says what was looked for.
    """
    name, _, attribute = path.partition(":")
    try:
        return importlib.import_module(name), attribute
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise  # the module is there, and lacks something itself
        raise error(f'{what} "{path}": there is no module "{missing.name}"') from missing


def import_file(file: Path) -> ModuleType:
    """Return a Python file, run as a module of its own. It may import what lies beside it, as a script may.

    Raises:
        ImportError: it is no file, or not named as Python's are.
        Exception: whatever it raises.
    """
    file = file.resolve()
    # Two files may share a name; dataclasses, pickle and make_task look their module up in sys.modules.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _importing_from(file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))

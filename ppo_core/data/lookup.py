"""Find things by the user's name for them: `module:attribute`, a Python file, a hub model. Never imports torch."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ppo_core.errors import PPOTunerError, TaskError, nearest


def not_found(path: Path) -> str:
    """Return `x.toml not found in FOLDER`, the folder that a relative path begins at, with the nearest name there."""
    begins = "" if path.is_absolute() else f" in {Path.cwd()}"
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    return f"{path} not found{begins}{nearest(path.name, siblings)}"


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
        raise error(f'{what} "{path}": module "{missing.name}" not found') from missing


def import_file(file: Path) -> ModuleType:
    """Return a Python file, run as a module of its own. Like a script, it may import its neighbours.

    Raises:
        ImportError: it is not a file, or not named as Python's are.
        Exception: whatever it raises.
    """
    file = file.resolve()
    # Two files may share a name; dataclasses, pickle and make_task look their module up in sys.modules.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"{file} is not a Python file")
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


# Check quickly that a model that is not on disk can be fetched from the hub at all.
#
# Loading asks for several files and repeats each request for half a minute, with a line on stderr every time.

FILES = ("config.json", "adapter_config.json")
"""Files of which a cached model or adapter has one."""
SECONDS = 5.0
"""Timeout for the hub's answer."""


def require_reachable(model: str, where: str) -> None:
    """Raise TaskError if a hub id is not in the local cache and the hub does not respond.

    Paths are skipped; an answer of the hub, even a refusal, is left to the loading. `where` names the setting that
    holds the id.
    """
    if Path(model).is_absolute():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache  # which takes a while to import
    from huggingface_hub.errors import HfHubHTTPError

    if any(isinstance(try_to_load_from_cache(model, name), str) for name in FILES):
        return
    try:
        HfApi().model_info(model, timeout=SECONDS)
    except HfHubHTTPError:
        return
    except Exception as error:  # what a connection raises is of the classes of hub's own libraries
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise TaskError(
            f"{where} = {model!r}: folder {model} not found, and the hub cannot be reached: {reason}"
        ) from error

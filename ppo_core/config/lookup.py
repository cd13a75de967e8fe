"""Find things by the user's name for them: `module:attribute`, a Python file, a hub model. Never imports torch."""

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from ppo_core.errors import PPOTunerError, TaskError, first_line, nearest


def user_path(text: str) -> Path:
    """Return a path with `~` as the user's folder; where there is no such user, it is a name like any other."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def not_found(path: Path) -> str:
    """Return `x.toml not found in FOLDER`, the folder that a relative path begins at, with the nearest name there."""
    below = "" if path.is_absolute() else f" in {Path.cwd()}"
    siblings = [item.name for item in path.parent.iterdir() if item.name != path.name] if path.parent.is_dir() else []
    return f"{path} not found{below}{nearest(path.name, siblings)}"


def import_module(path: str, what: str, error: type[PPOTunerError]) -> tuple[ModuleType, str]:
    """Return the module and the attribute's name of `module:attribute`, or raise `error`, which begins with `what`."""
    name, _, attribute = path.partition(":")
    try:
        return importlib.import_module(name), attribute
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise  # the module is there, and lacks something itself
        raise error(f'{what} "{path}": module "{missing.name}" not found') from missing


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let modules in a folder be imported by their names inside, before any others, as beside a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # what ran inside has removed it
            sys.path.remove(str(folder))


def import_file(file: Path) -> ModuleType:
    """Return a Python file, run as a module of its own. Like a script, it may import its neighbours.

    The program that is running is not run again. Raises ImportError if it is no Python file, and what its code raises.
    """
    file = file.resolve()
    program = sys.modules["__main__"]
    if Path(getattr(program, "__file__", None) or "").resolve() == file:
        return program
    # Two files may share a name; dataclasses, pickle and make_task look their module up in sys.modules.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with importable(file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
MODEL_CONFIG_FILES = ("config.json", "adapter_config.json")
"""Files of which a saved model or adapter has one."""
HUB_TIMEOUT_SECONDS = 5.0


def require_reachable(model: str, where: str) -> None:
    """Raise TaskError if a hub id is not in the local cache and the hub does not respond.

    A quick check: loading asks for several files and repeats each request for half a minute. Paths are skipped;
    an answer of the hub, even a refusal, is left to the loading. `where` names the setting that holds the id.
    """
    if Path(model).is_absolute():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache  # slow to import
    from huggingface_hub.errors import HfHubHTTPError

    if any(isinstance(try_to_load_from_cache(model, name), str) for name in MODEL_CONFIG_FILES):
        return
    try:
        HfApi().model_info(model, timeout=HUB_TIMEOUT_SECONDS)
    except HfHubHTTPError:
        return
    except Exception as error:  # connections raise classes of libraries below the hub's own
        raise TaskError(
            f"{where} = {model!r}: folder {model} not found, and the hub cannot be reached: {first_line(error)}"
        ) from error


def attribute_hint(module: ModuleType, kind: type, name: str) -> str:
    """Return the end of an error that a module lacks `name`: the names of its values of a `kind`, and the nearest."""
    names = [key for key, value in vars(module).items() if isinstance(value, kind)]
    return f"; it has: {', '.join(names)}{nearest(name, names)}" if names else "; it defines none"

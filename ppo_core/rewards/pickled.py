"""Functions that no file holds, as those of a notebook: pickled by value, so that any process can load them.

NAME-DIGEST.pkl    the function, by cloudpickle; only what trains loads it
NAME-DIGEST.py     its source, for people and for digests: the function's own, and what it uses of its module
"""

import hashlib
import inspect
import pickle
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from ppo_core.errors import ConfigError, first_line

PICKLE_SUFFIX = ".pkl"


def write(function: Callable[..., Any], folder: Path, where: str) -> str:
    """Pickle a function into a folder, unless it is there, and return its `where` as a reward: `file.pkl:name`.

    Raises ConfigError, which begins with `where`, if it holds something that cannot be pickled.
    """
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:  # whatever the pickling of a user's objects raises
        raise ConfigError(f"{where} cannot be sent to other processes: {first_line(error)}") from error
    name = re.sub(r"\W", "", getattr(function, "__name__", type(function).__name__)) or "reward"
    source = source_of(function) or f"# no source is known; sha256 {hashlib.sha256(pickled).hexdigest()}\n"
    path = folder / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:12]}{PICKLE_SUFFIX}"
    if not path.exists():
        source_file(path).write_text(source, encoding="utf-8")
        part = path.with_suffix(".part")
        part.write_bytes(pickled)
        part.replace(path)
    return f"{path}:{name}"


def source_file(path: Path) -> Path:
    """Return the file with the source of a pickled function."""
    return path.with_suffix(".py")


def load(path: Path) -> Any:
    """Return a pickled function. Like importing a module, this runs what the file says."""
    return pickle.loads(path.read_bytes())


def source_of(function: Callable[..., Any]) -> str:
    """Return a function's source and that of the functions, classes and plain values that it uses of its own module.

    Empty: no source is known, as of what a library made.
    """
    found: dict[int | str, str] = {}
    if isinstance(function, partial):
        _collect("args", [function.args, function.keywords], "", found)
        function = function.func
    own = function if isinstance(function, FunctionType) else type(function)
    _collect(own.__qualname__, own, own.__module__, found)
    if own is not function:
        for name, value in getattr(function, "__dict__", {}).items():
            _collect(name, value, own.__module__, found)
    return "\n".join(filter(None, found.values())) if found.get(id(own)) else ""


def _collect(name: str, value: object, module: str, found: dict[int | str, str]) -> None:
    """Add a value's source to those found, by its identity, or that of a plain value by its name."""
    key = id(value) if isinstance(value, FunctionType | type) else name
    if key in found:
        return
    if isinstance(value, FunctionType) and value.__module__ == module:
        found[key] = ""
        with suppress(OSError, TypeError):  # typed where Python keeps no source
            found[key] = textwrap.dedent(inspect.getsource(value))
        for other, used in _used(value):
            _collect(other, used, module, found)
    elif isinstance(value, type) and value.__module__ == module:
        found[key] = f"class {name}\n"
        for other, used in [*((base.__name__, base) for base in value.__bases__), *vars(value).items()]:
            if isinstance(used, FunctionType) or not other.startswith("__"):  # as the line that it begins in
                _collect(f"{name}.{other}", used, module, found)
    elif (text := _text(value)) is not None:
        found[key] = f"{name} = {text}\n"


def _used(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the names and values that a function finds around it: closed over, by default, or global."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents
    if function.__defaults__ or function.__kwdefaults__:
        yield f"defaults of {function.__qualname__}", [function.__defaults__, function.__kwdefaults__]
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: CodeType) -> set[str]:
    """Return all names in a code and in those inside it, as comprehensions are."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _text(value: object) -> str | None:
    """Return a plain value as text that is the same in every process, or None."""
    if value is None or isinstance(value, bool | int | float | str | bytes | re.Pattern):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = [f"{_text(key)}: {_text(inner)}" for key, inner in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple | set | frozenset):
        texts = [str(_text(inner)) for inner in value]
        return f"{type(value).__name__}({sorted(texts) if isinstance(value, set | frozenset) else texts})"
    return None

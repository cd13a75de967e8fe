"""Models and data files as a task names them: a path, a hub id, or `task:NAME` for a built-in task's policy.

Relative paths begin at a given folder. Never imports torch.
"""

from pathlib import Path

from ppo_core.config import checks
from ppo_core.data.lookup import HUB_ID, MODEL_CONFIG_FILES, not_found
from ppo_core.data.prompt_files import READERS, is_data_file
from ppo_core.data.task import BUILT_IN
from ppo_core.errors import ConfigError

TASK_PREFIX = "task:"
"""`task:NAME` as a policy is the SFT policy of the built-in task NAME."""


def policy_place(value: object, folder: Path, where: str) -> str:
    """Return the policy's absolute path or hub id, or `task:NAME` unchanged.

    Raises:
        ConfigError: see `model_place`; or the built-in task does not exist.
    """
    if isinstance(value, str) and value.startswith(TASK_PREFIX):
        return checks.one_of(value, [f"{TASK_PREFIX}{name}" for name in BUILT_IN], where)
    return model_place(value, folder, where)


def model_place(value: object, folder: Path, where: str) -> str:
    """Return a model's absolute path, relative ones from `folder`, or its hub id.

    Raises:
        ConfigError: it looks like a path and does not exist, or it is not a saved model.
    """
    text = checks.text(value, where, "a model's folder or hub id")
    path = _local(text, folder, where, is_path=False)
    if path is None:
        return text
    if not any((path / name).exists() for name in MODEL_CONFIG_FILES):
        raise ConfigError(f"{where} = {text!r} is not a saved model: {path} has no config.json")
    return str(path)


def data_place(value: object, folder: Path, where: str) -> str:
    """Return a data file's or folder's absolute path, relative ones from `folder`, or its hub id.

    Raises:
        ConfigError: it looks like a path and does not exist.
    """
    text = checks.text(value, where, "a data file, a folder or a dataset's hub id")
    path = _local(text, folder, where, is_path=Path(text).suffix.lower() in READERS)
    return text if path is None else str(path)


def split_place(value: object, folder: Path, where: str) -> str:
    """Return the absolute path of a split's data file, relative ones from `folder`.

    Raises:
        ConfigError: there is no such file, or it is no data file.
    """
    if not is_data_file(value):
        raise ConfigError(f"{where} = {value!r} is not allowed; expected a data file: {', '.join(READERS)}")
    return file_place(str(value), folder, where)


def file_place(value: str, folder: Path, where: str) -> str:
    """Return a file's absolute path, relative ones from `folder`.

    Raises:
        ConfigError: there is no such file.
    """
    path = _local(value, folder, where, is_path=True)
    assert path is not None
    if not path.is_file():
        raise ConfigError(f"{where} = {value!r} is a folder, not a file")
    return str(path)


def _local(text: str, folder: Path, where: str, *, is_path: bool) -> Path | None:
    """Return the absolute path if it exists, or None for a hub id; `is_path`: it cannot be a hub id."""
    path = (folder / Path(text).expanduser()).absolute()
    if path.exists():
        return path
    first, slash, _ = text.partition("/")
    is_below_folder = slash and (folder / first).is_dir()  # so `a/b` names no user of a hub
    if not is_path and HUB_ID.fullmatch(text) and not is_below_folder:
        return None
    raise ConfigError(f"{where} = {text!r}: {not_found(path)}")

"""Finding what a user names as `module:attribute`."""

import importlib
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

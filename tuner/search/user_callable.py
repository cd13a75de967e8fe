"""A user's own sampler or pruner, named as `module:callable` in a study file."""

import warnings
from typing import Any

from optuna.exceptions import ExperimentalWarning

from ppo_core.data.lookup import import_module
from ppo_core.errors import ConfigError, nearest
from ppo_core.rewards.batch import cut, one_line


def call(path: str, what: str, kind: Any, **arguments: Any) -> Any:
    """Call the user's `module:callable` and return the object, checked to be of the kind.

    Args:
        path: `module:callable`, as in the study file.
        what: "sampler" or "pruner", for errors.
        kind: Class that the object must be an instance of.
        arguments: Arguments of the call.

    Raises:
        ConfigError: it cannot be imported or called, or returns something else.
    """
    who = f'{what} "{path}"'
    try:
        module, name = import_module(path, what, ConfigError)
    except ConfigError:
        raise
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(f"{who}: importing it raised {one_line(error)}") from error
    make = getattr(module, name, None)
    if not callable(make):
        there_are = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(f'{who}: module "{module.__name__}" has no callable "{name}"{nearest(name, there_are)}')
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # of Optuna's own classes: the user chose them
            made = make(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise ConfigError(f"{who}: calling it with {given or 'nothing'} raised {one_line(error)}") from error
    if not isinstance(made, kind):
        raise ConfigError(f"{who} returned {cut(made)}, which is not an optuna {kind.__name__}")
    return made

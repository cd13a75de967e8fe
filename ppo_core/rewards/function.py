"""Rewards by a Python function: `package.module:function` or `path/to/file.py:function`.

Arguments are passed by name, and only those that the signature asks for:

    prompts     list of B texts                 responses   list of B texts
    tokens      list of B lists of token texts  messages    list of B chats, where prompts are chats
    ended       list of B bools: whether the response ended by itself, and was not cut at response_length
    any other   that column of the dataset: a list of B values, None where a row lacks it

A function with `**kwargs` is given all of them. It returns one number per response; or, to reward token by token,
one list per response with one number per token. Lists, arrays and tensors will do.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from ppo_core.data.lookup import attribute_hint, import_file, import_module, not_found
from ppo_core.data.task import RewardPart
from ppo_core.errors import RewardError, TaskError, nearest, raised_at
from ppo_core.rewards.batch import Batch, PartScores, one_line, read_answer

ALWAYS = ("prompts", "responses", "tokens", "ended")
"""Arguments that every function may have, with any dataset."""


class FunctionReward:
    """A part that is a Python function.

    Args:
        part: Names the function.
        columns: The dataset's columns where they are known; then the signature is checked at once, and a column that
            no row of a batch has is still there, as Nones.

    Raises:
        TaskError: the function cannot be loaded, or asks for something that is not a column.
    """

    def __init__(self, part: RewardPart, columns: Sequence[str] | None = None) -> None:
        self.who = f'reward part "{part.name}": {part.where}'
        self.function = load_function(part)
        self.columns = () if columns is None else tuple(columns)
        self._parameters = _parameters(self.function, self.who)
        complaint = None if columns is None else self._lacking((*ALWAYS, *columns))
        if complaint:
            raise TaskError(complaint)

    def __call__(self, batch: Batch) -> PartScores:
        """Score the batch.

        Raises:
            RewardError: the function has an argument that is not a column, raises, or does not return numbers.
        """
        complaint = self._lacking((*ALWAYS, *batch.columns(self.columns)))
        if complaint:
            raise RewardError(complaint)
        try:
            raw = self._call(batch)
        except Exception as error:
            where = f"at {raised_at(error)}; {self._culprit(batch)}"
            raise RewardError(f"{self.who} raised {one_line(error)} {where}") from error
        return read_answer(raw, batch, self.who, tokenwise=True)

    def _call(self, batch: Batch) -> Any:
        given: dict[str, Any] = batch.columns(self.columns)
        given |= {
            "prompts": batch.texts,
            "responses": list(batch.responses),
            "tokens": [list(tokens) for tokens in batch.tokens],
            "ended": list(batch.ended),
        }
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self._parameters):
            asked = {parameter.name for parameter in self._parameters}
            given = {name: values for name, values in given.items() if name in asked}
        return self.function(**given)

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

    def _culprit(self, batch: Batch) -> str:
        """Return the first sample on which the function raises by itself; it was called with all of them at once."""
        for row in range(len(batch)):
            try:
                self._call(batch.rows(row, row + 1))
            except Exception:
                return f"on {batch.sample(row)}"
        return f"on {len(batch)} samples together but on none of them alone; the first is {batch.sample(0)}"


def load_function(part: RewardPart) -> Callable[..., Any]:
    """Import the function that a part names.

    Raises:
        TaskError: there is no such file, module or function, or importing it fails.
    """
    who = f'reward part "{part.name}"'
    place, _, name = part.where.rpartition(":")
    if not place or not name:
        raise TaskError(f"{who}: {part.where} is not a function such as my_package.rewards:score or rewards.py:score")
    try:
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            if not path.is_file():
                raise TaskError(f"{who}: file {not_found(path)}")
            module = import_file(path)
        else:
            module, _ = import_module(part.where, f"{who}: function", TaskError)
    except TaskError:
        raise
    except Exception as error:  # the user's module may raise any class
        raise TaskError(f"{who}: importing {place} raised {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        hint = attribute_hint(module, FunctionType, name)
        raise TaskError(f'{who}: {place} has no function "{name}"{hint}')
    return function  # type: ignore[no-any-return]


def _parameters(function: Callable[..., Any], who: str) -> tuple[inspect.Parameter, ...]:
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except ValueError as error:  # some functions written in C
        raise TaskError(f"{who} has no readable signature; wrap it in a def") from error
    if any(parameter.kind is inspect.Parameter.POSITIONAL_ONLY for parameter in parameters):
        raise TaskError(f"{who} takes arguments by position only; they are passed by name")
    return parameters

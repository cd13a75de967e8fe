"""A batch of responses to score, with names for errors, and checks of the answers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from ppo_core.data.task import Prompt
from ppo_core.errors import RewardError, cut
from ppo_core.output import pluralize

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number that is finite in float32, in which scores are learned from."""
MESSAGES = "messages"
"""Name of the column of chats."""


def is_finite(number: float) -> bool:
    """Return True if the number is finite in float32."""
    return abs(number) <= LARGEST


def column_names(prompts: Iterable[Prompt]) -> tuple[str, ...]:
    """Return all columns of the prompts, in the order of first sight; `messages` if one is a chat."""
    return tuple(dict.fromkeys(name for prompt in prompts for name in _row(prompt)))


def _row(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt's values by column."""
    chat = {} if prompt.messages is None else {MESSAGES: [dict(message) for message in prompt.messages]}
    return {**prompt.columns, **chat}


@dataclass(frozen=True)
class Batch:
    """B prompts, their responses, the texts of the responses' tokens, and flags of those that ended by themselves."""

    prompts: Sequence[Prompt]
    responses: Sequence[str]
    tokens: Sequence[Sequence[str]]
    ended: Sequence[bool]
    first: int = 0
    """Position of the first row in the batch that this one was cut from."""

    def __len__(self) -> int:
        return len(self.responses)

    def rows(self, start: int, stop: int) -> "Batch":
        """Return some of the rows; errors still name them as rows of the whole."""
        part = slice(start, stop)
        return Batch(self.prompts[part], self.responses[part], self.tokens[part], self.ended[part], self.first + start)

    @property
    def texts(self) -> list[str]:
        """[B]: the prompts as the policy read them."""
        return [prompt.text for prompt in self.prompts]

    def sample(self, row: int) -> str:
        """Return an error's name for a row: its index and the start of prompt and response."""
        return f"sample {self.first + row} (prompt {cut(self.prompts[row].text)}, response {cut(self.responses[row])})"

    def columns(self, known: Sequence[str] = ()) -> dict[str, list[Any]]:
        """Return [B] values by column, of the rows' columns and the `known` ones; None if a row lacks one."""
        rows = list(map(_row, self.prompts))
        return {name: [row.get(name) for row in rows] for name in (*known, *column_names(self.prompts))}


@dataclass(frozen=True)
class PartScores:
    """One part's answer for B responses, unweighted."""

    scores: list[float]
    """[B]; for a dense answer, its sums."""
    dense: list[list[float]] | None = None
    """Per response one number per token, if the part answers so."""


def read_answer(raw: Any, batch: Batch, who: str, *, tokenwise: bool = False) -> PartScores:
    """Return an answer as plain numbers. `raw` is a list, tuple, array or tensor; so are the rows of a dense one.

    `who` names the reward in errors; `tokenwise` allows one number per token.

    Raises:
        RewardError: not one number that is finite in float32 for each response (or, dense, for each token of each
            response, and their sum).
    """
    rows = _plain(raw)
    if not isinstance(rows, list | tuple):
        raise RewardError(f"{who} gave {cut(raw)}, not a list of one number per response")
    rows = [_plain(row) for row in rows]
    if len(rows) != len(batch):
        where = batch.sample(min(len(rows), len(batch) - 1))
        nearby = f"the first without one is {where}" if len(rows) < len(batch) else f"the last is {where}"
        given, wanted = pluralize(len(rows), "score"), pluralize(len(batch), "response")
        raise RewardError(f"{who} gave {given} for {wanted}; {nearby}")
    if tokenwise and isinstance(rows[0], list | tuple):
        dense = [_token_scores(row, batch, index, who) for index, row in enumerate(rows)]
        sums = [_number(math.fsum(row), f"in sum for {batch.sample(index)}", who) for index, row in enumerate(dense)]
        return PartScores(sums, dense)
    return PartScores([_number(row, f"for {batch.sample(index)}", who) for index, row in enumerate(rows)])


def _plain(value: Any) -> Any:
    """Convert arrays and tensors of any library to lists and numbers."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _token_scores(row: Any, batch: Batch, index: int, who: str) -> list[float]:
    sample, tokens = batch.sample(index), len(batch.tokens[index])
    if not isinstance(row, list | tuple):
        raise RewardError(
            f"{who} gave {cut(row)} for {sample}, not a list of one number per token as for the first one"
        )
    if len(row) != tokens:
        raise RewardError(
            f"{who} gave {pluralize(len(row), 'number')} for the {pluralize(tokens, 'token')} of {sample}; a list per "
            "response rewards its tokens"
        )
    return [_number(_plain(value), f"for token {position} of {sample}", who) for position, value in enumerate(row)]


def _number(value: Any, where: str, who: str) -> float:
    if not isinstance(value, SupportsFloat):
        raise RewardError(f"{who} gave {cut(value)} {where}, not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not is_finite(number):
        raise RewardError(f"{who} gave {number} {where}, not a finite number in float32")
    return number

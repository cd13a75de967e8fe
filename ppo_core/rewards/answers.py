"""Checking what a reward answered: one finite number a response, or one a token."""

import math
from dataclasses import dataclass
from typing import Any, SupportsFloat

from ppo_core.errors import RewardError
from ppo_core.rewards.batch import Batch, cut


@dataclass(frozen=True)
class Answer:
    """What one part says of B responses, unweighted."""

    scores: list[float]
    """[B]; of a dense answer, its sums."""
    dense: list[list[float]] | None = None
    """Per response one number a token, where the part answers so."""


def read_answer(raw: Any, batch: Batch, who: str, *, tokenwise: bool = False) -> Answer:
    """Return an answer as plain numbers. `raw` is a list, tuple, array or tensor; so are the rows of a dense one.

    `who` answered, as errors name it; with `tokenwise` the answer may be dense.

    Raises:
        RewardError: not one finite number for each response (or, dense, for each token of each response).
    """
    rows = _plain(raw)
    if not isinstance(rows, list | tuple):
        raise RewardError(f"{who} gave {cut(raw)}, not a list of one number a response")
    if len(rows) != len(batch):
        where = batch.sample(min(len(rows), len(batch) - 1))
        nearby = f"the first without one is {where}" if len(rows) < len(batch) else f"the last is {where}"
        raise RewardError(f"{who} gave {len(rows)} scores for {len(batch)} responses; {nearby}")
    rows = [_plain(row) for row in rows]
    if tokenwise and isinstance(rows[0], list | tuple):
        dense = [_token_scores(row, batch, index, who) for index, row in enumerate(rows)]
        return Answer([math.fsum(row) for row in dense], dense)
    return Answer([_number(row, f"for {batch.sample(index)}", who) for index, row in enumerate(rows)])


def _plain(value: Any) -> Any:
    """Return arrays and tensors of any library as the lists and numbers that they hold."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _token_scores(row: Any, batch: Batch, index: int, who: str) -> list[float]:
    sample, tokens = batch.sample(index), len(batch.tokens[index])
    if not isinstance(row, list | tuple):
        raise RewardError(f"{who} gave {cut(row)} for {sample}, not a list of one number a token as for the first one")
    if len(row) != tokens:
        raise RewardError(f"{who} gave {len(row)} numbers for the {tokens} tokens of {sample}")
    return [_number(_plain(value), f"for token {place} of {sample}", who) for place, value in enumerate(row)]


def _number(value: Any, where: str, who: str) -> float:
    if not isinstance(value, SupportsFloat):
        raise RewardError(f"{who} gave {cut(value)} {where}, not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{who} gave {number} {where}, not a finite number")
    return number

"""Which rows are learned from, judged on and kept for the end.

A split is named, or drawn. What is drawn comes out of the rows that train is made of: each row has a random key, a pure
function of the seed and its position (Philox: Salmon et al. 2011), and the rows with the smallest keys are test, the
next ones eval. So a row that is left out, or one that is added at the end, does not change the order of the others: it
moves at most one row over each border (and where sizes are shares, the borders move with the number of rows).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ppo_core.errors import TaskError, nearest
from ppo_core.prompts.rows import Row, Split
from ppo_core.prompts.source import PromptSource, SplitChoice

DRAWN_BY_DEFAULT = 256
"""Rows of eval, and of test, where the dataset has no such split..."""
DRAWN_AT_MOST = 8
"""...but at most one in so many."""
EVAL_NAMES = ("validation", "valid", "val", "dev", "eval")
TEST_NAMES = ("test",)


@dataclass(frozen=True)
class Plan:
    """Which splits' rows are read; what is not named is drawn from those of `pool`."""

    pool: str
    eval: str | None
    test: str | None


def make_plan(source: PromptSource, names: Sequence[str]) -> Plan:
    """Return which of the dataset's splits are what.

    Raises:
        TaskError: no split is called train and there are several.
    """
    named = {choice for choice in (source.eval, source.test) if isinstance(choice, str)}
    pool = source.train if isinstance(source.train, str) else _default_pool(source, names, named)
    taken = {name for spec in (pool, *named) for name in _split_names(spec)}
    return Plan(pool, _named(source.eval, EVAL_NAMES, names, taken), _named(source.test, TEST_NAMES, names, taken))


def rows_of(spec: str, splits: Mapping[str, Split], source: PromptSource) -> list[Row]:
    """Return the rows of "train", "train[:90%]" or "train+extra", as the library `datasets` reads it.

    Raises:
        TaskError: there is no such split, or it is no such text.
    """
    for name in _split_names(spec):
        if name not in splits:
            raise TaskError(
                f'{source.where}: there is no split "{name}"; there are: {", ".join(splits)}{nearest(name, splits)}'
            )
    if spec in splits:  # also a name that the library would not take, and what needs no import of it
        return splits[spec].rows(0, splits[spec].count)
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(spec).to_absolute({name: split.count for name, split in splits.items()})
    except (ValueError, AssertionError) as error:
        raise TaskError(f'{source.where}: "{spec}" is no split such as train, train[:90%] or train[100:]') from error
    return [row for part in parts for row in splits[part.splitname].rows(part.from_, part.to)]


def drawn_order(positions: Sequence[int], seed: int) -> list[int]:
    """Return the indices of `positions` in the order of the draw; they are the kept rows' positions in the pool."""
    keys = np.random.Generator(np.random.Philox(seed)).random(max(positions, default=0) + 1)
    return sorted(range(len(positions)), key=lambda i: float(keys[positions[i]]))


def draw(positions: Sequence[int], plan: Plan, source: PromptSource) -> dict[str, list[int]]:
    """Return which of the pool's rows are train, in their own order, and eval and test, in the order of the draw.

    `positions` are the kept rows' positions in the pool; returned are indices into it. A named split draws none.

    Raises:
        TaskError: the sizes take more rows than there are.
    """
    order, count = drawn_order(positions, source.seed), len(positions)
    test = 0 if plan.test is not None else _size(source.test, count)
    eval_ = 0 if plan.eval is not None else _size(source.eval, count)
    train = (
        count - test - eval_ if source.train is None or isinstance(source.train, str) else _size(source.train, count)
    )
    if train < 0 or test + eval_ + train > count:
        sizes = ", ".join(f"{name} {n}" for name, n in (("train", max(train, 0)), ("eval", eval_), ("test", test)) if n)
        raise TaskError(f"{source.where}: the sizes take more rows than the {count} there are: {sizes}")
    rest = order[test + eval_ :]
    return {"train": sorted(rest[:train]), "eval": order[test : test + eval_], "test": order[:test]}


def _default_pool(source: PromptSource, names: Sequence[str], named: set[str]) -> str:
    if "train" in names:
        return "train"
    taken = {name for spec in named for name in _split_names(spec)}
    free = [name for name in names if name not in taken] or list(names)
    if len(free) > 1:
        raise TaskError(f"{source.where}: no split is called train; say which is, out of: {', '.join(free)}")
    return free[0]


def _named(choice: SplitChoice, defaults: Sequence[str], names: Sequence[str], taken: set[str]) -> str | None:
    if choice is not None:
        return choice if isinstance(choice, str) else None
    return next((name for name in defaults if name in names and name not in taken), None)


def _split_names(spec: str) -> list[str]:
    return [part.split("[")[0].split("(")[0].strip() for part in spec.split("+")]


def _size(choice: SplitChoice, count: int) -> int:
    if choice is None:
        return min(DRAWN_BY_DEFAULT, count // DRAWN_AT_MOST)
    # 0.29 * 100 is a little less than 29
    return int(choice * count + 1e-9) if isinstance(choice, float) else int(choice)

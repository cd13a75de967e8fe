"""Divide rows into disjoint splits. Never imports torch.

A split is named, or drawn from the rows of train: each row has a random key, a pure function of the seed and its
position (Philox: Salmon et al. 2011), and the rows with the smallest keys are test, the next ones eval. So a row
left out, or added at the end, does not change the order of the others: it moves at most one row over each border
(and if sizes are shares, the borders move with the number of rows).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ppo_core.data.prompts import PromptRow, PromptSource, SplitChoice
from ppo_core.errors import TaskError, nearest

DRAWN_BY_DEFAULT = 256
"""Default rows of eval, and of test, if the dataset has no such split."""
DRAWN_ONE_IN = 8
"""Draw at most one row in this many by default."""
EVAL_NAMES = ("validation", "valid", "val", "dev", "eval")
TEST_NAMES = ("test",)


class Split(Protocol):
    """A split's rows: a list, or a dataset that reads the rows of a slice, as it may be larger than the part in use."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Sequence[PromptRow]: ...


@dataclass(frozen=True)
class SplitPlan:
    """Choice of splits to read; the rest are drawn from `pool`."""

    pool: str
    eval: str | None
    test: str | None


def make_plan(source: PromptSource, names: Sequence[str]) -> SplitPlan:
    """Assign the dataset's splits to train, eval and test.

    Raises:
        TaskError: no split is called train and there are several.
    """
    named = {choice for choice in (source.eval, source.test) if isinstance(choice, str)}
    pool = source.train if isinstance(source.train, str) else _default_pool(source, names, named)
    taken = {name for spec in (pool, *named) for name in _split_names(spec, names)}
    return SplitPlan(pool, _named(source.eval, EVAL_NAMES, names, taken), _named(source.test, TEST_NAMES, names, taken))


def rows_of(spec: str, splits: Mapping[str, Split], source: PromptSource) -> Sequence[PromptRow]:
    """Return the rows of "train", "train[:90%]" or "train+extra", in the syntax of `datasets`.

    Raises:
        TaskError: there is no such split, or the text is not a split expression.
    """
    for name in _split_names(spec, splits):
        if name not in splits:
            raise TaskError(
                f'{source.where}: split "{name}" not found; available: {", ".join(splits)}{nearest(name, splits)}'
            )
    if spec in splits:  # also a name that the library would not take, and what needs no import of it
        return splits[spec][:]
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(spec).to_absolute({name: len(split) for name, split in splits.items()})
    except (ValueError, AssertionError) as error:
        raise TaskError(f'{source.where}: "{spec}" is not a split such as train, train[:90%] or train[100:]') from error
    return [row for part in parts for row in splits[part.splitname][part.from_ : part.to]]


def draw(positions: Sequence[int], plan: SplitPlan, source: PromptSource) -> dict[str, list[int]]:
    """Return the pool's rows for train, in their own order, and for eval and test, in the order of the draw.

    `positions` are the kept rows' positions in the pool; the results index them. A named split draws none.

    Raises:
        TaskError: the sizes take more rows than there are.
    """
    keys = np.random.Generator(np.random.Philox(source.seed)).random(max(positions, default=0) + 1)
    order, count = sorted(range(len(positions)), key=lambda i: float(keys[positions[i]])), len(positions)
    test = 0 if plan.test is not None else _size(source.test, count)
    eval_ = 0 if plan.eval is not None else _size(source.eval, count)
    train = count - test - eval_ if isinstance(source.train, str | None) else _size(source.train, count)
    if train < 0 or test + eval_ + train > count:
        sizes = ", ".join(f"{name} {n}" for name, n in (("train", max(train, 0)), ("eval", eval_), ("test", test)) if n)
        raise TaskError(f"{source.where}: the sizes take more rows than the {count} there are: {sizes}")
    rest = order[test + eval_ :]
    return {"train": sorted(rest[:train]), "eval": order[test : test + eval_], "test": order[:test]}


def _default_pool(source: PromptSource, names: Sequence[str], named: set[str]) -> str:
    if "train" in names:
        return "train"
    taken = {name for spec in named for name in _split_names(spec, names)}
    free = [name for name in names if name not in taken] or list(names)
    if len(free) > 1:
        raise TaskError(f"{source.where}: no split is called train; name the training split, one of: {', '.join(free)}")
    return free[0]


def _named(choice: SplitChoice, defaults: Sequence[str], names: Sequence[str], taken: set[str]) -> str | None:
    if choice is not None:
        return choice if isinstance(choice, str) else None
    return next((name for name in defaults if name in names and name not in taken), None)


def _split_names(spec: str, names: Collection[str]) -> list[str]:
    return [spec] if spec in names else [part.split("[")[0].split("(")[0].strip() for part in spec.split("+")]


def _size(choice: SplitChoice, count: int) -> int:
    if choice is None:
        return min(DRAWN_BY_DEFAULT, count // DRAWN_ONE_IN)
    # 0.29 * 100 is a little less than 29
    return int(choice * count + 1e-9) if isinstance(choice, float) else int(choice)

"""Splits are disjoint, complete, and decided by nothing but the seed and the order of the rows."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.data.prompts import PromptRow, PromptSource, SplitChoice, SplitPlan, draw, make_plan, rows_of
from ppo_core.errors import TaskError

DRAWN = SplitPlan("train", None, None)
positions = st.sets(st.integers(0, 400), min_size=8).map(sorted)
"""Of the rows that were kept."""
shares = st.floats(0.01, 0.33)


def drawn(kept: Sequence[int], seed: int, eval: SplitChoice, test: SplitChoice) -> dict[str, list[int]]:
    """The positions in each split."""
    source = PromptSource("rows.jsonl", seed=seed, eval=eval, test=test)
    return {name: [kept[i] for i in part] for name, part in draw(kept, DRAWN, source).items()}


@given(positions, st.integers(0, 2**64), shares | st.none(), shares | st.none())
def test_what_is_drawn_is_disjoint_and_complete_and_of_the_size_asked_for(
    kept: list[int], seed: int, eval: float | None, test: float | None
) -> None:
    splits = drawn(kept, seed, eval, test)
    assert sorted(splits["train"] + splits["eval"] + splits["test"]) == kept
    assert splits["train"] == sorted(splits["train"])
    for name, share in (("eval", eval), ("test", test)):
        exact = len(kept) * (0.125 if share is None else share)
        assert exact - 1 < len(splits[name]) <= exact + 1e-6
    assert splits == drawn(kept, seed, eval, test)


@given(positions, st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.data())
def test_a_row_more_or_less_moves_at_most_one_over_each_border(
    kept: list[int], seed: int, eval: int, test: int, data: st.DataObject
) -> None:
    """So a row added at the end, or one that is left out, leaves the other rows' splits nearly as they were."""
    gone = data.draw(st.sampled_from(kept))
    before, after = drawn(kept, seed, eval, test), drawn([row for row in kept if row != gone], seed, eval, test)
    moved = {row for name in before for row in before[name] if row != gone and row not in after[name]}
    assert len(moved) <= 2
    order = [row for name in ("test", "eval") for row in before[name] if row != gone]
    assert [row for name in ("test", "eval") for row in after[name]][: len(order)] == order


def test_another_seed_draws_other_rows_and_the_draw_is_no_slice() -> None:
    kept = range(1000)
    one, two = (set(drawn(kept, seed, 100, 100)["eval"]) for seed in (0, 1))
    assert len(one & two) < 30
    assert 300 < sum(one) / 100 < 700
    assert {len(drawn(range(9000), 0, None, None)[name]) for name in ("eval", "test")} == {256}


def test_train_takes_the_share_that_is_asked_for_and_leaves_the_rest() -> None:
    splits = draw(range(100), DRAWN, PromptSource("rows.jsonl", train=0.29, eval=10, test=0.5))
    assert {name: len(part) for name, part in splits.items()} == {"train": 29, "eval": 10, "test": 50}
    full = draw(range(10), DRAWN, PromptSource("rows.jsonl", train=0.7, eval=0.2, test=0.1))
    assert {name: len(part) for name, part in full.items()} == {"train": 7, "eval": 2, "test": 1}


@pytest.mark.parametrize(
    ("names", "fields", "plan"),
    [
        (["train"], {}, SplitPlan("train", None, None)),
        (["test", "train", "validation"], {}, SplitPlan("train", "validation", "test")),
        (["train", "dev"], {}, SplitPlan("train", "dev", None)),
        (["test"], {}, SplitPlan("test", None, None)),
        (["train_sft", "test_sft"], {"test": "test_sft"}, SplitPlan("train_sft", None, "test_sft")),
        (["train", "test", "validation"], {"test": 0.1, "eval": 5}, SplitPlan("train", None, None)),
        (["train", "test"], {"eval": "test[:50%]"}, SplitPlan("train", "test[:50%]", None)),
        (["train", "validation"], {"train": "train+validation[10:]"}, SplitPlan("train+validation[10:]", None, None)),
    ],
)
def test_named_splits_are_used_where_the_dataset_has_them(
    names: list[str], fields: dict[str, SplitChoice], plan: SplitPlan
) -> None:
    assert make_plan(PromptSource("rows.jsonl", **fields), names) == plan  # type: ignore[arg-type]


def test_which_split_is_train_is_not_guessed() -> None:
    with pytest.raises(TaskError) as caught:
        make_plan(PromptSource("rows"), ["train_sft", "train_gen", "test"])
    message = 'prompts "rows": no split is called train; name the training split, one of: train_sft, train_gen, test'
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ("train", range(10)),
        ("train[:90%]", range(9)),
        ("train[-20%:]", range(8, 10)),
        ("train[3:1]", []),
        ("test[1:]+train[:2]", [101, 0, 1]),
    ],
)
def test_slices_are_those_of_datasets(spec: str, rows: Sequence[int], tmp_path: Path) -> None:
    def split(numbers: Sequence[int]) -> list[PromptRow]:
        return [PromptRow(str(number), {}) for number in numbers]

    splits = {"train": split(range(10)), "test": split([100, 101])}
    assert [int(row.where) for row in rows_of(spec, splits, PromptSource("rows"))] == list(rows)

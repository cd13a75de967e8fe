import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.algorithm.optim import Schedule, lr_factor
from ppo_core.randomness import Key, Purpose, generator, mini_batch_order, prompt_rows, uniforms


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [1, 0.853553, 0.5, 0.146447]),
        ("constant", [1, 1, 1, 1]),
        ("constant_with_warmup", [1, 1, 1, 1]),
    ],
)
def test_schedules(kind: Schedule, expected: list[float]) -> None:
    assert [lr_factor(kind, i, 4, 0.0) for i in range(4)] == pytest.approx(expected, abs=1e-6)


def test_warm_up_rises_linearly_and_wastes_nothing() -> None:
    rising = [lr_factor("constant_with_warmup", i, 10, 0.3) for i in range(5)]
    assert rising == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert [lr_factor("constant", i, 10, 0.3) for i in range(5)] == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "expected"),  # two of five iterations of warm-up, then floor + 0.9 times the schedule over three
    [
        ("linear", [1 / 3, 2 / 3, 1, 0.1 + 0.9 * 2 / 3, 0.1 + 0.9 / 3]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25]),  # ½ (1 + cos 60°), ½ (1 + cos 120°)
        ("constant_with_warmup", [1 / 3, 2 / 3, 1, 1, 1]),
    ],
)
def test_the_floor_holds_after_the_warm_up(kind: Schedule, expected: list[float]) -> None:
    assert [lr_factor(kind, i, 5, 0.4, min_lr_rate=0.1) for i in range(5)] == pytest.approx(expected)


def test_behind_a_critic_warm_up_the_policy_has_its_whole_schedule() -> None:
    critic_warmup, total = 2, 6
    factors = [lr_factor("linear", i - critic_warmup, total - critic_warmup, 0.0, 0.0) for i in range(total)]
    assert factors == pytest.approx([0, 0, 1, 0.75, 0.5, 0.25])


@given(st.integers(0, 99), st.integers(1, 50), st.integers(0, 200), st.integers(1, 64), st.integers(1, 64))
def test_prompts_run_on_without_a_gap(seed: int, count: int, start: int, first: int, second: int) -> None:
    whole = prompt_rows(seed, count, start, first + second)
    assert whole == prompt_rows(seed, count, start, first) + prompt_rows(seed, count, start + first, second)


def test_each_pass_takes_every_prompt_once_in_another_order() -> None:
    rows = prompt_rows(0, 20, 0, 40)
    assert sorted(rows[:20]) == sorted(rows[20:]) == list(range(20))
    assert rows[:20] != rows[20:]


def test_streams_depend_on_each_of_their_parts() -> None:
    base = uniforms(Key(0, Purpose.ROLLOUT, 0), range(4), 5)
    assert (base == uniforms(Key(0, Purpose.ROLLOUT, 0), range(4), 5)).all()
    for other in [(1, Purpose.ROLLOUT, 0), (0, Purpose.EVALUATION, 0), (0, Purpose.ROLLOUT, 1)]:
        assert (base != uniforms(Key(*other), range(4), 5)).all()
    assert sorted(mini_batch_order(0, 3, 1, 16)) == list(range(16))
    assert mini_batch_order(0, 3, 1, 16) != mini_batch_order(0, 3, 2, 16)


@given(st.integers(1, 9), st.lists(st.integers(0, 30), max_size=8))
def test_a_rows_numbers_are_those_of_the_whole_block_at_its_id(positions: int, ids: list[int]) -> None:
    whole = generator(3, Purpose.ROLLOUT, 2).random((31, positions))
    assert (uniforms(Key(3, Purpose.ROLLOUT, 2), ids, positions) == whole[ids]).all()


def test_the_numbers_are_the_same_in_every_version() -> None:
    first = uniforms(Key(0, Purpose.ROLLOUT, 0), [3, 0], 5)
    assert first[0, 3:].tolist() == [0.9516926784316445, 0.43343331760302417]
    assert first[1, :2].tolist() == [0.6073659924129827, 0.5037305356300301]
    second = uniforms(Key(7, Purpose.EVALUATION, 3), [3], 5)
    assert second[0, 3:].tolist() == [0.7396401472638872, 0.27525651827551867]
    far = uniforms(Key(0, Purpose.ROLLOUT, 0), [10**15], 5)
    assert ((far >= 0) & (far < 1)).all(), "without drawing what comes before"

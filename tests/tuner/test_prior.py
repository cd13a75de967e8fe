"""Where a search begins: literal draws, and the shape of many of them."""

import math
import statistics
from collections import Counter

import pytest

from ppo_core.config.declare import Choices, HyperValue, Range
from tuner.search.prior import first_params, spread_params

SEARCH = {
    "learning_rate": Range(1e-6, 1e-1, "log"),
    "num_ppo_epochs": Range(1, 6),
    "batch_size": Range(8, 512, "log2"),
    "cliprange": Range(0.1, 0.5),
}
NUMBERS = range(1, 1201)

Params = dict[str, HyperValue]

REFERENCE: Params = {"learning_rate": 2e-4, "num_ppo_epochs": 4, "batch_size": 64, "cliprange": 0.2}


def around(search: dict[str, Range], reference: Params) -> list[Params]:
    """Those of many draws that are not points of the even sequence."""
    drawn = [(first_params(search, reference, 0, number), number) for number in NUMBERS]
    return [params for params, number in drawn if params != spread_params(search, 0, number)]


def column(name: str, drawn: list[Params]) -> list[float]:
    return [float(params[name]) for params in drawn]  # type: ignore[arg-type]


DRAWN = around(SEARCH, REFERENCE)


def test_a_draw_is_a_pure_function_of_seed_and_number() -> None:
    first = first_params(SEARCH, REFERENCE, 0, 2)
    assert first == {
        "batch_size": 128,
        "cliprange": pytest.approx(0.30950087),
        "learning_rate": pytest.approx(5.45494801e-05),
        "num_ppo_epochs": 3,
    }
    assert first_params(dict(reversed(SEARCH.items())), REFERENCE, 0, 2) == first
    others = [first_params(SEARCH, REFERENCE, *other) for other in ((1, 2), (0, 3))]
    assert len({str(sorted(params.items())) for params in (first, *others)}) == 3


def test_three_in_four_are_drawn_around_the_reference() -> None:
    assert 0.72 < len(DRAWN) / len(NUMBERS) < 0.78


def test_rates_are_log_normal() -> None:
    """ln x ~ N(ln 2e-4, 1.2²): about two thirds lie within a factor of e^1.2 = 3.3 of the reference."""
    logs = [math.log(rate) for rate in column("learning_rate", DRAWN)]
    assert statistics.median(logs) == pytest.approx(math.log(2e-4), abs=0.1)
    assert statistics.stdev(logs) == pytest.approx(1.2, abs=0.08)
    within = sum(2e-4 / 3.32 < math.exp(log) < 2e-4 * 3.32 for log in logs)
    assert 0.64 < within / len(logs) < 0.72


def test_linear_ranges_are_truncated_normals_of_a_quarter_of_the_range() -> None:
    """Of N(0.2, 0.1²) between 0.1 and 0.5 the median is 0.220, and the middle 68% go from 0.141 to 0.303."""
    low, middle, high = (statistics.quantiles(column("cliprange", DRAWN), n=100)[n - 1] for n in (16, 50, 84))
    assert (low, middle, high) == pytest.approx((0.141, 0.220, 0.303), abs=0.01)
    epochs = Counter(column("num_ppo_epochs", DRAWN))
    assert sorted(epochs) == [1, 2, 3, 4, 5, 6] and epochs.most_common(1)[0][0] == 4


def test_powers_of_two_lie_within_an_octave_or_two() -> None:
    """The exponent is N(6, 1), rounded: 38% are 64, 24% each 32 and 128."""
    sizes = Counter(column("batch_size", DRAWN))
    shares = {size: count / len(DRAWN) for size, count in sizes.items()}
    assert set(shares) <= {8, 16, 32, 64, 128, 256, 512}
    assert (shares[32], shares[64], shares[128]) == pytest.approx((0.24, 0.38, 0.24), abs=0.03)


def test_no_draw_is_outside_its_range_and_none_piles_up_at_an_end() -> None:
    """kl_target's range is narrower than the distribution, so that it is almost even; it has no reference."""
    targets = column("kl_target", around({"kl_target": Range(2, 8, "log")}, {"kl_target": None}))
    assert 2 < min(targets) < 2.1 and 7.8 < max(targets) < 8
    assert statistics.median(targets) == pytest.approx(4, abs=0.2)
    assert len(set(targets)) == len(targets)


def test_a_reference_outside_the_range_counts_as_the_nearest_value_in_it() -> None:
    rates = column("learning_rate", around({"learning_rate": Range(1e-3, 1e-1, "log")}, REFERENCE))
    assert 1e-3 < min(rates) < 1.01e-3
    assert statistics.median(rates) == pytest.approx(1e-3 * math.exp(1.2 * 0.6745), rel=0.1), "half of a normal"


def test_the_even_sequence_is_even_in_each_dimension() -> None:
    """In the order of names the bases are 2, 3, 5, 7: of that many numbers one lies in each part of the range."""
    search = {name: Range(0.0, 1.0) for name in ("cliprange", "gamma", "lam", "vf_coef")}
    points = [spread_params(search, 7, 5 + n) for n in range(121)]
    for name, base in (("cliprange", 2), ("gamma", 3), ("lam", 5), ("vf_coef", 7)):
        for parts in (base, base**2):
            cells = sorted(int(parts * share) for share in column(name, points[:parts]))
            assert cells == list(range(parts)), (name, parts)
    halves = Counter((float(p["cliprange"]) > 0.5, float(p["gamma"]) > 0.5) for p in points)  # type: ignore[arg-type]
    assert min(halves.values()) > 20, "and in two at a time"


def test_the_even_sequence_gives_each_whole_number_its_share() -> None:
    search = {"batch_size": Range(32, 128, "log2"), "num_ppo_epochs": Range(1, 4)}
    points = [spread_params(search, 0, number) for number in range(300)]
    assert all(97 <= count <= 103 for count in Counter(column("batch_size", points)).values())
    assert all(73 <= count <= 77 for count in Counter(column("num_ppo_epochs", points)).values())
    assert all(isinstance(value, int) for params in points for value in params.values())


def test_half_of_the_draws_from_a_list_are_the_references_value() -> None:
    search = {"lr_scheduler_type": Choices(("linear", "cosine", "constant")), "lam": Choices((0.8, 0.9))}
    draws = [first_params(search, {"lr_scheduler_type": "cosine", "lam": 0.95}, 0, n) for n in range(800)]
    kinds = Counter(draw["lr_scheduler_type"] for draw in draws)
    assert 0.4 < kinds["cosine"] / 800 < 0.53, "three in four draws, and a third of the even ones"
    assert min(kinds["linear"], kinds["constant"]) > 160
    assert 300 < Counter(draw["lam"] for draw in draws)[0.8] < 500, "the reference is none of them"


def test_lambda_is_drawn_by_its_distance_from_1() -> None:
    search = {"lam": Range(0.9, 0.999, "log_from_1")}
    points = [float(spread_params(search, 0, number)["lam"] or 0) for number in range(128)]
    assert sum(lam > 0.99 for lam in points) == 64
    around = [float(first_params(search, {"lam": 0.99}, 0, number)["lam"] or 0) for number in range(400)]
    assert min(around) >= 0.9 and max(around) <= 0.999
    assert 0.5 < sum(1 / 2.25 < (1 - lam) / 0.01 < 2.25 for lam in around) / 400 < 0.65, "half of three in four draws"

"""The order of an epoch: a permutation (or draws) that is a pure function of (seed, epoch, position)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.order import Listed, Order, Sequential, Shuffled, Weighted
from samestep.errors import ConfigError, DataError
from samestep.rng import Purpose, key, mix

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 10**6)


def whole(order: Order, epoch: int = 0) -> list[int]:
    return order.indices(epoch, 0, order.num_samples).tolist()


# Every order --------------------------------------------------------------------------------------------------------

ORDERS: list[Order] = [
    Sequential(50_000),
    Shuffled(50_000, 1),
    Weighted(np.arange(100.0), 50_000, 1),
    Listed(lambda epoch: list(range(epoch, 50_000 + epoch)), 50_000, "Counting"),
]
by_kind = pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)


@by_kind
@given(cuts=st.lists(st.integers(0, 50_000), max_size=4))
@settings(max_examples=15)
def test_an_order_does_not_depend_on_how_the_range_is_cut(order: Order, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), 50_000]
    pieces = [order.indices(3, start, stop) for start, stop in itertools.pairwise(bounds)]
    np.testing.assert_array_equal(np.concatenate(pieces), order.indices(3, 0, 50_000))


@by_kind
def test_an_order_does_not_depend_on_what_else_is_asked_for(order: Order) -> None:
    expected = order.indices(2, 0, 50_000)
    positions = np.random.default_rng(0).permutation(50_000)[:20_000]
    np.testing.assert_array_equal(order.at(2, positions), expected[positions])
    assert order.at(2, np.array([7])).tolist() == [expected[7]]


@by_kind
def test_indices_are_int64_of_the_asked_shape(order: Order) -> None:
    for start, stop in ((0, 0), (50_000, 50_000), (5, 6), (10, 40_000)):
        indices = order.indices(0, start, stop)
        assert indices.dtype == np.int64
        assert indices.shape == (stop - start,)


@by_kind
@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 50_001), (50_001, 50_001)])
def test_positions_outside_the_epoch_are_refused(order: Order, start: int, stop: int) -> None:
    with pytest.raises(DataError, match=r"\[0, 50000\)"):
        order.indices(0, start, stop)


@by_kind
def test_a_description_survives_json(order: Order) -> None:
    assert json.loads(json.dumps(order.describe())) == order.describe()
    assert order.describe()["kind"] == type(order).__name__


@by_kind
def test_a_caller_may_write_into_what_it_got(order: Order) -> None:
    before = order.indices(0, 0, 100)
    order.indices(0, 0, 100)[:] = -1
    np.testing.assert_array_equal(order.indices(0, 0, 100), before)


@pytest.mark.parametrize("value", [-1, 2**62 + 1, 3.0, True, None, "9"])
def test_a_length_that_is_none_is_refused(value: Any) -> None:
    for make in (lambda: Sequential(value), lambda: Shuffled(value, 0), lambda: Listed(list, value, "X")):
        with pytest.raises(DataError, match="samples"):
            make()


def test_sequential_is_the_datasets_own_order() -> None:
    assert Sequential(7).indices(3, 2, 6).tolist() == [2, 3, 4, 5]


# Shuffled -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), SEEDS, EPOCHS)
def test_a_shuffle_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(whole(Shuffled(n, seed), epoch)) == list(range(n))


@pytest.mark.parametrize("n", [4095, 4096, 4097, 65536, 99_999, 300_001])
def test_a_larger_shuffle_is_a_bijection(n: int) -> None:
    assert np.array_equal(np.sort(Shuffled(n, 5).indices(1, 0, n)), np.arange(n))


@given(st.integers(10**6, 2**62), SEEDS, EPOCHS, st.data())
def test_a_huge_shuffle_is_injective_and_in_range(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1000))
    indices = Shuffled(n, seed).indices(epoch, start, start + 1000)
    assert len(set(indices.tolist())) == 1000
    assert indices.min() >= 0
    assert indices.max() < n


@given(st.integers(1000, 2**62), SEEDS, EPOCHS)
def test_epochs_and_seeds_have_different_orders(n: int, seed: int, epoch: int) -> None:
    order, stop = Shuffled(n, seed), min(n, 2000)
    first = order.indices(epoch, 0, stop)
    assert np.mean(first == order.indices(epoch + 1, 0, stop)) < 0.02
    assert np.mean(first == Shuffled(n, (seed + 1) % 2**63).indices(epoch, 0, stop)) < 0.02


def is_even(counts: np.ndarray, freedom: int) -> bool:
    """Whether the chi-square statistic of `counts` is within 4 deviations of what equal chances give."""
    expected = counts.sum() / counts.size
    statistic = float(((counts - expected) ** 2).sum()) / expected
    return abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_a_few_samples_come_equally_often(n: int) -> None:
    number = {permutation: i for i, permutation in enumerate(itertools.permutations(range(n)))}
    counts = np.zeros(len(number))
    for seed in range(3):
        order = Shuffled(n, seed)
        for epoch in range(700):
            counts[number[tuple(whole(order, epoch))]] += 1
    assert counts.min() > 0
    assert is_even(counts, math.factorial(n) - 1)


def is_odd(permutation: Sequence[int]) -> bool:
    seen: set[int] = set()
    cycles = 0
    for start in range(len(permutation)):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = permutation[start]
    return (len(permutation) - cycles) % 2 == 1


@pytest.mark.parametrize("n", [6, 7, 8, 9, 24, 25, 49, 121])
def test_half_of_the_permutations_are_odd(n: int) -> None:
    """A network whose sides are both odd makes even permutations only."""
    odd = sum(is_odd(whole(Shuffled(n, seed))) for seed in range(400))
    assert 150 < odd < 250


@pytest.mark.parametrize(("n", "epochs"), [(10, 1500), (1000, 200), (4096, 80), (10_000, 80)])
def test_every_sample_may_stand_anywhere(n: int, epochs: int) -> None:
    order, tenth = Shuffled(n, 3), np.arange(n) * 10 // n
    counts = np.zeros((10, 10))
    for epoch in range(epochs):
        np.add.at(counts, (tenth, tenth[order.indices(epoch, 0, n)]), 1)
    # Rows and columns have fixed sums, which leaves 9 * 9 freedoms; a draw without replacement has n / (n - 1) times
    # their variance.
    expected = counts.mean()
    assert is_even(expected + (counts - expected) * math.sqrt((n - 1) / n), 81)


@pytest.mark.parametrize("n", [1000, 4096, 10**6, 10**12])
@pytest.mark.parametrize("lag", [1, 2, 32, 64, 500])
def test_neighbours_are_not_correlated(n: int, lag: int) -> None:
    order, total, count = Shuffled(n, 11), 0.0, 0
    for epoch in range(40):
        values = order.indices(epoch, 0, min(n, 2000)) / (n - 1) - 0.5
        total += 12 * float(values[lag:] @ values[:-lag])
        count += len(values) - lag
    assert abs(total / count) < 4 / math.sqrt(count) + 1 / n  # without replacement it is -1 / n


def test_epochs_are_not_correlated() -> None:
    orders = np.stack([Shuffled(1000, 2).indices(epoch, 0, 1000) for epoch in range(60)]) / 999 - 0.5
    correlations = np.corrcoef(orders)[np.triu_indices(60, 1)]
    assert np.abs(correlations).max() < 5 / math.sqrt(1000)
    assert abs(correlations.std() * math.sqrt(999) - 1) < 0.1


def test_a_far_position_of_a_huge_epoch_is_reached_directly() -> None:
    order = Shuffled(2**62, 0)
    assert order.indices(0, 2**62 - 1, 2**62).shape == (1,)


GOLDEN = {
    (1, 0, 0, 0): [0],
    (5, 0, 0, 0): [0, 1, 4, 2, 3],
    (9, 1, 2, 0): [4, 0, 7, 6, 2, 8, 5, 1, 3],
    (64, 0, 0, 0): [47, 41, 36, 23, 10, 57, 52, 4],
    (1000, 0, 0, 0): [126, 186, 198, 938, 452, 827, 902, 122],
    (1000, 0, 1, 0): [166, 380, 585, 393, 944, 143, 4, 946],
    (1000, 1, 0, 992): [497, 255, 56, 363, 908, 13, 707, 767],
    (4095, 3, 7, 4000): [2095, 2359, 3324, 3346, 3680, 2524, 1819, 210],
    (4096, 3, 7, 4000): [1382, 1663, 3637, 1164, 3743, 3816, 805, 974],
    (10**6, 42, 5, 123456): [86693, 398232, 598386, 384882, 794456, 893393, 301023, 733194],
    (10**12, 2**63 - 1, 10**6, 10**12 - 4): [277220784878, 496665015989, 67173424545, 816347888333],
    (2**62, 0, 0, 2**62 - 2): [2025006104456647121, 3139861639005546941],
}


@pytest.mark.parametrize(("where", "indices"), GOLDEN.items(), ids=str)
def test_a_shuffle_never_changes_between_versions(where: tuple[int, int, int, int], indices: list[int]) -> None:
    n, seed, epoch, start = where
    assert Shuffled(n, seed).indices(epoch, start, start + len(indices)).tolist() == indices


def shuffled_by_hand(n: int, seed: int, epoch: int, position: int) -> int:
    """The definition in Python's own whole numbers."""
    a = next(side for side in itertools.count(math.isqrt(n)) if side * side >= n)
    b = (n + a - 1) // a
    b += a % 2 == b % 2 == 1
    keys = [key(seed, Purpose.ORDER, epoch, number) for number in range(24 if n < 4096 else 8)]
    while True:
        left, right = divmod(position, b)
        for number, round_key in enumerate(keys):
            if number % 2 == 0:
                left = (left + (int(mix(np.array([right]), round_key)[0]) >> 32) * a // 2**32) % a
            else:
                right = (right + (int(mix(np.array([left]), round_key)[0]) >> 32) * b // 2**32) % b
        position = left * b + right
        if position < n:
            return position


@given(st.integers(1, 100) | st.integers(1, 2**62), SEEDS, EPOCHS, st.data())
def test_a_shuffle_is_its_definition(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, n - 1))
    expected = shuffled_by_hand(n, seed, epoch, position)
    assert Shuffled(n, seed).indices(epoch, position, position + 1).tolist() == [expected]


def test_a_shuffle_describes_its_version() -> None:
    assert Shuffled(10, 3).describe() == {"kind": "Shuffled", "num_samples": 10, "version": 1}


@pytest.mark.parametrize("seed", [-1, 2**63, True, 0.0, None])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    for make in (lambda: Shuffled(3, seed), lambda: Weighted([1.0], None, seed)):
        with pytest.raises(ConfigError, match="seed"):
            make()


# Weighted -----------------------------------------------------------------------------------------------------------


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    weights = np.array([1.0, 0.0, 2.0, 3.0, 0.5])
    counts = np.bincount(whole(Weighted(weights, 200_000, 4)), minlength=5)
    expected = 200_000 * weights / weights.sum()
    drawn = weights > 0
    assert ((counts - expected)[drawn] ** 2 / expected[drawn]).sum() < 20
    assert counts[1] == 0


@given(st.lists(st.sampled_from([0.0, -0.0, 1e-300, 1.0, 1e17]), min_size=1, max_size=8).filter(any), SEEDS)
def test_a_weight_of_zero_is_never_drawn(weights: list[float], seed: int) -> None:
    assert all(weights[index] > 0 for index in whole(Weighted(weights, 300, seed)))


@pytest.mark.parametrize("weights", [[0.0, 1.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.1, 0.7, 0.0], [0.0, 1e308, 5e-324, 0.0]])
@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_the_edges_of_the_unit_interval_draw_no_zero_weight(
    weights: list[float], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.data.order.mix", lambda values, seed: np.full(len(values), bits, np.uint64))
    (index,) = whole(Weighted(weights, 1, 0))
    assert weights[index] > 0


def test_a_point_on_a_border_draws_the_sample_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.data.order.mix", lambda values, seed: np.full(len(values), 2**63, np.uint64))
    assert whole(Weighted([1.0, 0.0, 1.0], 1, 0)) == [2]


def test_draws_differ_between_epochs_and_seeds() -> None:
    draws = [whole(Weighted(np.ones(1000), 500, seed), epoch) for seed in range(2) for epoch in range(2)]
    assert all(np.mean(np.array(a) == np.array(b)) < 0.02 for a, b in itertools.combinations(draws, 2))


def test_as_many_draws_as_samples_unless_a_number_is_given() -> None:
    assert Weighted([1, 2, 3], None, 0).num_samples == 3
    assert Weighted([1, 2, 3], 8, 0).num_samples == 8


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -2.0, -3.0], r"weight -2\.0 for sample 1"),
        ([1.0, 2.0, math.nan], "weight nan for sample 2"),
        ([math.inf, 2.0], "weight inf for sample 0"),
        ([0.0, 0.0], r"2 weights with the sum 0\.0"),
        ([], r"0 weights with the sum 0\.0"),
        ([1e308, 1e308], "2 weights with the sum inf"),
        ([[1.0], [2.0]], r"shape \(2, 1\)"),
        (3.0, r"shape \(\)"),
        (["a"], "no numbers"),
        ([[1.0], [1.0, 2.0]], "no numbers"),
    ],
)
def test_weights_that_are_none_are_refused_and_the_first_is_named(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Weighted(weights, None, 0)


@pytest.mark.parametrize("num_draws", [0, -1, True, 2.0])
def test_a_number_of_draws_that_is_none_is_refused(num_draws: Any) -> None:
    with pytest.raises(ConfigError, match="num_draws"):
        Weighted([1.0], num_draws, 0)


def test_other_weights_have_another_description() -> None:
    variants = [[1.0, 2.0], [2.0, 1.0], [1.0, 2.0, 0.0], [0.0, 1.0, 2.0], [2.0, 4.0]]
    assert len({Weighted(weights, 9, 0).describe()["weights"] for weights in variants}) == len(variants)
    assert Weighted([0.0, 1], 9, 0).describe() == Weighted(np.array([-0.0, 1], np.float32), 9, 0).describe()


def test_later_changes_of_the_callers_weights_have_no_effect() -> None:
    weights = np.ones(10)
    order = Weighted(weights, None, 0)
    before = whole(order)
    weights[:] = 0
    assert whole(order) == before


def test_draws_never_change_between_versions() -> None:
    order = Weighted([0.5, 0, 1, 2, 0.25], 10**12, 7)
    assert order.indices(1, 10**12 - 16, 10**12).tolist() == [3, 0, 3, 3, 4, 3, 3, 3, 3, 2, 0, 3, 3, 3, 0, 3]
    assert order.describe() == {"kind": "Weighted", "num_samples": 10**12, "weights": "93ab4c11d51c2274"}


# Listed -------------------------------------------------------------------------------------------------------------


def test_a_list_is_made_once_an_epoch() -> None:
    made: list[int] = []

    def make(epoch: int) -> list[int]:
        made.append(epoch)
        return [epoch, 5, 4]

    order = Listed(make, 3, "Mine")
    assert [order.indices(0, 0, 2).tolist(), order.indices(0, 2, 3).tolist()] == [[0, 5], [4]]
    assert order.indices(1, 0, 1).tolist() == [1]
    assert made == [0, 1]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([0, 1], "Mine gave 2 values in epoch 6"),
        ([0, 1, 2, 3], "Mine gave 4 values in epoch 6"),
        ([], "Mine gave 0 values in epoch 6"),
        ([0, -1, 2], "Mine gave -1 at position 1 in epoch 6"),
        ([0, 1, 1.5], r"Mine gave 1\.5 at position 2 in epoch 6"),
        ([0, "1", 2], "Mine gave '1' at position 1 in epoch 6"),
        ([True, False, True], "Mine gave True at position 0 in epoch 6"),
        ([[0], [1], [2]], r"Mine gave values of shape \(3, 1\) in epoch 6"),
        ([[0, 1], [2], [3, 4]], r"Mine gave \[0, 1\] at position 0 in epoch 6"),
        (np.array([1, 2**63, 3], np.uint64), "Mine gave 9223372036854775808 at position 1 in epoch 6"),
        ([1, 2**70, 3], "Mine gave 1180591620717411303424 at position 1 in epoch 6"),
    ],
)
def test_a_list_that_is_none_is_refused(made: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Listed(lambda epoch: made, 3, "Mine").indices(6, 0, 1)


def test_an_empty_list_of_no_samples_is_one() -> None:
    assert whole(Listed(lambda epoch: [], 0, "Mine")) == []

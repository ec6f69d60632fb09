"""Keyed seeds: frozen, well mixed, and different wherever they should be."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.rng import Purpose, _finalise, check_seed, key, mix

SEEDS = st.integers(0, 2**63 - 1)
WORDS = st.integers(0, 2**64 - 1)


@given(SEEDS, st.sampled_from(Purpose), st.lists(st.integers(0, 2**63), max_size=4))
def test_a_key_is_a_64_bit_number(seed: int, purpose: Purpose, where: list[int]) -> None:
    assert 0 <= key(seed, purpose, *where) < 2**64


def test_keys_of_different_places_differ() -> None:
    places = [
        (seed, purpose, *where)
        for seed in (0, 1, 2, 12, 2**63 - 1)
        for purpose in Purpose
        for length in range(4)
        for where in itertools.product((0, 1, 2, 3, 12, 23), repeat=length)
    ]
    assert len({key(*place) for place in places}) == len(places)


def test_the_parts_of_a_place_do_not_run_together() -> None:
    assert len({key(0, Purpose.ORDER, *where) for where in [(1, 23), (12, 3), (23, 1), (123,), (1, 23, 0)]}) == 5


def test_a_step_of_the_seed_is_not_a_step_of_the_purpose() -> None:
    """The purpose is added times a huge constant, so only seeds that far apart could share a key."""
    keys = {key(seed, purpose) for seed in range(1000) for purpose in Purpose}
    assert len(keys) == 1000 * len(Purpose)


@given(SEEDS, st.integers(0, 10**6), st.integers(0, 62))
def test_one_changed_bit_changes_about_half_of_a_key(seed: int, epoch: int, bit: int) -> None:
    for other in (key(seed ^ (1 << bit), Purpose.SAMPLE, epoch), key(seed, Purpose.SAMPLE, epoch ^ (1 << bit))):
        assert 8 <= (key(seed, Purpose.SAMPLE, epoch) ^ other).bit_count() <= 56


@given(st.lists(WORDS, max_size=20), WORDS)
def test_mix_is_the_finaliser_on_every_element(values: list[int], seed: int) -> None:
    expected = [_finalise(value + seed) for value in values]
    assert mix(np.array(values, dtype=np.uint64), seed).tolist() == expected


def test_mix_keeps_the_shape_and_leaves_its_argument_alone() -> None:
    values = np.arange(-3, 3, dtype=np.int64).reshape(2, 3)
    mixed = mix(values, 5)
    assert mixed.shape == (2, 3)
    assert mixed.dtype == np.uint64
    assert values.tolist() == [[-3, -2, -1], [0, 1, 2]]


def test_mixed_counters_have_even_bits() -> None:
    bits = np.unpackbits(mix(np.arange(20_000), 1).view(np.uint8)).reshape(20_000, 64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 20_000**0.5


def test_keys_never_change_between_versions() -> None:
    assert [int(purpose) for purpose in Purpose] == [1, 2, 3, 4, 5, 6, 7]
    assert key(0, Purpose.ORDER) == 7960286522194355700
    assert key(2**63 - 1, Purpose.MICRO_BATCH, 3, 14, 15) == 192728786720324248
    assert mix(np.arange(3), 42).tolist() == [12058926934050108962, 5695472266747893962, 18098828467231111927]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, np.int64(5), np.uint8(7)])
def test_a_seed_comes_back_as_an_int(seed: Any) -> None:
    assert type(check_seed(seed)) is int
    assert check_seed(seed) == seed


@pytest.mark.parametrize("seed", [-1, 2**63, True, np.True_, 1.0, "1", None])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"seed is a whole number with 0 <= seed < 2\*\*63"):
        check_seed(seed)

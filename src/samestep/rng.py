"""Keyed seeds: every random draw is a function of (seed, purpose, where in the training), never of rank or time."""

from __future__ import annotations

import enum

import numpy as np

from samestep.errors import ConfigError

__all__ = ["Purpose", "check_seed", "key", "mix"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(enum.IntEnum):
    """What a stream of random numbers is for. The numbers are part of the contract: never renumber."""

    ORDER = 1
    SAMPLE = 2
    MICRO_BATCH = 3
    MODEL = 4
    EVALUATE = 5
    DRAW = 6
    SAMPLER = 7


def key(seed: int, purpose: Purpose, *where: int) -> int:
    """A 64-bit key for one stream: `key(seed, Purpose.MICRO_BATCH, epoch, window, micro_batch)`.

    The one way keys are made (Python's `hash` is salted and numpy's seeding may change between versions). Each part is
    absorbed with the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014), so that (1, 23) and (12, 3) differ.

    Args:
        seed: the run's seed, 0 <= seed < 2**63.
        purpose: keeps streams for different uses apart.
        where: whole numbers that say where in the training.

    Returns:
        A whole number in [0, 2**64).
    """
    state = _finalise(seed + _GOLDEN * (purpose + 1))
    for part in where:
        state = _finalise((state ^ part) + _GOLDEN)
    return state


def _finalise(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def mix(values: np.ndarray, seed: int) -> np.ndarray:
    """`_finalise` over an array: uint64 values of any shape to well-mixed uint64 of that shape, keyed by `seed`."""
    z = values.astype(np.uint64) + np.uint64(seed & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def check_seed(seed: object) -> int:
    """`seed` as an int, or ConfigError: whole numbers with 0 <= seed < 2**63 are seeds."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= int(seed) < 2**63:
        raise ConfigError(
            f"got seed={seed!r}", "a seed is a whole number with 0 <= seed < 2**63", "pass an int such as 0"
        )
    return int(seed)

"""The order of an epoch: position -> sample index, a pure function of (seed, epoch), reachable anywhere at once."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence

import numpy as np

from samestep.errors import ConfigError, DataError
from samestep.rng import Purpose, check_seed, key, mix

__all__ = ["Listed", "Order", "Sequential", "Shuffled", "Weighted"]

_ROUNDS, _ROUNDS_SMALL = 8, 24  # with few positions, permutations come out evenly only after about 16 rounds
_SMALL = 4096
_CHUNK = 1 << 15  # positions permuted at once: the work arrays stay in the cache


class Order(abc.ABC):
    """Which sample stands at which position of an epoch."""

    num_samples: int
    """Positions in an epoch."""

    @abc.abstractmethod
    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The sample indices at `positions` of `epoch`: int64 of the same shape (n,)."""

    def describe(self) -> dict[str, int | str]:
        """What a checkpoint keeps of it; a restart with another description is refused."""
        return {"kind": type(self).__name__, "num_samples": self.num_samples}


class Sequential(Order):
    """The dataset's own order.

    Args:
        num_samples: of the dataset.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = _checked_length(num_samples)

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See Order."""
        return positions.astype(np.int64)


class Shuffled(Order):
    """A pseudorandom permutation for each epoch, in O(1) memory: no table, any position at once.

    A Feistel network over Z_a x Z_b with a, b near sqrt(n), keyed by (seed, epoch); an image outside [0, n) is permuted
    again until it is inside. Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle
    walking, and the generalised Feistel network over a product of two sets).

    Args:
        num_samples: n, up to 2**62.
        seed: the run's seed.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self._seed = _checked_length(num_samples), check_seed(seed)
        self._rounds = _ROUNDS_SMALL if num_samples < _SMALL else _ROUNDS
        self._a = math.isqrt(max(num_samples - 1, 0)) + 1
        self._b = -(-num_samples // self._a) if num_samples else 1

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See Order. Time is linear in the number of positions, whatever they are."""
        keys = [key(self._seed, Purpose.ORDER, epoch, number) for number in range(self._rounds)]
        result = np.empty(len(positions), dtype=np.int64)
        for start in range(0, len(positions), _CHUNK):
            chunk = positions[start : start + _CHUNK].astype(np.uint64)
            result[start : start + _CHUNK] = self._permute(chunk, keys)
        return result

    def _permute(self, values: np.ndarray, keys: list[int]) -> np.ndarray:
        values = self._network(values, keys)
        outside = np.flatnonzero(values >= self.num_samples)
        while len(outside):  # a * b - n < a + b, so few positions walk, and few of those twice
            values[outside] = self._network(values[outside], keys)
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64)

    def _network(self, values: np.ndarray, keys: list[int]) -> np.ndarray:
        b = np.uint64(self._b)
        left, right = values // b, values % b
        for number, round_key in enumerate(keys):
            if number % 2 == 0:
                left = _add(left, _hash(right, round_key, self._a), self._a)
            else:
                right = _add(right, _hash(left, round_key, self._b), self._b)
        combined: np.ndarray = left * b + right
        return combined

    def describe(self) -> dict[str, int | str]:
        """See Order. The version changes if a release ever gives other permutations."""
        return {**super().describe(), "version": 1}


def _hash(values: np.ndarray, round_key: int, size: int) -> np.ndarray:
    """A keyed pseudorandom number in [0, size) for each value; size < 2**32, taken from the top 32 bits."""
    return (mix(values, round_key) >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)


def _add(values: np.ndarray, more: np.ndarray, size: int) -> np.ndarray:
    """(values + more) % size for values, more < size; an unsigned number minus a larger one is huge."""
    total = values + more
    return np.minimum(total, total - np.uint64(size))


class Weighted(Order):
    """Draws with replacement, in proportion to weights; each position's draw is keyed by (seed, epoch, position).

    Args:
        weights: one for each sample; 0 is never drawn.
        num_draws: positions in an epoch; None: as many as samples.
        seed: the run's seed.

    Raises:
        ConfigError: for weights that are not finite numbers, 0 or more, with a positive sum.
    """

    def __init__(self, weights: Sequence[float] | np.ndarray, num_draws: int | None, seed: int) -> None:
        array = np.asarray(weights, dtype=np.float64)
        bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0))) if array.ndim == 1 else np.array([0])
        if array.ndim != 1 or len(bad) or not array.sum() > 0:
            what = f"weight {bad[0]} is {array.flat[bad[0]]}" if len(bad) else "all weights are 0"
            raise ConfigError(
                f"got weights of shape {array.shape}, {what}",
                "weights are one finite number, 0 or more, for each sample, not all 0",
                "check the weights",
            )
        self.num_samples = _checked_length(len(array) if num_draws is None else num_draws)
        self._seed = check_seed(seed)
        self._drawable = np.flatnonzero(array)
        self._upto = np.cumsum(array[self._drawable])
        self._digest = int(
            mix(array.view(np.uint64) + np.arange(len(array), dtype=np.uint64), 0).sum() >> np.uint64(12)
        )

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See Order."""
        bits = mix(positions, key(self._seed, Purpose.DRAW, epoch)) >> np.uint64(11)
        points = bits.astype(np.float64) * 2.0**-53 * self._upto[-1]
        places = np.searchsorted(self._upto, points, side="right").clip(max=len(self._upto) - 1)
        drawn: np.ndarray = self._drawable[places]
        return drawn.astype(np.int64)

    def describe(self) -> dict[str, int | str]:
        """See Order; the weights are part of it."""
        return {**super().describe(), "weights": self._digest}


class Listed(Order):
    """A list that someone else makes for each epoch, such as a torch Sampler.

    Args:
        make: epoch -> indices; a pure function of the epoch.
        num_samples: how many it gives.
        name: of what makes it.
    """

    def __init__(self, make: Callable[[int], Sequence[int]], num_samples: int, name: str) -> None:
        self.num_samples, self._make, self._name = _checked_length(num_samples), make, name
        self._made: tuple[int, np.ndarray] | None = None

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See Order.

        Raises:
            DataError: when the list is not `num_samples` whole numbers, 0 or more.
        """
        if self._made is None or self._made[0] != epoch:
            array = np.asarray(self._make(epoch))
            if len(array) != self.num_samples or array.dtype.kind not in "iu" or array.min(initial=0) < 0:
                raise DataError(
                    f"{self._name} gave {len(array)} values of {array.dtype} in epoch {epoch}",
                    f"its length says {self.num_samples} indices, whole numbers from 0",
                    "check the sampler's __len__ and __iter__",
                )
            self._made = (epoch, array.astype(np.int64))
        return self._made[1][positions]

    def describe(self) -> dict[str, int | str]:
        """See Order."""
        return {**super().describe(), "name": self._name}


def _checked_length(num_samples: int) -> int:
    if num_samples < 0 or num_samples > 2**62:
        raise DataError(f"got {num_samples} samples", "an epoch has 0 to 2**62", "check the dataset's __len__")
    return int(num_samples)

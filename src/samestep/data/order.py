"""The order of an epoch: position -> sample index, a pure function of (seed, epoch), reachable anywhere at once."""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from samestep.errors import ConfigError, DataError
from samestep.rng import Purpose, check_seed, key, mix

__all__ = ["Listed", "Order", "Sequential", "Shuffled", "Weighted"]

_ROUNDS, _ROUNDS_SMALL = 8, 24  # with few positions, permutations come out evenly only after about 16 rounds
_SMALL = 4096
_CHUNK = 1 << 14  # positions permuted at once: the work arrays (128 KiB each) stay in the cache
_LARGEST = 1 << 62
_HALF = np.uint64(32)


class Order(abc.ABC):
    """Which sample stands at which position of an epoch."""

    num_samples: int
    """Positions in an epoch."""

    @abc.abstractmethod
    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The sample indices at `positions` of `epoch`, whatever else is asked for with them.

        Args:
            epoch: number of the epoch, from 0.
            positions: whole numbers in [0, num_samples), shape (n,); not checked.

        Returns:
            int64 of shape (n,).
        """

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The sample indices at the positions [start, stop) of `epoch`: int64 of shape (stop - start,).

        Raises:
            DataError: unless 0 <= start <= stop <= num_samples.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise DataError(
                f"got the positions [{start}, {stop})",
                f"an epoch's are in [0, {self.num_samples})",
                "ask for positions of one epoch",
            )
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def describe(self) -> dict[str, int | str]:
        """What a checkpoint keeps of it, as JSON values; a restart with another description is refused."""
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

    Raises:
        DataError: for an n outside [0, 2**62].
        ConfigError: for what is not a seed.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self._seed = _checked_length(num_samples), check_seed(seed)
        self._rounds = _ROUNDS_SMALL if self.num_samples < _SMALL else _ROUNDS
        self._a = math.isqrt(max(self.num_samples - 1, 0)) + 1
        self._b = max(1, -(-self.num_samples // self._a))
        # A round rotates rows or columns, and rotating an odd number of things is an even permutation: with both sides
        # odd no network could ever give an odd one, which is half of all.
        self._b += self._a % 2 and self._b % 2

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
        while len(outside):  # a * b - n < 2 * a, so few positions walk, and few of those twice
            values[outside] = self._network(values[outside], keys)
            outside = outside[values[outside] >= self.num_samples]
        return values

    def _network(self, values: np.ndarray, keys: list[int]) -> np.ndarray:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left = values // b
        right = values - left * b
        for number, round_key in enumerate(keys):
            if number % 2 == 0:
                _add_hash(left, right, round_key, a)
            else:
                _add_hash(right, left, round_key, b)
        left *= b
        left += right
        return left

    def describe(self) -> dict[str, int | str]:
        """See Order. The version changes if a release ever gives other permutations."""
        return {**super().describe(), "version": 1}


def _add_hash(values: np.ndarray, others: np.ndarray, round_key: int, size: np.uint64) -> None:
    """values = (values + F(others)) % size in place, F keyed and pseudorandom in [0, size); values < size < 2**32.

    F is the top 32 bits of the hash, scaled: Lemire, "Fast random integer generation in an interval", 2019.
    """
    work = mix(others, round_key)
    work >>= _HALF
    work *= size
    work >>= _HALF
    values += work
    np.subtract(values, size, out=work)
    np.minimum(values, work, out=values)  # where values < size, the unsigned difference has wrapped to a huge number


class Weighted(Order):
    """Draws with replacement, in proportion to weights; each position's draw is keyed by (seed, epoch, position).

    A draw is a multiple of 2**-53 of the weights' sum, looked up in their cumulative sum (inverse transform sampling).

    Args:
        weights: one for each sample, shape (n,), taken as float64; 0 is never drawn.
        num_draws: positions in an epoch; None: as many as samples.
        seed: the run's seed.

    Raises:
        ConfigError: for weights that are not finite numbers, 0 or more, with a positive, finite sum; for a `num_draws`
            that is not a whole number, 1 or more; for what is not a seed.
    """

    def __init__(self, weights: Sequence[float] | np.ndarray, num_draws: int | None, seed: int) -> None:
        array = _checked_weights(weights)
        if num_draws is not None and (not _is_whole(num_draws) or num_draws < 1):
            raise ConfigError(f"got num_draws={num_draws!r}", "it is a whole number, 1 or more", "pass one, or None")
        self.num_samples = _checked_length(len(array) if num_draws is None else num_draws)
        self._seed = check_seed(seed)
        self._drawable = np.flatnonzero(array)
        self._upto = np.cumsum(array[self._drawable])
        self._digest = hashlib.blake2b(array.astype("<f8").tobytes(), digest_size=8).hexdigest()

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
    """A list that someone else makes for each epoch, such as a torch Sampler. One epoch's list is kept.

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
            DataError: when the list is not `num_samples` whole numbers in [0, 2**63).
        """
        if self._made is None or self._made[0] != epoch:
            self._made = (epoch, self._checked(self._make(epoch), epoch))
        indices: np.ndarray = self._made[1][positions]
        return indices

    def _checked(self, made: Sequence[int], epoch: int) -> np.ndarray:
        try:
            array = np.asarray(made) if len(made) else np.empty(0, np.int64)
        except ValueError:  # lists of different lengths, as a batch sampler gives
            array = np.empty(len(made), object)
        what = ""
        if array.ndim != 1:
            what = f"values of shape {array.shape}"
        elif len(array) != self.num_samples:
            what = f"{len(array)} values"
        elif array.dtype.kind not in "iu":
            place = next((i for i, value in enumerate(made) if not (_is_whole(value) and 0 <= value < 2**63)), 0)
            what = f"{made[place]!r} at position {place}"
        elif len(bad := np.flatnonzero(array.astype(np.int64) < 0)):  # also an unsigned number above int64
            what = f"{array[bad[0]]} at position {bad[0]}"
        if what:
            raise DataError(
                f"{self._name} gave {what} in epoch {epoch}",
                f"by its length it gives {self.num_samples} indices, whole numbers in [0, 2**63)",
                "check the sampler's __len__ and __iter__",
            )
        return array.astype(np.int64)

    def describe(self) -> dict[str, int | str]:
        """See Order."""
        return {**super().describe(), "name": self._name}


def _checked_weights(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """A copy as float64 of shape (n,), with 0.0 for -0.0."""
    try:
        array = np.asarray(weights, dtype=np.float64) + 0.0
    except (TypeError, ValueError) as e:
        raise ConfigError(f"got weights that are no numbers: {e}", "each sample has one number", "pass floats") from e
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    with np.errstate(over="ignore"):
        total = float(array.sum())
    if array.ndim != 1:
        what = f"weights of shape {array.shape}"
    elif len(bad):
        what = f"weight {array[bad[0]]} for sample {bad[0]}"
    elif not 0 < total < math.inf:
        what = f"{len(array)} weights with the sum {total}"
    else:
        return array
    raise ConfigError(
        f"got {what}",
        "weights are one finite number, 0 or more, for each sample, with a positive, finite sum",
        "check the weights",
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _checked_length(num_samples: int) -> int:
    if not _is_whole(num_samples) or not 0 <= num_samples <= _LARGEST:
        raise DataError(f"got {num_samples!r} samples", "an epoch has 0 to 2**62", "check the dataset's __len__")
    return int(num_samples)

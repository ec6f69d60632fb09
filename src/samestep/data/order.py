"""Orders (stand-in)."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep.rng import Purpose, key


class Order(abc.ABC):
    num_samples: int

    @abc.abstractmethod
    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray: ...

    def describe(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "num_samples": self.num_samples}


class Sequential(Order):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions


class Shuffled(Sequential):
    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples, self.seed = num_samples, seed

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return np.random.default_rng(key(self.seed, Purpose.ORDER, epoch)).permutation(self.num_samples)[positions]


class Weighted(Sequential):
    def __init__(self, weights: Sequence[float], num_draws: int | None, seed: int) -> None:
        self.weights, self.num_samples, self.seed = np.asarray(weights), num_draws or len(weights), seed


class Listed(Sequential):
    def __init__(self, make: Callable[[int], Sequence[int]], num_samples: int, name: str) -> None:
        self.make, self.num_samples = make, num_samples

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return np.asarray(self.make(epoch))[positions]

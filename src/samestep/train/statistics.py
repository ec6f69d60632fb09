"""What the micro-batches and ranks say of a window, added over the ranks: one small vector, whose layout is here.

Each slot is written by one rank and is zero on the others, so the sum has the same bits on any number of ranks. On a
CPU the numbers live in a list: there a tensor operation on one number costs more than the number. On a GPU they stay
on the device, and nobody waits for them.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from samestep.distributed.collectives import start_sum
from samestep.distributed.process_group import World
from samestep.optim.finish import Number, divide

__all__ = ["Statistics", "to_host"]


class Statistics:
    """One window's numbers.

    Layout, M slots each: weights, losses, sample digests, sizes; then one identity a rank; then, for each model, the
    number of its forwards in this window.

    Args:
        world: the ranks.
        num_micro_batches: M of the window, over all ranks.
        num_models: models that take part.
    """

    def __init__(self, world: World, num_micro_batches: int, num_models: int) -> None:
        self._world, self._m = world, num_micro_batches
        self.numbers = [0.0] * (4 * num_micro_batches + world.size + num_models)
        """On the host: this rank's until they are sent; afterwards everybody's, on a GPU only when they are back."""
        self._size = len(self.numbers)
        self._on_host = on_host(world.device)
        self._tensors: dict[int, torch.Tensor] = {}
        self._vector: torch.Tensor | None = None
        """Everybody's numbers on the device, where they do not live on the host."""
        self._back: torch.Tensor | None = None
        self._work: Any = None
        self.sent = False

    def weight(self, number: int, weight: Number) -> None:
        """How many terms the micro-batch's loss is the mean of."""
        self._set(number, weight)

    def loss(self, number: int, loss: torch.Tensor) -> None:
        """The micro-batch's loss, 0-d or of one element."""
        self._set(self._m + number, loss.item() if self._on_host else loss.detach().reshape(()))

    def samples(self, number: int, digest: int, size: int) -> None:
        """Which samples the micro-batch had, as a number below 2**52, and how many."""
        self.numbers[2 * self._m + number] = digest
        self.numbers[3 * self._m + number] = size

    def identity(self, identity: int) -> None:
        """Which window this rank is in."""
        self.numbers[4 * self._m + self._world.rank] = identity

    def forwards(self, model: int, count: int) -> None:
        """How often this rank has used a model."""
        self.numbers[4 * self._m + self._world.size + model] = count

    def _set(self, place: int, value: Number) -> None:
        if isinstance(value, torch.Tensor):
            self._tensors[place] = value
        else:
            self.numbers[place] = value

    def send(self) -> None:
        """Start adding over the ranks: the vector travels while the last backward runs."""
        self.sent = True
        if self._on_host and self._world.size == 1:
            return
        vector, device = torch.tensor(self.numbers, dtype=torch.float64), self._world.device
        if device.type == "cuda":
            vector = vector.pin_memory().to(device, non_blocking=True)
        for place, value in self._tensors.items():
            vector[place] = value
        self._vector, self._work = vector, start_sum(self._world, vector)

    def arrive(self) -> None:
        """Have everybody's numbers."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._vector is not None and self._on_host:
            self.numbers, self._vector = self._vector.tolist(), None

    def anybody_used(self, model: int) -> bool:
        """Whether some rank used the model in this window. Waits for the device."""
        return bool(self._all[4 * self._m + self._world.size + model])

    @property
    def _all(self) -> Any:
        return self.numbers if self._vector is None else self._vector

    @property
    def weights(self) -> Any:
        """M numbers: a list, or an fp64 tensor on a GPU."""
        return self._all[: self._m]

    def mean_loss(self, reduction: str | None) -> Number:
        """The window's loss: the weighted mean, or the sum for reduction="sum"."""
        weights, losses = self.weights, self._all[self._m : 2 * self._m]
        if isinstance(weights, torch.Tensor):
            mean: torch.Tensor = losses.sum() if reduction == "sum" else torch.dot(weights, losses) / weights.sum()
            return mean
        if reduction == "sum":
            return float(sum(losses))
        return weighted_mean(losses, weights)

    def divisor(self, reduction: str | None, reference: float) -> Number:
        """The window's gradient is what was summed, divided by this; 0 or NaN for a window without any term."""
        weights = self.weights
        total: Number = weights.sum() if isinstance(weights, torch.Tensor) else sum(weights)
        return divide(total, total) if reduction == "sum" else total / reference

    def start_back(self, more: list[Number]) -> torch.cuda.Event | None:
        """Let the numbers, and `more` behind them, start their way to the host; the event after which `take` may be called.

        Returns:
            None: now.
        """
        if self._vector is None:
            self.numbers += map(float, more)
            return None
        tail = torch.stack([torch.as_tensor(number, device=self._vector.device).double() for number in more])
        self._back, arrived = to_host(torch.cat([self._vector, tail]))
        return arrived

    def take(self) -> None:
        """What `start_back` sent has arrived: have it in `numbers`."""
        if self._back is not None:
            self.numbers = self._back.tolist()

    def parts(self) -> tuple[list[float], list[float], list[float], list[float], list[float], list[float]]:
        """Weights, losses, digests, sizes (M each), identities (one a rank), and what `start_back` was given."""
        m, numbers = self._m, self.numbers
        ranks = 4 * m + self._world.size
        return (
            numbers[:m],
            numbers[m : 2 * m],
            numbers[2 * m : 3 * m],
            numbers[3 * m : 4 * m],
            numbers[4 * m : ranks],
            numbers[self._size :],
        )


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """sum(weight * value) / sum(weight); NaN without any weight."""
    total = sum(weights)
    return sum(map(operator.mul, weights, values)) / total if total else math.nan


def on_host(device: torch.device) -> bool:
    """Whether one number is quicker to compute with in Python than on the device."""
    return device.type == "cpu"


def to_host(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """`numbers` on the host and the event after which they have arrived (None: now)."""
    if numbers.device.type != "cuda":
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event

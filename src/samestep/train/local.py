"""Batches that each rank brings itself, such as a DataLoader with a DistributedSampler: windows that end together."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from samestep.data.source import Plan, Source
from samestep.distributed.collectives import gather_json, sum_numbers
from samestep.distributed.process_group import World
from samestep.errors import ConfigError, DataError

__all__ = ["LocalBatches", "size_of"]


class LocalBatches(Source):
    """Windows of `accumulate` batches a rank. Ranks that have fewer batches than others have smaller, then empty shares.

    Args:
        world: the ranks.
        batches: this rank's batches, of any number.
        accumulate: batches of each rank that make a window.
        check_data: refuse ranks that all begin with the same batch (a loader that nobody split).
    """

    num_windows = None
    smallest_window = 1

    def __init__(self, world: World, batches: Iterable[Any], accumulate: int, check_data: bool = True) -> None:
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ConfigError(f"got accumulate={accumulate!r}", "it is a whole number, 1 or more", "pass 1")
        if not isinstance(batches, Iterable):
            raise DataError(f"got {type(batches).__name__} as a loader", "a loader is an iterable of batches")
        self._world, self._iterable, self._accumulate, self._check = world, batches, accumulate, check_data
        self.micro_batches = accumulate * world.size

    def windows(self, epoch: int, first: int, rank: int, world_size: int) -> Iterator[tuple[Plan, Iterator[Any]]]:
        """See Source. Before each window the ranks tell each other how many batches they have for it."""
        batches = iter(self._iterable)
        for _ in range(first * self._accumulate):
            next(batches, None)
        for window in itertools.count(first):
            mine = list(itertools.islice(batches, self._accumulate))
            if window == first and self._check:
                self._refuse_same(mine)
            counts = [0.0] * world_size
            counts[rank] = len(mine)
            counts = sum_numbers(self._world, counts)
            bounds = [0, *(int(total) for total in itertools.accumulate(counts))]
            if not bounds[-1]:
                return
            sizes = [size_of(batch) for batch in mine]
            plan = Plan(window, bounds, range(bounds[rank], bounds[rank + 1]), sizes, [0] * len(mine))
            yield plan, iter(mine)

    def _refuse_same(self, mine: list[Any]) -> None:
        if self._world.size == 1:
            return
        digests = gather_json(self._world, "first batch", _digest(mine[0]) if mine else None)
        if digests[0] is not None and len(set(digests)) == 1:
            raise DataError(
                f"all {self._world.size} ranks begin with the same batch",
                "each rank brings its own part of the data, or each sample would count several times",
                "use torch's DistributedSampler, or run.loader, which deals samples itself; "
                "check_data=False if your samples really are alike",
            )

    def describe(self) -> dict[str, Any]:
        """See Source."""
        return {"accumulate": self._accumulate}


def size_of(batch: Any) -> int:
    """Samples in a batch: the length of the first tensor in it that has one; 1 if there is none."""
    for tensor in _tensors(batch):
        if tensor.ndim:
            return len(tensor)
    return 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _digest(batch: Any) -> str | None:
    """Of the tensors in a batch; None without any: then nobody can tell whether two are the same."""
    tensors = list(_tensors(batch))
    if not tensors:
        return None
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()

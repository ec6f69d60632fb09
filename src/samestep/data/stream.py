"""Datasets without indices: a fixed number of logical shards belongs to the run, ranks and workers read whole shards.

Shard i of M gives micro-batch i of each window, so what a micro-batch holds depends on neither ranks nor workers. The
epoch ends on all ranks together, when the last shard has ended.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from samestep.data.fetch import Collate, seed_everything, tell_epoch
from samestep.data.grid import split
from samestep.data.source import Plan, Source
from samestep.errors import ConfigError
from samestep.rng import Purpose, key

__all__ = ["StreamSource"]

_SHARD = 1 << 40  # positions of one shard in the keys of its samples' random numbers


class StreamSource(Source):
    """An iterable dataset as windows.

    With a method `shard(num_shards, index)` the dataset is read in parts. Without one, each rank and worker reads all of
    it and keeps each M-th sample: right, and as many times the reading work.

    Args:
        dataset: iterable; `set_epoch(epoch)` is called before each epoch if it has it.
        micro_batches: M, the number of logical shards.
        micro_batch_size: samples of a micro-batch.
        seed: the run's seed.
        collate_fn: as in DataLoader; None for torch's default.
        options: further arguments of DataLoader.
        agree: adds a list of numbers over the ranks.
    """

    num_windows = None
    smallest_window = 1

    def __init__(
        self,
        dataset: Iterable[Any],
        micro_batches: int,
        micro_batch_size: int,
        seed: int,
        collate_fn: Callable[[Any], Any] | None,
        options: dict[str, Any],
        agree: Callable[[list[float]], list[float]],
    ) -> None:
        if micro_batches < 1 or micro_batch_size < 1:
            raise ConfigError(
                f"got {micro_batches} micro-batches of {micro_batch_size}", "both are 1 or more", "pass batch_size=32"
            )
        self._dataset, self.micro_batches, self._size = dataset, micro_batches, micro_batch_size
        self._seed, self._collate, self._options, self._agree = seed, Collate(collate_fn), options, agree

    def windows(self, epoch: int, first: int, rank: int, world_size: int) -> Iterator[tuple[Plan, Iterator[Any]]]:
        """See Source. Before each window the ranks agree on which shards still have samples."""
        mine = split(self.micro_batches, rank, world_size)
        queues: dict[int, collections.deque[tuple[int, Any]]] = {shard: collections.deque() for shard in mine}
        items = self._read(mine, epoch, first)
        for window in itertools.count(first):
            heads = {shard: self._head(queues, shard, items) for shard in mine}
            sizes = [0.0] * self.micro_batches
            for shard, head in heads.items():
                sizes[shard] = head[0] if head is not None else 0
            alive = [shard for shard, size in enumerate(self._agree(sizes)) if size]
            if not alive:
                return
            own = [shard for shard in alive if shard in heads]
            ends = [split(self.micro_batches, other, world_size).stop for other in range(world_size)]
            bounds = [0, *(sum(shard < end for shard in alive) for end in ends)]
            batches = [head[1] for shard in own if (head := heads[shard]) is not None]
            share = range(bounds[rank], bounds[rank + 1])
            yield Plan(window, bounds, share, [int(sizes[s]) for s in own], [0] * len(own)), iter(batches)

    def _head(self, queues: dict[int, Any], shard: int, items: Iterator[Any]) -> tuple[int, Any] | None:
        """The next (size, batch) of a shard; None when it has ended."""
        while not queues[shard]:
            item = next(items, None)
            if item is None:
                return None
            queues[item[0]].append(item[1:])
        head: tuple[int, Any] = queues[shard].popleft()
        return head

    def _read(self, shards: range, epoch: int, first: int) -> Iterator[tuple[int, int, Any]]:
        """(shard, size, batch) of these shards from window `first` on, in the order of windows for each shard."""
        reader = _Reader(self._dataset, shards, self.micro_batches, self._size, self._seed, self._collate, epoch, first)
        if not self._options.get("num_workers"):
            return iter(reader)
        options = {name: value for name, value in self._options.items() if name != "persistent_workers"}
        engine = DataLoader(reader, batch_size=None, collate_fn=_as_it_is, generator=torch.Generator(), **options)
        return iter(engine)

    def describe(self) -> dict[str, Any]:
        """See Source."""
        return {"shards": self.micro_batches, "micro_batch_size": self._size}


class _Reader(IterableDataset[Any]):
    """One epoch of some shards; in a loader worker, of every num_workers-th of them."""

    def __init__(
        self,
        dataset: Iterable[Any],
        shards: range,
        num_shards: int,
        size: int,
        seed: int,
        collate: Collate,
        epoch: int,
        first: int,
    ) -> None:
        self._dataset, self._shards, self._num_shards, self._size = dataset, shards, num_shards, size
        self._seed, self._collate, self._epoch, self._first = seed, collate, epoch, first

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        shards = list(self._shards)
        if (info := torch.utils.data.get_worker_info()) is not None:
            shards = shards[info.id :: info.num_workers]
            # Many datasets divide themselves by worker; the shards are divided already, so that would lose samples.
            torch_worker._worker_info = None
        tell_epoch(self._dataset, self._epoch)
        if callable(getattr(self._dataset, "shard", None)):
            streams = [self._micro_batches(shard, self._parts(shard)) for shard in shards]
            for together in itertools.zip_longest(*streams):
                yield from (item for item in together if item is not None)
        elif shards:
            yield from self._filtered(set(shards))

    def _parts(self, shard: int) -> Iterator[Any]:
        part = self._dataset.shard(num_shards=self._num_shards, index=shard)  # type: ignore[attr-defined]
        yield from _seeded(part, self._seed, self._epoch, shard * _SHARD)

    def _micro_batches(self, shard: int, samples: Iterator[Any]) -> Iterator[tuple[int, int, Any]]:
        for _ in range(self._first * self._size):
            if next(samples, _ENDED) is _ENDED:
                return
        while chunk := list(itertools.islice(samples, self._size)):
            yield shard, len(chunk), self._collate(chunk)

    def _filtered(self, shards: set[int]) -> Iterator[tuple[int, int, Any]]:
        chunks: dict[int, list[Any]] = {shard: [] for shard in sorted(shards)}
        skip = self._first * self._size * self._num_shards
        for position, sample in enumerate(_seeded(self._dataset, self._seed, self._epoch, 0)):
            shard = position % self._num_shards
            if position < skip or shard not in shards:
                continue
            chunks[shard].append(sample)
            if len(chunks[shard]) == self._size:
                yield shard, self._size, self._collate(chunks[shard])
                chunks[shard] = []
        for shard, chunk in chunks.items():
            if chunk:
                yield shard, len(chunk), self._collate(chunk)


_ENDED = object()


def _seeded(samples: Iterable[Any], seed: int, epoch: int, first: int) -> Iterator[Any]:
    """`samples`, each made with the global generators seeded by its position, so that augmentation is not by worker."""
    iterator = iter(samples)
    for position in itertools.count(first):
        seed_everything(key(seed, Purpose.SAMPLE, epoch, position))
        try:
            yield next(iterator)
        except StopIteration:
            return


def _as_it_is(item: Any) -> Any:
    return item

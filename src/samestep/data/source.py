"""Where a loader's micro-batches come from: an epoch cut into windows, and torch's DataLoader fetching a share of it."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from samestep.data.fetch import Collate, Fetcher, Request, seed_everything
from samestep.data.grid import Grid, split
from samestep.data.order import Order
from samestep.errors import ConfigError, DataError
from samestep.rng import Purpose, key, mix

__all__ = ["BatchList", "Cut", "GridCut", "MapSource", "Plan", "Source"]

_CHUNK = 1 << 16  # positions whose order is evaluated at once: big enough for numpy, small enough for the cache


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One window as one rank meets it."""

    window: int
    bounds: list[int]
    """Rank r has the micro-batches [bounds[r], bounds[r + 1]); the last bound is M of this window."""
    share: range
    """The micro-batches of this rank; may be empty."""
    sizes: list[int]
    """Samples in each micro-batch of the share."""
    digests: list[int]
    """For each micro-batch of the share, a number below 2**52 made from (position, sample index) of its samples."""


class Source(abc.ABC):
    """An epoch of windows, from any window on, for any share."""

    num_windows: int | None
    """Windows an epoch has; None when only its end will tell."""
    micro_batches: int
    """M of a full window: the largest number of ranks that all have work."""
    smallest_window: int
    """M of the smallest window of an epoch (1 when unknown)."""
    warning: str | None = None
    """What a model that normalises over the batch should know about this cut; None for nothing."""

    @abc.abstractmethod
    def windows(self, epoch: int, first: int, rank: int, world_size: int) -> Iterator[tuple[Plan, Iterator[Any]]]:
        """Plans from window `first` on, each with an iterator that gives the share's batches, on the CPU."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, and a restart compares."""

    def locate(self, epoch: int, window: int, micro_batch: int) -> tuple[int, list[int]] | None:
        """First position in the epoch and sample indices of a micro-batch, whoever's share it is; None: unknown."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what works for it."""


class Cut(abc.ABC):
    """How an epoch of a map-style dataset is cut into windows and micro-batches."""

    num_windows: int
    micro_batches: int
    smallest_window: int
    warning: str | None = None

    @abc.abstractmethod
    def shares(self, epoch: int, first: int, rank: int, world_size: int) -> Iterator[tuple[Plan, list[Request]]]:
        """For each window from `first` on: the plan of a share and its requests."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""


class GridCut(Cut):
    """An order over samples, cut by a grid."""

    def __init__(self, order: Order, grid: Grid) -> None:
        self.order, self.grid = order, grid
        self.num_windows, self.micro_batches = grid.num_windows, grid.micro_batches
        self.smallest_window = grid.num_micro_batches(grid.num_windows - 1)
        self.warning = self._lone_sample()

    def _lone_sample(self) -> str | None:
        grid, last = self.grid, self.grid.num_windows - 1
        if grid.micro_batch_size == 1 or len(grid.micro_batch(last, grid.num_micro_batches(last) - 1)) != 1:
            return None
        return f"{grid.describe()}: the last micro-batch of an epoch has one sample"

    def shares(self, epoch: int, first: int, rank: int, world_size: int) -> Iterator[tuple[Plan, list[Request]]]:
        """See Cut. The order is evaluated for the share's own positions only, many windows at once."""
        per_window = max(1, -(-self.grid.batch_size // world_size))
        for start in range(first, self.num_windows, max(1, _CHUNK // per_window)):
            stop = min(self.num_windows, start + max(1, _CHUNK // per_window))
            yield from self._chunk(epoch, range(start, stop), rank, world_size)

    def _chunk(self, epoch: int, windows: range, rank: int, world_size: int) -> Iterator[tuple[Plan, list[Request]]]:
        size, cuts, cells = self.grid.micro_batch_size, {}, []
        for window in windows:
            span = self.grid.window(window)
            count = -(-len(span) // size)
            if count not in cuts:  # all windows but the last have the same
                cuts[count] = bounds_of(count, world_size), split(count, rank, world_size)
            bounds, share = cuts[count]
            starts = range(span.start + share.start * size, span.start + share.stop * size, size)
            cells.append((window, bounds, share, starts, [min(size, span.stop - start) for start in starts]))
        ranges = [np.arange(starts.start, starts.start + sum(sizes)) for _, _, _, starts, sizes in cells]
        positions = np.concatenate(ranges) if ranges else np.empty(0, np.int64)
        indices = self.order.at(epoch, positions)
        edges = list(itertools.accumulate((n for *_, sizes in cells for n in sizes), initial=0))
        sums = np.add.reduceat(_digests(positions, indices), edges[:-1]).tolist() if len(positions) else []
        at = 0
        for window, bounds, share, starts, sizes in cells:
            numbers = range(at, at := at + len(share))
            requests = [
                Request(epoch, start, indices[edges[number] : edges[number + 1]])
                for number, start in zip(numbers, starts, strict=True)
            ]
            yield Plan(window, bounds, share, sizes, [sums[number] % (1 << 52) for number in numbers]), requests

    def describe(self) -> dict[str, Any]:
        """The grid and the order's own description."""
        return {"grid": self.grid.to_json(), "order": self.order.describe()}


class BatchList(Cut):
    """Batches made by a batch sampler, dealt whole: one batch is one micro-batch, weighted by its size.

    Args:
        batch_sampler: iterable of lists of indices; seeded by (seed, epoch) before each epoch, so that all ranks and a
            restart draw the same list.
        micro_batches: batches that make a window.
        length: of the dataset.
        seed: the run's seed.
    """

    def __init__(self, batch_sampler: Iterable[Sequence[int]], micro_batches: int, length: int, seed: int) -> None:
        self._sampler, self.micro_batches, self._length, self._seed = batch_sampler, micro_batches, length, seed
        if micro_batches < 1:
            raise ConfigError(f"got micro_batches={micro_batches}", "a window has one or more", "pass 1 or more")
        self.smallest_window = 1  # batch samplers may change their number of batches from epoch to epoch
        self._made: tuple[int, list[np.ndarray]] | None = None
        self.num_windows = -(-len(self._batches(0)) // micro_batches)
        if self.num_windows == 0:
            raise DataError("the batch sampler gave no batch", "an epoch has at least one", "check the sampler")

    def _batches(self, epoch: int) -> list[np.ndarray]:
        if self._made is None or self._made[0] != epoch:
            if callable(getattr(self._sampler, "set_epoch", None)):
                self._sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            seed_everything(key(self._seed, Purpose.SAMPLER, epoch))
            batches = [np.asarray(batch, dtype=np.int64) for batch in self._sampler]
            for number, batch in enumerate(batches):
                if batch.ndim != 1 or not len(batch) or batch.min() < 0 or batch.max() >= self._length:
                    raise DataError(
                        f"batch {number} of the batch sampler is {batch.reshape(-1)[:8].tolist()}",
                        f"a batch is a non-empty list of indices in [0, {self._length})",
                        "check the sampler",
                    )
            self._made = (epoch, batches)
            self.num_windows = -(-len(batches) // self.micro_batches)
        return self._made[1]

    def shares(self, epoch: int, first: int, rank: int, world_size: int) -> Iterator[tuple[Plan, list[Request]]]:
        """See Cut."""
        batches = self._batches(epoch)
        starts = np.concatenate([[0], np.cumsum([len(batch) for batch in batches])])
        for window in range(first, self.num_windows):
            base = window * self.micro_batches
            count = min(self.micro_batches, len(batches) - base)
            share = split(count, rank, world_size)
            numbers = [base + number for number in share]
            requests = [Request(epoch, int(starts[number]), batches[number]) for number in numbers]
            digests = [_digest(request) for request in requests]
            sizes = [len(batches[number]) for number in numbers]
            yield Plan(window, bounds_of(count, world_size), share, sizes, digests), requests

    def describe(self) -> dict[str, Any]:
        """The window's number of batches and the sampler's type."""
        return {"micro_batches": self.micro_batches, "sampler": type(self._sampler).__name__, "length": self._length}


class MapSource(Source):
    """A map-style dataset, cut into windows, fetched by torch's DataLoader.

    Args:
        dataset: map-style.
        cut: how an epoch is cut.
        seed: the run's seed.
        collate_fn: as in DataLoader; None for torch's default.
        options: further arguments of DataLoader (num_workers, pin_memory, prefetch_factor, ...).
    """

    def __init__(
        self, dataset: Any, cut: Cut, seed: int, collate_fn: Callable[[Any], Any] | None, options: dict[str, Any]
    ) -> None:
        self.cut = cut
        self.micro_batches, self.smallest_window, self.warning = cut.micro_batches, cut.smallest_window, cut.warning
        self._fetcher = Fetcher(dataset, seed, whole=collate_fn is None)
        self._collate = Collate(collate_fn)
        self._feed = _Feed()
        self._options = options
        self._engine: DataLoader[Any] | None = None
        self._reading = False
        """A pass is under way, and the engine's workers are busy with it."""
        if options.get("num_workers", 0) or options.get("pin_memory"):
            self._engine = self._make_engine(self._feed, options)

    def _make_engine(self, feed: _Feed, options: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(
            self._fetcher,  # type: ignore[arg-type]
            batch_sampler=feed,  # type: ignore[arg-type]
            collate_fn=self._collate,
            generator=torch.Generator(),  # the engine's own draws must not touch the run's generators
            **options,
        )

    @property
    def num_windows(self) -> int:  # type: ignore[override]
        """Windows an epoch has."""
        return self.cut.num_windows

    def windows(self, epoch: int, first: int, rank: int, world_size: int) -> Iterator[tuple[Plan, Iterator[Any]]]:
        """See Source."""
        plans, ahead = itertools.tee(self.cut.shares(epoch, first, rank, world_size))
        requests = itertools.chain.from_iterable(requests for _, requests in ahead)
        if self._engine is None:
            batches = (self._collate(self._fetcher.__getitems__(request)) for request in requests)
            yield from ((plan, batches) for plan, _ in plans)
            return
        engine, feed, first_pass = self._engine, self._feed, not self._reading
        if not first_pass:  # an evaluation in the middle of an epoch gets workers of its own
            feed = _Feed()
            engine = self._make_engine(feed, {**self._options, "persistent_workers": False})
        feed.requests = requests
        self._reading = True
        try:
            fetched: Iterator[Any] = iter(engine)
            for plan, _ in plans:
                yield plan, fetched
        finally:
            self._reading = not first_pass

    def describe(self) -> dict[str, Any]:
        """See Source."""
        return self.cut.describe()

    def locate(self, epoch: int, window: int, micro_batch: int) -> tuple[int, list[int]] | None:
        """See Source."""
        _, requests = next(self.cut.shares(epoch, window, 0, 1))
        request = requests[micro_batch]
        return request.start, request.indices.tolist()

    def close(self) -> None:
        """End the workers. Left to the collector of reference cycles, torch waits 5 s for each."""
        iterator = getattr(self._engine, "_iterator", None)
        self._engine = None
        if iterator is not None:
            iterator._shutdown_workers()


class _Feed:
    """What DataLoader takes as its batch sampler: the requests of the share that is being read."""

    requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def bounds_of(count: int, parts: int) -> list[int]:
    """Where `split`'s pieces begin, and where the last one ends."""
    return [*(split(count, part, parts).start for part in range(parts)), count]


def _digest(request: Request) -> int:
    positions = np.arange(request.start, request.start + len(request.indices))
    return int(_digests(positions, request.indices).sum(dtype=np.uint64)) % (1 << 52)


def _digests(positions: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """One well-mixed 64-bit number for each (position, index); their sum tells which samples stood where."""
    return mix(mix(indices, 1) ^ positions.astype(np.uint64), 2)

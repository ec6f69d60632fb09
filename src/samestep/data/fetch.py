"""From a list of indices to a batch, in a worker or in the main process, with each sample's random numbers keyed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from samestep.errors import DataError
from samestep.rng import Purpose, key

__all__ = ["Collate", "Fetcher", "Request", "as_dataset", "seed_everything", "tell_epoch"]


class Request(NamedTuple):
    """One micro-batch, as a worker is asked for it."""

    epoch: int
    start: int
    """Position of the first sample in the epoch's order; keys the samples' random numbers."""
    indices: np.ndarray
    """int64, shape (samples,): which samples of the dataset."""


class _Whole(NamedTuple):
    """A batch that was fetched whole and needs no collating."""

    batch: Any


def seed_everything(value: int, device: torch.device | None = None) -> None:
    """Seed Python's, numpy's and torch's global generators (the device's too) with the 64-bit `value`.

    `torch.default_generator.manual_seed` costs a hundredth of `torch.manual_seed`, which visits every backend.
    """
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(value)


class Fetcher:
    """A map-style dataset as torch's DataLoader sees it: one entry is one micro-batch.

    Tensors are gathered whole. A dataset with `__getitems__` is asked once a micro-batch. Any other is asked sample by
    sample, each with torch, numpy and random seeded by (seed, epoch, position), so that an augmentation depends on
    neither worker nor rank.

    Args:
        dataset: map-style; its `set_epoch(epoch)`, or else its attribute `epoch`, is told each epoch, in workers too.
        seed: the run's seed.
        whole: gather tensor datasets whole (only valid when nothing else collates them).
    """

    def __init__(self, dataset: Any, seed: int, whole: bool) -> None:
        self.dataset = dataset
        self._seed = seed
        self._tensors = dataset.tensors if whole and type(dataset) is TensorDataset else None
        self._batched = _fetches_batches(dataset)
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: Request) -> Any:
        """The samples of `request`, in order."""
        if request.epoch != self._epoch:
            tell_epoch(self.dataset, request.epoch)
            self._epoch = request.epoch
        if self._tensors is not None:
            index = torch.from_numpy(request.indices)
            return _Whole([tensor.index_select(0, index) for tensor in self._tensors])
        if self._batched:
            seed_everything(key(self._seed, Purpose.SAMPLE, request.epoch, request.start))
            return self.dataset.__getitems__(request.indices.tolist())
        samples = []
        for position, index in enumerate(request.indices.tolist(), start=request.start):
            seed_everything(key(self._seed, Purpose.SAMPLE, request.epoch, position))
            samples.append(self.dataset[index])
        return samples


class Collate:
    """The user's collate_fn (torch's default when None), stepping aside for batches that were fetched whole."""

    def __init__(self, collate_fn: Callable[[Any], Any] | None) -> None:
        self._collate = collate_fn or default_collate

    def __call__(self, samples: Any) -> Any:
        return samples.batch if isinstance(samples, _Whole) else self._collate(samples)


def _fetches_batches(dataset: Any) -> bool:
    """True when `__getitems__` goes all the way down; torch's Subset has one that only loops over its dataset."""
    if isinstance(dataset, Subset):
        return _fetches_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Tell a dataset, and those it wraps, the epoch: by `set_epoch(epoch)`, or else by an attribute `epoch`."""
    while dataset is not None:
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
        elif hasattr(dataset, "epoch"):
            dataset.epoch = epoch
        dataset = getattr(dataset, "dataset", None)


def as_dataset(data: Any) -> Any:
    """A map-style dataset from a dataset, a tensor or array, or a tuple of those with equal lengths.

    Raises:
        DataError: for anything else, naming what is missing.
    """
    if isinstance(data, torch.Tensor | np.ndarray):
        data = (data,)
    if isinstance(data, tuple) and data and all(isinstance(item, torch.Tensor | np.ndarray) for item in data):
        tensors = [torch.as_tensor(item) for item in data]
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise DataError(f"got arrays of lengths {lengths}", "they are one dataset, row by row", "make them equal")
        return TensorDataset(*tensors)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(data, name)]
    if missing or isinstance(data, dict | str):
        raise DataError(
            f"got {type(data).__name__} as a dataset" + (f", without {' and '.join(missing)}" if missing else ""),
            "data is a dataset with __len__ and __getitem__, an IterableDataset, a DataLoader, or tensors of equal length",
            "pass one of these to run.loader",
        )
    return data

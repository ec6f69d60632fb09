"""From what users have (a dataset, tensors, a DataLoader, a batch sampler) to a Source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from samestep.data.fetch import as_dataset, seed_everything
from samestep.data.grid import Grid
from samestep.data.order import Listed, Order, Sequential, Shuffled, Weighted
from samestep.data.source import BatchList, GridCut, MapSource, Source
from samestep.data.stream import StreamSource
from samestep.errors import CheckpointError, ConfigError
from samestep.rng import Purpose, key

__all__ = ["LoaderSpec", "make_source"]

_ENGINE_OPTIONS = ("num_workers", "prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")


@dataclasses.dataclass(kw_only=True)
class LoaderSpec:
    """What `run.loader` was asked for."""

    data: Any
    batch_size: int | None = None
    micro_batch_size: int | None = None
    micro_batches: int | None = None
    shuffle: bool = False
    weights: Sequence[float] | None = None
    num_draws: int | None = None
    order: Order | None = None
    sampler: Sampler[int] | None = None
    batch_sampler: Iterable[Sequence[int]] | None = None
    drop_last: bool = False
    collate_fn: Callable[[Any], Any] | None = None
    pin_memory: bool | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def make_source(
    spec: LoaderSpec,
    *,
    seed: int,
    world_size: int,
    device: torch.device,
    recorded: dict[str, Any] | None,
    agree: Callable[[list[float]], list[float]],
) -> Source:
    """The source that `spec` describes.

    Args:
        spec: what was asked for; an existing DataLoader in `spec.data` fills in what is not set.
        seed: the run's seed.
        world_size: ranks at this start; they decide the grid only if nothing else does.
        device: CUDA pins memory by default.
        recorded: what the checkpoint that this run continues says of this loader; its grid is kept.
        agree: adds a list of numbers over the ranks.

    Raises:
        ConfigError, DataError: for settings or data that cannot be used.
        CheckpointError: when the loader differs from the recorded one in what changes training.
    """
    _check_pieces(spec)
    if isinstance(spec.data, DataLoader):
        _adopt(spec, spec.data)
    if spec.num_draws is not None and spec.weights is None:
        raise ConfigError(
            f"got num_draws={spec.num_draws!r} without weights",
            "it counts weighted draws",
            "pass weights, or leave it out",
        )
    options = _engine_options(spec, device)
    if isinstance(spec.data, IterableDataset):
        source = _stream(spec, seed, world_size, recorded, options, agree)
        _compare(source.describe(), recorded)
        return source
    dataset = as_dataset(spec.data)
    if spec.batch_sampler is not None:
        cut: Any = BatchList(spec.batch_sampler, _micro_batches(spec, world_size, recorded), len(dataset), seed)
    else:
        order = _order(spec, dataset, seed)
        cut = GridCut(order, _grid(spec, order, world_size, recorded))
    _compare(cut.describe(), recorded)
    return MapSource(dataset, cut, seed, spec.collate_fn, options)


def _check_pieces(spec: LoaderSpec) -> None:
    """Refuse a size or number of micro-batches that is none, and both at once."""
    for name in ("micro_batch_size", "micro_batches"):
        value = getattr(spec, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"got {name}={value!r}", "it is a whole number (an int), 1 or more", "pass one, or None")
    if spec.micro_batch_size is not None and spec.micro_batches is not None:
        raise ConfigError("got micro_batch_size and micro_batches", "one follows from the other", "leave one out")


def _engine_options(spec: LoaderSpec, device: torch.device) -> dict[str, Any]:
    options = {"num_workers": 0, **spec.options}
    _check_options(options)
    if options["num_workers"]:
        options.setdefault("persistent_workers", True)
    options["pin_memory"] = device.type == "cuda" if spec.pin_memory is None else spec.pin_memory
    if options["pin_memory"] and device.type != "cuda":
        raise ConfigError("got pin_memory=True on a CPU", "pinned memory is for copies to a GPU", "leave it out")
    return options


def _stream(
    spec: LoaderSpec,
    seed: int,
    world_size: int,
    recorded: dict[str, Any] | None,
    options: dict[str, Any],
    agree: Callable[[list[float]], list[float]],
) -> StreamSource:
    """An iterable dataset: as many logical shards as micro-batches a window."""
    refused = {
        "shuffle": spec.shuffle,
        "weights": spec.weights is not None,
        "sampler": spec.sampler is not None,
        "batch_sampler": spec.batch_sampler is not None,
        "drop_last": spec.drop_last,
    }
    for name in (name for name, given in refused.items() if given):
        raise ConfigError(f"got {name} for an iterable dataset", "a stream has an order of its own", "leave it out")
    if type(spec.batch_size) is not int or spec.batch_size < 1:
        raise ConfigError(f"got batch_size={spec.batch_size!r}", "it is 1 or more samples of one step", "pass 32")
    size, shards = spec.micro_batch_size, spec.micro_batches
    if size is None and shards is None:
        shards = int(recorded["shards"]) if recorded is not None and "shards" in recorded else world_size
    if size is None:
        size = spec.batch_size // (shards or 1)
    if size < 1 or spec.batch_size % size or spec.batch_size // size != (spec.micro_batches or spec.batch_size // size):
        pieces = f"{spec.micro_batches} micro-batches" if spec.micro_batches else f"micro-batches of {size}"
        raise ConfigError(
            f"got batch_size={spec.batch_size} in {pieces}",
            "each shard of a stream gives one whole micro-batch a window",
            "pass a batch_size that micro_batch_size divides",
        )
    return StreamSource(spec.data, spec.batch_size // size, size, seed, spec.collate_fn, options, agree)


def _check_options(options: dict[str, Any]) -> None:
    workers = options["num_workers"]
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ConfigError(f"got num_workers={workers!r}", "it is a whole number, 0 or more", "pass 0 for none")
    for name in options:
        if name not in (*_ENGINE_OPTIONS, "persistent_workers"):
            raise ConfigError(
                f"got an unknown loader setting {name!r}",
                "run.loader passes on " + ", ".join(_ENGINE_OPTIONS),
                "see help(samestep.Run.loader)",
            )
        if name != "num_workers" and not workers and options[name] not in (None, False):
            raise ConfigError(f"got {name} with num_workers=0", "it is for loader processes", "leave it out")


def _adopt(spec: LoaderSpec, loader: DataLoader[Any]) -> None:
    """Take over an existing DataLoader: its dataset, order, collate_fn and workers; its batch_size is the global one."""
    spec.data = loader.dataset
    if spec.collate_fn is None and loader.collate_fn is not torch.utils.data.default_collate:
        spec.collate_fn = loader.collate_fn
    if spec.pin_memory is None:
        spec.pin_memory = loader.pin_memory and torch.cuda.is_available()
    workers = spec.options.get("num_workers", loader.num_workers)
    for name in _ENGINE_OPTIONS:
        if (value := getattr(loader, name)) not in (None, 0) and (workers or name == "num_workers"):
            spec.options.setdefault(name, value)
    if isinstance(loader.dataset, IterableDataset):
        spec.batch_size = loader.batch_size if spec.batch_size is None else spec.batch_size
        spec.drop_last = spec.drop_last or loader.drop_last
        return
    if type(loader.batch_sampler) is not BatchSampler:
        if loader.batch_sampler is None:
            raise ConfigError("got a DataLoader with batch_size=None", "micro-batches are made by Samestep", "set one")
        spec.batch_sampler = loader.batch_sampler
        return
    batches = loader.batch_sampler  # torch's own: made by the DataLoader, or given to it
    spec.batch_size = batches.batch_size if spec.batch_size is None else spec.batch_size
    spec.drop_last = spec.drop_last or batches.drop_last
    sampler: Any = batches.sampler
    if isinstance(sampler, WeightedRandomSampler):
        if not sampler.replacement:
            spec.sampler = sampler
        else:
            spec.weights, spec.num_draws = sampler.weights.tolist(), sampler.num_samples
    elif isinstance(sampler, DistributedSampler):
        # It deals samples to ranks itself; what it means for the whole epoch is its shuffle flag.
        spec.shuffle = spec.shuffle or sampler.shuffle
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset):  # type: ignore[arg-type]
        spec.shuffle = True
    elif type(sampler) is not SequentialSampler:
        spec.sampler = sampler


def _order(spec: LoaderSpec, dataset: Any, seed: int) -> Order:
    given = [name for name in ("weights", "order", "sampler") if getattr(spec, name) is not None]
    if len(given) + bool(spec.shuffle) > 1:
        names = given + (["shuffle"] if spec.shuffle else [])
        raise ConfigError(f"got {' and '.join(names)}", "one of them says what the order is", "leave the others out")
    length = len(dataset)
    if spec.order is not None:
        return spec.order
    if spec.weights is not None:
        if len(spec.weights) != length:
            raise ConfigError(
                f"got {len(spec.weights)} weights for {length} samples", "each sample has one", "make them equal"
            )
        return Weighted(spec.weights, spec.num_draws, seed)
    if spec.sampler is not None:
        return _listed(spec.sampler, seed)
    return Shuffled(length, seed) if spec.shuffle else Sequential(length)


def _listed(sampler: Sampler[int], seed: int) -> Order:
    """A sampler of the user's: drawn whole on every rank, with the same keyed seeds, before each epoch."""

    def draw(epoch: int) -> list[int]:
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        value = key(seed, Purpose.SAMPLER, epoch)
        seed_everything(value)
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            generator.manual_seed(value)
        return list(sampler)

    return Listed(draw, len(sampler), type(sampler).__name__)  # type: ignore[arg-type]


def _grid(spec: LoaderSpec, order: Order, world_size: int, recorded: dict[str, Any] | None) -> Grid:
    if spec.batch_size is None:
        raise ConfigError("got no batch_size", "it is the global number of samples of one optimizer step", "pass one")
    size = spec.micro_batch_size
    if size is None and spec.micro_batches is not None:
        size = (
            -(-spec.batch_size // spec.micro_batches) if type(spec.batch_size) is int and spec.batch_size > 0 else None
        )
    if size is None and recorded is not None and "grid" in recorded:
        size = Grid.from_json(recorded["grid"]).micro_batch_size
    if size is not None and spec.micro_batches is not None and -(-spec.batch_size // size) != spec.micro_batches:
        raise ConfigError(
            f"got batch_size={spec.batch_size} and micro_batches={spec.micro_batches}",
            "micro-batches have one size, only the last may be smaller",
            f"pass micro_batches={-(-spec.batch_size // size)}, or micro_batch_size",
        )
    return Grid.make(
        num_samples=order.num_samples,
        batch_size=spec.batch_size,
        micro_batch_size=size,
        drop_last=spec.drop_last,
        # whether each rank has work is checked when training begins; an evaluation needs none
        world_size=1
        if size is not None or type(spec.batch_size) is not int
        else min(world_size, max(1, spec.batch_size)),
    )


def _micro_batches(spec: LoaderSpec, world_size: int, recorded: dict[str, Any] | None) -> int:
    others = ("batch_size", "micro_batch_size", "weights", "sampler", "order")
    given = [name for name in others if getattr(spec, name) is not None]
    given += [name for name in ("shuffle", "drop_last") if getattr(spec, name)]
    if given:
        raise ConfigError(
            f"got a batch sampler and {' and '.join(given)}",
            "a batch sampler makes the micro-batches itself",
            "say how many of them make a window with micro_batches=",
        )
    if spec.micro_batches is None and recorded is not None:
        return int(recorded.get("micro_batches", world_size))
    return spec.micro_batches or world_size


def _compare(mine: dict[str, Any], recorded: dict[str, Any] | None) -> None:
    """Refuse to continue with another grid or order: the rest of the epoch would not be the rest of that epoch."""
    if recorded is None or recorded == mine:
        return
    flat_mine, flat_recorded = _flat(mine), _flat(recorded)
    differences = [
        f"{name} was {flat_recorded.get(name)!r}, is {flat_mine.get(name)!r}"
        for name in sorted(flat_mine.keys() | flat_recorded.keys())
        if flat_mine.get(name) != flat_recorded.get(name)
    ]
    raise CheckpointError(
        "the loader differs from the checkpoint's: " + ", ".join(differences),
        "a restart continues the same epoch, so its grid and order stay",
        "use the old settings, or start anew with resume='never'",
    )


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat.update(_flat(item, f"{name}.") if isinstance(item, dict) else {prefix + name: item})
    return flat

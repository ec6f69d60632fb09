"""Moving a batch to the run's device, whatever containers it is made of, ahead of its use on a GPU."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["move", "prefetched"]


def move(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """`value` with every tensor in it on `device`; container types stay, dtypes stay, the caller's object stays as it was.

    Entered: dicts and other mappings, lists, tuples, namedtuples, dataclasses. Objects with a `.to` of their own are
    asked. Anything else (strings, numbers, None) is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, str | bytes | int | float | bool | None):
        return value

    def moved(item: Any) -> Any:
        return move(item, device, non_blocking)

    if isinstance(value, tuple):
        items = [moved(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return _refilled_list(value, [moved(item) for item in value])
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)
    if isinstance(value, Mapping | UserDict):
        return _refilled_mapping(value, {name: moved(item) for name, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            # object.__setattr__: frozen dataclasses are batches too, and `twin` is ours alone until we return it
            object.__setattr__(twin, field.name, moved(getattr(value, field.name)))
        return twin
    return value


def _refilled_list(value: list[Any], items: list[Any]) -> list[Any]:
    if type(value) is list:
        return items
    twin = copy.copy(value)
    twin[:] = items
    return twin


def _refilled_mapping(value: Any, items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    twin = copy.copy(value)  # keeps subclasses with constructors of their own, and defaultdict's factory
    for name, item in items.items():
        twin[name] = item
    return twin


def prefetched(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on `device`. On CUDA the next one is copied on a side stream while this one is used.

    Source: "CUDA semantics: use pinned memory buffers" of the PyTorch documentation.
    """
    if device.type != "cuda":
        return batches if device.type == "cpu" else (move(batch, device) for batch in batches)
    return _prefetched_cuda(batches, device)


def _prefetched_cuda(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_next() -> tuple[Any, torch.cuda.Event] | None:
        try:
            batch = next(batches)
        except StopIteration:
            return None
        with torch.cuda.stream(side):
            batch = move(batch, device, non_blocking=True)
            return batch, side.record_event()

    coming = copy_next()
    while coming is not None:
        batch, copied = coming
        coming = copy_next()
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        _record(batch, current)
        yield batch


def _record(value: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that `stream` uses memory which the side stream allocated."""
    if isinstance(value, torch.Tensor):
        value.record_stream(stream)
    elif isinstance(value, Mapping | UserDict):
        for item in value.values():
            _record(item, stream)
    elif isinstance(value, list | tuple):
        for item in value:
            _record(item, stream)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _record(getattr(value, field.name), stream)

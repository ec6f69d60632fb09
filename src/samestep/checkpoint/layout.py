"""Where each tensor stands in a safetensors file, and which rank writes it."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from typing import Any

import torch

from samestep.checkpoint.tree import STORED_DTYPES

__all__ = ["Layout", "distinct", "share_out"]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A safetensors file but for its values: what comes first, and where each tensor's bytes stand behind it."""

    header: bytes
    """With its own length before it."""
    places: dict[str, tuple[int, int]]
    """{name: (first byte, byte after the last)}, counted from the end of the header, in the order of the file."""
    num_bytes: int
    """Of the values."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """The layout of `tensors`, whose dtypes are among `tree.STORED_DTYPES`."""
        names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that each is aligned
        entries: dict[str, Any] = {}
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name in names:
            tensor = tensors[name]
            begin, end = end, end + tensor.numel() * tensor.element_size()
            places[name] = begin, end
            entries[name] = {
                "dtype": STORED_DTYPES[tensor.dtype],
                "shape": [*tensor.shape],
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return cls(struct.pack("<Q", len(text)) + text, places, end)


def distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that do not share their memory with an earlier one, and {the others: the one each is the same as}."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        kept = first.setdefault(place if tensor.numel() else name, name)
        if kept != name:
            aliases[name] = kept
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}, aliases


def share_out(
    sizes: Mapping[str, int], num_writers: int, first_only: Mapping[str, int] | None = None
) -> list[set[str]]:
    """Deal tensors to writers by bytes: the largest first, each to the writer that has least. Alike on every rank.

    Args:
        sizes: {name: bytes}.
        num_writers: how many there are.
        first_only: {name: bytes} of those that the first writer has anyway.
    """
    names: list[set[str]] = [set() for _ in range(num_writers)]
    names[0] |= (first_only or {}).keys()
    loads = [0] * num_writers
    loads[0] = sum((first_only or {}).values())
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        names[least].add(name)
        loads[least] += size
    return names

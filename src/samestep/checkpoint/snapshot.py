"""The values of a state at one instant, in host memory: training goes on while they are written."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Mapping
from typing import Any

import torch

from samestep.checkpoint.layout import Layout
from samestep.errors import CheckpointError

__all__ = ["HostBuffer", "Snapshot"]


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of one safetensors file."""

    header: bytes
    data: memoryview
    """In the buffer: valid until the next snapshot is taken."""
    copied: Any
    """The CUDA event after which `data` has arrived; None: it has."""

    def wait(self) -> None:
        """Wait until the values are on the host."""
        if self.copied is not None:
            self.copied.synchronize()


class HostBuffer:
    """Host memory that snapshots are taken into, one after the other: as many bytes as the largest one so far.

    Its pages are there after the first snapshot, so that the later ones cost one copy. For tensors on a GPU it is
    page-locked: the copies are in the order of the device's work, and the host does not wait for them.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._locked = False
        self._header = b""
        self._places: list[torch.Tensor] = []

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """Copy `tensors`. The snapshot before it must have been written: its memory is used again.

        Args:
            tensors: as `tree.flatten` gives them, each distinct; on any device.
        """
        layout = Layout.of(tensors)
        cuda = [tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"]
        memory = self._room(layout.num_bytes, bool(cuda))
        if layout.header != self._header:
            self._places = [
                memory[begin:end].view(tensors[name].dtype).view(tensors[name].shape)
                for name, (begin, end) in layout.places.items()
            ]
            self._header = layout.header
        if self._places:
            torch._foreach_copy_(self._places, [tensors[name] for name in layout.places], non_blocking=True)
        copied = None
        if cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(cuda[0]))
        return Snapshot(layout.header, memory.numpy()[: layout.num_bytes].data, copied)

    def _room(self, num_bytes: int, lock: bool) -> torch.Tensor:
        memory = self._memory
        if memory is None or memory.numel() < num_bytes or (lock and not self._locked):
            self.close()
            self._memory = memory = _pages(max(num_bytes, 1))
            if lock:
                _check_cuda(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
                self._locked = True
        return memory

    def close(self) -> None:
        """Give the memory back."""
        if self._locked and self._memory is not None:
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))  # type: ignore[no-untyped-call]
        self._memory, self._locked, self._header, self._places = None, False, b"", []


def _pages(num_bytes: int) -> torch.Tensor:
    """Fresh memory, in huge pages where the system has them: it is there several times sooner than in small ones."""
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _check_cuda(code: Any) -> None:
    if int(code):
        raise CheckpointError(
            f"CUDA cannot lock the snapshot's memory (error {int(code)})",
            "a snapshot needs host memory of the state's size",
            "raise the limit of locked memory (ulimit -l), or save with fewer tensors",
        )

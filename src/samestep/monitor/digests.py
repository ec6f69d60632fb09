"""Digests of tensors: 64 bits that change when any bit of a tensor does, cheap enough to take while training.

A tensor's bytes are read as 32-bit words. Each word is multiplied by an odd 64-bit key of its position, and the products
are added modulo 2**64. An odd key has an inverse, so a change of one word always changes the sum; a swap changes it
because the keys differ. The sum has the same bits in any order, so the CPU and a GPU give the same digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from samestep.errors import ConfigError

__all__ = ["Digests", "Reading", "parameter_digests", "start", "whole"]

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

# A word's key is word_key[i % _ROW] * row_key[i // _ROW % _BLOCK] * block_key[i // (_ROW * _BLOCK)]: short tables that
# stay in a cache instead of a key for each of a billion words.
_ROW, _BLOCK = 4096, 1024
_ROWS_AT_ONCE = {"cpu": 64}  # products that fit into a core's cache; on a GPU one launch a block
_MASK = (1 << 64) - 1
_keys: dict[tuple[int, int, torch.device], torch.Tensor] = {}


@dataclasses.dataclass(slots=True)
class Reading:
    """Digests that may still be on their way to the host. `start` makes it."""

    labels: list[tuple[str, str]]
    """Name, then dtype and shape, of each tensor."""
    parts: list[tuple[list[int], torch.Tensor, torch.cuda.Event | None]]
    """For each device: which of the labels, their sums on the host, and the event after which they are there."""

    def read(self) -> dict[str, str]:
        """{name: 16 hexadecimal digits}; waits for the device."""
        sums = [0] * len(self.labels)
        for numbers, host, arrived in self.parts:
            if arrived is not None:
                arrived.synchronize()
            for number, value in zip(numbers, host.tolist(), strict=True):
                sums[number] = value
        return {
            name: _short(f"{form} {value & _MASK:016x}") for (name, form), value in zip(self.labels, sums, strict=True)
        }


def parameter_digests(named_tensors: Named) -> dict[str, str]:
    """A digest of each tensor: of its bits, dtype and shape, whatever its strides and device.

    Args:
        named_tensors: (name, tensor) pairs, as `module.named_parameters()` or a state_dict gives them.

    Returns:
        {name: 16 hexadecimal digits}, in the order given. `whole` makes one of them all.

    Raises:
        ConfigError: for a name used twice, or a tensor without bits to read (meta, sparse).
    """
    return start(named_tensors).read()


def whole(digests: Mapping[str, str]) -> str:
    """One digest of several: of the names and the tensors, whatever their order."""
    return _short("\n".join(f"{name} {digest}" for name, digest in sorted(digests.items())))


@torch.no_grad()
def start(named_tensors: Named) -> Reading:
    """Begin the digests; on a GPU nothing waits until they are read. What becomes of the tensors later is not seen."""
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    labels: list[tuple[str, str]] = []
    sums: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
    for number, (name, tensor) in enumerate(pairs):
        labels.append((name, f"{tensor.dtype} {list(tensor.shape)}"))
        numbers, values = sums.setdefault(tensor.device, ([], []))
        numbers.append(number)
        values.append(_sum(_words(name, tensor)))
    if len({name for name, _ in labels}) != len(labels):
        raise ConfigError(
            "got two tensors of one name", "each digest has a name of its own", "prefix the models' names"
        )
    return Reading(labels, [(numbers, *_to_host(torch.stack(values))) for numbers, values in sums.values()])


class Digests:
    """The digests of a run: one ledger line every `every` windows.

    Args:
        every: windows from one line to the next.
        named_tensors: gives the tensors; called once a line.
        write: `write("digest", step=..., tensors={name: digest}, all=digest)`.
    """

    def __init__(self, every: int, named_tensors: Callable[[], Named], write: Callable[..., Any]) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"got digests every {every!r} windows", "it is a whole number, 1 or more", "pass 100")
        self._every, self._named_tensors, self._write = every, named_tensors, write
        self._pending: tuple[int, Reading] | None = None
        self._last: int | None = None

    def after_window(self, step: int) -> None:
        """Window `step` (0: none yet) is over: write the line before, and begin this window's if it is due."""
        self.flush()
        if step % self._every or step == self._last:
            return
        reading, self._last = start(self._named_tensors()), step
        self._pending = step, reading
        if all(arrived is None for _, _, arrived in reading.parts):
            self.flush()  # nothing to wait for

    def flush(self) -> None:
        """Write what is on its way: before a checkpoint, so that a restart has the line, and at the end."""
        pending, self._pending = self._pending, None
        if pending is not None:
            digests = pending[1].read()
            self._write("digest", step=pending[0], tensors=digests, all=whole(digests))


def _words(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in the order of its elements, as int32, filled up with zero bytes."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ConfigError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}",
            "a digest is of the bits of a dense tensor",
            "leave it out",
        )
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=tensor.device)
    data = flat.view(torch.uint8)
    tail = data.numel() % 4
    if tail:
        data = torch.cat([data, data.new_zeros(4 - tail)])
    elif data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _sum(words: torch.Tensor) -> torch.Tensor:
    """The keyed sum, 0-d int64, on the words' device."""
    device = words.device
    word_keys, row_keys = _table(1, _ROW, device), _table(2, _BLOCK, device)
    at_once = _ROWS_AT_ONCE.get(device.type, _BLOCK)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for first, rows in _chunks(words, at_once):
        within, block = first % _BLOCK, first // _BLOCK
        sums = _row_sums(rows, word_keys)
        total += (sums * row_keys[within : within + len(sums)]).sum() * _signed(_mix(3, block) | 1)
    return total


def _row_sums(rows: torch.Tensor, word_keys: torch.Tensor) -> torch.Tensor:
    keys = word_keys[: rows.shape[1]]
    if rows.device.type == "cpu":
        return torch.mv(rows.to(torch.int64), keys)  # integers on a GPU have no mv
    return (rows * keys).sum(1)


def _chunks(words: torch.Tensor, at_once: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of its first row, rows): up to `at_once` whole rows, which divides a block; then the short row."""
    whole_rows = words.numel() // _ROW
    rows = words[: whole_rows * _ROW].view(whole_rows, _ROW)
    for first in range(0, whole_rows, at_once):
        yield first, rows[first : first + at_once]
    if words.numel() % _ROW:
        yield whole_rows, words[whole_rows * _ROW :].view(1, -1)


def _table(purpose: int, length: int, device: torch.device) -> torch.Tensor:
    """The odd keys of the first `length` places; kept a device."""
    found = _keys.get((purpose, length, device))
    if found is None:
        keys = [_signed(_mix(purpose, place) | 1) for place in range(length)]
        found = _keys[purpose, length, device] = torch.tensor(keys, dtype=torch.int64).to(device)
    return found


def _mix(purpose: int, place: int) -> int:
    """64 bits that look like chance and are the same everywhere and always: ledgers outlive versions."""
    return int.from_bytes(hashlib.blake2b(f"samestep {purpose} {place}".encode(), digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _to_host(sums: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if sums.device.type != "cuda":
        return sums.cpu(), None
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    with torch.cuda.device(sums.device):
        host.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return host, event

"""Take a ledger back to the step a restart continues from: later lines go, and what they cost is added up."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["rewind"]


@dataclasses.dataclass(slots=True)
class _Tail:
    """The end of one file, behind the last window that stays."""

    path: Path
    offset: int
    kept: list[bytes] = dataclasses.field(default_factory=list)
    """Whole lines of it that stay: events up to the step."""
    dropped: bool = False
    found: bool = False
    """A window that stays is in this file."""


def rewind(files: list[Path], step: int) -> dict[str, Any] | None:
    """Drop lines above `step` and a line that a kill cut short. Read from the end, so it costs what is dropped.

    Each file is replaced by a finished copy, the newest first; a kill in between leaves lines that the next rewind drops.

    Args:
        files: the ledger's, oldest first.
        step: windows finished at the checkpoint.

    Returns:
        {"windows", "samples", "last_step", "last_time"} of what was dropped; None when that was no window.
    """
    lost = {"windows": 0, "samples": 0, "last_step": step, "last_time": 0.0}
    tails = []
    for path in reversed(files):
        tails.append(_tail(path, step, lost))
        if tails[-1].found:
            break
    for tail in tails:
        if tail.dropped:
            _replace(tail)
    return lost if lost["windows"] else None


def _tail(path: Path, step: int, lost: dict[str, Any]) -> _Tail:
    tail = _Tail(path, 0)
    for offset, text in _backwards(path):
        line = _parsed(text)
        if line is None:
            tail.dropped = True  # cut short, or damaged behind the last window that stays
            continue
        at = line.get("step", 0)
        at = at if isinstance(at, int) else 0
        if line.get("kind") == "window" and at <= step:
            tail.found, tail.offset = True, offset + len(text)
            break
        if at <= step:
            tail.kept.append(text)
            continue
        tail.dropped = True
        lost["last_time"] = max(lost["last_time"], float(line.get("time", 0.0)))
        if line.get("kind") == "window":
            lost["windows"] += 1
            lost["samples"] += int(line.get("samples", 0))
            lost["last_step"] = max(lost["last_step"], at)
    tail.kept.reverse()
    return tail


def _backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) from the last to the first."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = len(data)
        while end > 0:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            yield begin, data[begin:end]
            end = begin


def _parsed(text: bytes) -> dict[str, Any] | None:
    if not text.endswith(b"\n"):
        return None
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _replace(tail: _Tail) -> None:
    temporary = tail.path.with_suffix(".tmp")
    with tail.path.open("rb") as old, temporary.open("wb") as new:
        _copy(old, new, tail.offset)
        new.writelines(tail.kept)
        new.flush()
        os.fsync(new.fileno())
    shutil.copymode(tail.path, temporary)
    temporary.replace(tail.path)


def _copy(old: Any, new: Any, size: int) -> None:
    while size > 0 and (block := old.read(min(size, 2**20))):
        new.write(block)
        size -= len(block)

"""The ledger: one JSON line for each window and event of a run, written by main, without duplicates after a restart."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from samestep.monitor.record import Record

__all__ = ["SCHEMA", "Ledger", "read_ledger"]

SCHEMA = 1
"""Version of the lines' fields. A reader skips fields it does not know."""


class Ledger:
    """Appends to `ledger.jsonl`.

    Args:
        path: the file.
        continue_from: keep only lines up to this step (windows finished) of an earlier start; None begins a new file.
    """

    def __init__(self, path: Path, continue_from: int | None) -> None:
        self._path = path
        if continue_from is None:
            path.write_text("")
        elif path.exists():
            kept = [line for line in read_ledger(path) if line.get("step", 0) <= continue_from]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(_line(line) for line in kept))
            temporary.replace(path)
        self._file = path.open("a", buffering=1)

    def window(self, record: Record) -> None:
        """Write one window's line."""
        self._write("window", dataclasses.asdict(record))

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event's line: start, log, checkpoint, end."""
        self._write(kind, fields)

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        self._file.write(_line({"kind": kind, "time": round(time.time(), 3), **fields}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger, oldest first; a last line that a kill cut short is left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def _line(fields: dict[str, Any]) -> str:
    return json.dumps(_plain(fields), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Non-finite numbers as strings: JSON has no NaN, and readers in other languages stop at one."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

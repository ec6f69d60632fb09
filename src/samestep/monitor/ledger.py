"""The ledger: one JSON line for each window and event of a run, written by main, without duplicates after a restart.

docs/monitor.md has the fields. The newest lines are in `ledger.jsonl`; when it has grown large it becomes
`ledger-0001.jsonl`, and so on. A line is one write to the file, so whatever kills the process leaves whole lines and at
most a cut last one, and a reader may follow the file while it grows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samestep.errors import RunDirError
from samestep.monitor.record import Record
from samestep.monitor.rewind import rewind

__all__ = ["SCHEMA", "Ledger", "Lines", "ledger_files", "read_ledger"]

SCHEMA = 1
"""Version of the lines' fields. A reader skips fields it does not know."""

PART_BYTES = 256 * 2**20
"""Size at which the file becomes a part: more than half a million windows."""

_NAMES = [field.name for field in dataclasses.fields(Record) if field.name not in ("time", "memory")]
_VALUES = operator.attrgetter(*_NAMES)
_ENCODE = json.JSONEncoder(allow_nan=False).encode


class Ledger:
    """Appends to `ledger.jsonl`.

    Args:
        path: the file.
        continue_from: keep only lines up to this step (windows finished) of an earlier start, and say in a "lost" line
            what was dropped; None begins a new file.
        part_bytes: size at which the file becomes a numbered part.
    """

    def __init__(self, path: Path, continue_from: int | None, part_bytes: int = PART_BYTES) -> None:
        self._path, self._part_bytes = path, part_bytes
        lost = None
        if continue_from is None:
            for part in ledger_files(path):
                part.unlink()
        else:
            lost = rewind(ledger_files(path), continue_from)
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        if lost is not None:
            self.event("lost", step=continue_from, **lost)

    def window(self, record: Record) -> None:
        """Write one window's line."""
        stamp = record.time if record.time == record.time else time.time()
        fields = {"kind": "window", "time": round(stamp, 4), **dict(zip(_NAMES, _VALUES(record), strict=True))}
        for name in ("seconds", "data_seconds", "exchange_seconds", "finish_seconds", "outside_seconds"):
            fields[name] = round(fields[name], 7)  # 0.1 us
        if record.memory is not None:
            fields["memory"] = record.memory
        self._write(fields)

    def event(self, kind: str, fields: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Write an event's line: start, log, checkpoint, end, and others; a checkpoint's also reaches the disk."""
        self._write({"kind": kind, "time": round(time.time(), 4), **(fields or {}), **more})
        if kind in ("checkpoint", "end"):
            os.fsync(self._file.fileno())

    def _write(self, fields: dict[str, Any]) -> None:
        line = _line(fields)
        if self._size and self._size + len(line) > self._part_bytes:
            self._rotate()
        self._file.write(line)
        self._size += len(line)

    def _rotate(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        number = len(ledger_files(self._path))  # this file is the last of them
        self._path.rename(self._path.with_name(f"{self._path.stem}-{number:04d}{self._path.suffix}"))
        self._file = self._path.open("ab", buffering=0)
        self._size = 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def ledger_files(path: Path) -> list[Path]:
    """The files of a ledger, oldest first: numbered parts, then `path` itself if it exists."""
    parts = sorted(path.parent.glob(f"{path.stem}-[0-9][0-9][0-9][0-9]{path.suffix}"))
    return parts + ([path] if path.exists() else [])


class Lines:
    """The lines of a ledger, oldest first, read as they are needed; iterate it once or more.

    Attributes:
        damaged: lines of the last pass that are no JSON object with a kind, a cut last one not counted.

    Args:
        run: a run directory, or the file.

    Raises:
        RunDirError: when there is no ledger, or (while iterating) when it has another schema.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "ledger.jsonl" if run.is_dir() else run
        self.files = ledger_files(self.path)
        self.damaged = 0
        if not self.files:
            raise RunDirError(f"{self.path} does not exist", "a run with a directory writes it there", "check the path")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damaged, last = 0, False
        for file in self.files:
            with file.open("rb") as lines:
                for text in lines:
                    self.damaged += last  # a line without sense that others follow
                    line = parse(text)
                    last = line is None
                    if line is not None:
                        self._check(line)
                        yield line

    def _check(self, line: dict[str, Any]) -> None:
        if line["kind"] == "start" and line.get("schema", SCHEMA) != SCHEMA:
            raise RunDirError(
                f"{self.path} has schema {line['schema']!r}",
                f"this version of samestep reads schema {SCHEMA}",
                "use the version that wrote it",
            )


def parse(text: bytes) -> dict[str, Any] | None:
    """One line's object; None when it is not one."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("kind"), str) else None


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """All lines of a ledger, oldest first; a last line that a kill cut short is left out.

    Raises:
        RunDirError: when there is none, or when a line in the middle is damaged: nothing is dropped in silence. `Lines`
            reads on and counts them.
    """
    lines = Lines(path)
    found = list(lines)
    if lines.damaged:
        raise RunDirError(
            f"{lines.path} has {lines.damaged} damaged line(s) among {len(found)} whole ones",
            "each line is one JSON object with a kind",
            "restore the file, or read the rest of it with samestep report",
        )
    return found


def _line(fields: dict[str, Any]) -> bytes:
    try:
        return _ENCODE(fields).encode() + b"\n"
    except ValueError:
        return _ENCODE(plain(fields)).encode() + b"\n"


def plain(value: Any) -> Any:
    """Non-finite numbers as strings: JSON has no NaN, and readers in other languages stop at one."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value

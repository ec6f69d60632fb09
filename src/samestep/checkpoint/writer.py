"""Writing files so that they are on the disk, as they were meant to be, before anybody relies on them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from samestep.checkpoint.snapshot import Snapshot
from samestep.errors import CheckpointError

__all__ = ["Background", "sync", "write_file", "write_snapshot"]

_PIECE = 8 << 20


def write_file(path: Path, chunks: Iterable[Any]) -> dict[str, Any]:
    """Write and sync a new file; its size and digest, of what was to be written and not of what the disk gives back.

    Args:
        path: the file.
        chunks: an iterable of bytes-like objects.

    Raises:
        OSError: with the file's name.
    """
    digest, size = hashlib.sha256(), 0
    with _new(path) as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_snapshot(path: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Write and sync a safetensors file, read it back and compare; its size and digest.

    The digest is computed meanwhile in a thread of its own. All that takes long (hashing, writing, reading, comparing)
    leaves Python's lock to the training thread.

    Not the package's own writers: one holds the whole file in memory twice, the other writes through a memory mapping,
    where a full disk is a bus error and not an exception.

    Raises:
        OSError: with the file's name.
        CheckpointError: when the file does not read back as written.
    """
    snapshot.wait()
    digest = hashlib.sha256(snapshot.header)
    with ThreadPoolExecutor(1, "samestep-digest") as pool:
        hashing = pool.submit(digest.update, snapshot.data)
        with _new(path) as file:
            for piece in _pieces(snapshot):
                file.write(piece)
        hashing.result()
    _read_back(path, snapshot)
    return {"bytes": len(snapshot.header) + len(snapshot.data), "sha256": digest.hexdigest()}


@contextlib.contextmanager
def _new(path: Path) -> Iterator[Any]:
    """A new file, synced at the end."""
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e


def _pieces(snapshot: Snapshot) -> Iterator[Any]:
    yield snapshot.header
    for begin in range(0, len(snapshot.data), _PIECE):
        yield snapshot.data[begin : begin + _PIECE]


def _read_back(path: Path, snapshot: Snapshot) -> None:
    """Compare with memory: three times as fast as another digest.

    Raises:
        CheckpointError: naming the file and the place.
    """
    buffer = memoryview(bytearray(min(_PIECE, max(len(snapshot.header), len(snapshot.data)))))
    place = 0
    with path.open("rb", buffering=0) as file:
        for piece in _pieces(snapshot):
            for begin in range(0, len(piece), len(buffer)):
                wanted = memoryview(piece)[begin : begin + len(buffer)]
                got = file.readinto(buffer[: len(wanted)])
                if got != len(wanted) or not _equal(buffer[:got], wanted):
                    raise CheckpointError(
                        f"{path} does not read back as written: {path.name} has other bytes than were written, "
                        f"from byte {place} to {place + len(wanted)}",
                        "the checkpoints before it are untouched",
                        "check the disk",
                    )
                place += len(wanted)


def _equal(a: memoryview, b: memoryview) -> bool:
    left, right = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    words = len(left) // 8 * 8  # eight bytes at a time, then the rest
    same = np.array_equal(left[:words].view(np.uint64), right[:words].view(np.uint64))
    return same and np.array_equal(left[words:], right[words:])


def sync(path: Path) -> None:
    """Have the entries of a directory on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Background:
    """One thread that writes, one job at a time; what goes wrong in it is raised where its end is awaited."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[Any] | None = None

    def start(self, job: Callable[[], Any]) -> None:
        """Begin `job`; the one before must have been awaited."""
        assert self._job is None
        self._pool = self._pool or ThreadPoolExecutor(1, "samestep-checkpoint")
        self._job = self._pool.submit(job)

    @property
    def busy(self) -> bool:
        """Whether a job is going on."""
        return self._job is not None and not self._job.done()

    def wait(self) -> Any:
        """Wait for the job, if there is one; what it returned, or raise what it raised."""
        job, self._job = self._job, None
        return job.result() if job is not None else None

    def close(self) -> None:
        """End the thread after its job."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._job = None

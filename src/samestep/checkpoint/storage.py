"""Checkpoints on disk: a directory each, written aside, synced, verified, renamed; read only when whole."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

import samestep
from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.tree import STORED_DTYPES, as_bytes, flatten, unflatten
from samestep.errors import CheckpointError

__all__ = ["Checkpoint", "Store", "sync", "verify", "write_file"]

_TENSORS, _MANIFEST = "tensors.safetensors", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_LEFT = re.compile(r"\.tmp-(?:delete-)?step-\d+(?:\.old)?-(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint; `Store.newest` gives whole ones."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """The checkpoint at `path`, its manifest read and checked, its other files not.

        Raises:
            CheckpointError: when there is none.
        """
        file = path / _MANIFEST
        try:
            text = file.read_text(encoding="ascii", errors="replace")
        except OSError as e:
            raise CheckpointError(
                f"cannot read {file}: {e.strerror}", "a whole checkpoint has a manifest", "use an earlier checkpoint"
            ) from None
        return cls(path, Manifest.from_text(text, str(file)))

    def load(self, device: str | torch.device = "cpu") -> Any:
        """The nested state. Tensors have the dtype they were saved with and are on `device`, wherever they were before.

        Tied tensors are one object. The memory is the state's own: the files may be deleted.

        Raises:
            CheckpointError: when a file is damaged.
        """
        if found := verify(self.path):
            raise CheckpointError(
                f"{self.path} is damaged: {'; '.join(found)}",
                "sizes and digests are those of the manifest",
                "use an earlier checkpoint",
            )
        tensors: dict[str, torch.Tensor] = {}
        try:
            for file in self.manifest.files:
                with safetensors.safe_open(self.path / file, framework="pt", device="cpu") as content:
                    # a copy: the reader maps the file, and a mapping outlives neither truncation nor a lost network disk
                    for name in content.keys():  # noqa: SIM118 (it is no dict, and cannot be iterated)
                        tensors[name] = content.get_tensor(name).to(device, copy=True)
            tensors |= {alias: tensors[name] for alias, name in self.manifest.aliases.items()}
        except (OSError, KeyError, safetensors.SafetensorError) as e:
            raise CheckpointError(
                f"{self.path} cannot be read ({type(e).__name__}: {e})", "", "use an earlier checkpoint"
            ) from e
        return unflatten(self.manifest.state, tensors)


class Store:
    """The checkpoints of a run. One process writes at a time; any number may read.

    Args:
        directory: where they are; made when the first is saved.
        keep_last: how many to keep; None keeps all.

    Raises:
        CheckpointError: when keep_last is not a positive whole number.
    """

    def __init__(self, directory: Path, keep_last: int | None = 3) -> None:
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise CheckpointError(f"got keep_last={keep_last!r}", "it is 1 or more, or None to keep all", "pass 3")
        self.directory, self._keep_last = Path(directory), keep_last

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is."""
        return self.directory / f"step-{step:08d}"

    def _versions(self, step: int) -> list[Path]:
        """The checkpoint of `step`, then the one that it was replacing when the writer was killed."""
        path = self.path(step)
        return [path, path.with_name(f"{path.name}.old")]

    def steps(self) -> list[int]:
        """Steps that have a checkpoint directory, whole or not, in numeric order."""
        if not self.directory.is_dir():
            return []
        return sorted({int(found[1]) for path in self.directory.iterdir() if (found := _NAME.fullmatch(path.name))})

    def newest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, verified; None if there is none.

        Args:
            report: is told of each newer one that is damaged or was not finished, with the file and what is wrong.
        """
        for left in sorted(self.directory.glob(".tmp-step-*")) if self.directory.is_dir() else ():
            report(f"checkpoint not finished: {left} (its writer was stopped); it is not used")
        for step in reversed(self.steps()):
            for path in self._versions(step):
                if not path.exists():
                    continue
                found = verify(path)
                if not found:
                    return Checkpoint.open(path)
                report(f"CHECKPOINT DAMAGED: {path}: {'; '.join(found)}; trying the one before it")
        return None

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Write, sync and verify a checkpoint, then delete the oldest beyond `keep_last`; its path.

        Args:
            step: windows finished; a checkpoint of the same step is replaced.
            state: nested state, as `tree.flatten` takes it.
            meta: JSON for the manifest.

        Raises:
            CheckpointError: for a state that cannot be held, or files that cannot be written; earlier ones stay whole.
        """
        if type(step) is not int or step < 0:
            raise CheckpointError(f"got step={step!r}", "a step is a whole number from 0", "pass the windows finished")
        tree, tensors = flatten(dict(state))
        final = self.path(step)
        temporary = self.directory / f".tmp-{final.name}-{os.getpid()}"
        try:
            self._make_room()
            temporary.mkdir()
            _write(temporary, step, tree, tensors, dict(meta))
            if found := verify(temporary):
                raise CheckpointError(
                    f"{temporary} does not read back as written: {'; '.join(found)}",
                    "the checkpoints before it are untouched",
                    "check the disk",
                )
            self._put_in_place(temporary, step)
        except OSError as e:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: {e.filename or temporary}: {e.strerror or e}",
                "the checkpoints before it are untouched",
                "free space or check permissions, then save again",
            ) from e
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # renamed away when all went well
        self._retire(step)
        return final

    def _make_room(self) -> None:
        """Make the directory; remove what writers that are dead now left in it."""
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            sync(self.directory.parent)
        for left in self.directory.glob(".tmp-*"):
            writer = _LEFT.fullmatch(left.name)
            if writer and not _is_another_process(int(writer[1])):
                shutil.rmtree(left, ignore_errors=True)

    def _put_in_place(self, temporary: Path, step: int) -> None:
        """Rename. A full directory cannot be renamed over, so the old one waits under a name that readers know."""
        final, old = self._versions(step)
        if final.exists():
            _remove(old)
            final.rename(old)
        temporary.rename(final)
        sync(self.directory)
        _remove(old)

    def _retire(self, saved: int) -> None:
        """Delete the oldest. Later steps than `saved` (of a run that went back) do not count: this one must stay."""
        if self._keep_last is None:
            return
        for step in [step for step in self.steps() if step <= saved][: -self._keep_last]:
            for path in self._versions(step):
                with contextlib.suppress(OSError):  # the new checkpoint is safe; the next save tries again
                    _remove(path)


def _remove(path: Path) -> None:
    """Delete a checkpoint, so that no half of one ever stands under a checkpoint's name."""
    doomed = path.with_name(f".tmp-delete-{path.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _is_another_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _write(directory: Path, step: int, tree: Any, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Fill `directory`; the manifest last."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        kept = first.setdefault(place if tensor.numel() else name, name)
        if kept != name:
            aliases[name] = kept
    distinct = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    manifest = Manifest(
        step=step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"samestep": samestep.__version__, "torch": str(torch.__version__)},
        meta=meta,
        state=tree,
        aliases=aliases,
        files={_TENSORS: write_file(directory / _TENSORS, _safetensors(distinct))},
    )
    write_file(directory / _MANIFEST, [manifest.to_text().encode("ascii")])
    sync(directory)


def _safetensors(tensors: dict[str, torch.Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file, a tensor at a time.

    Not the package's own writers: one holds the whole file in memory twice, the other writes through a memory mapping,
    where a full disk is a bus error and not an exception.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that each is aligned
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": STORED_DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        yield as_bytes(tensors[name]).cpu().numpy().data


def write_file(path: Path, chunks: Any) -> dict[str, Any]:
    """Write and sync a new file; its size and digest, of what was to be written and not of what the disk gives back.

    Args:
        path: the file.
        chunks: an iterable of bytes-like objects.

    Raises:
        OSError: with the file's name.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Have the entries of a directory on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(path: Path) -> list[str]:
    """What is wrong with the checkpoint at `path`; nothing if it is whole. Each names a file and a cause."""
    try:
        manifest = Checkpoint.open(path).manifest
    except CheckpointError as e:
        return [e.got]
    found = []
    for name, expected in manifest.files.items():
        try:
            with (path / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected["bytes"]:
                    found.append(f"{name} has {size} bytes, {expected['bytes']} were written")
                elif hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    found.append(f"{name} has other bytes than were written (sha256 differs)")
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as e:
            found.append(f"{name} cannot be read: {e.strerror}")
    return found

"""Checkpoints on disk: a directory each, written aside, synced, renamed; read only when whole."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

import samestep
from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.tree import flatten, unflatten
from samestep.errors import CheckpointError

__all__ = ["Checkpoint", "Store", "problems", "sync"]

_TENSORS, _MANIFEST = "tensors.safetensors", "manifest.json"
_NAME = re.compile(r"step-(\d{10})")


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One whole checkpoint."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """The checkpoint at `path`, its manifest read.

        Raises:
            CheckpointError: when there is none.
        """
        file = path / _MANIFEST
        try:
            text = file.read_text()
        except OSError as e:
            raise CheckpointError(f"cannot read {file}: {e.strerror}", "a checkpoint has a manifest") from None
        return cls(path, Manifest.from_text(text, str(file)))

    def load(self, device: str | torch.device = "cpu") -> Any:
        """The nested state, tensors on `device` wherever they were saved from.

        Raises:
            CheckpointError: when a file is damaged.
        """
        if found := problems(self.path):
            raise CheckpointError(f"{self.path} is damaged: {'; '.join(found)}", "", "use an earlier checkpoint")
        tensors = safetensors.torch.load_file(self.path / _TENSORS, device=str(device))
        for alias, name in self.manifest.aliases.items():
            tensors[alias] = tensors[name]
        return unflatten(self.manifest.state, tensors)


class Store:
    """The checkpoints of a run.

    Args:
        directory: where they are; made when the first is saved.
        keep_last: how many to keep; None keeps all.
    """

    def __init__(self, directory: Path, keep_last: int | None = 3) -> None:
        self.directory, self._keep_last = directory, keep_last

    def steps(self) -> list[int]:
        """Steps that have a checkpoint directory, whole or not, in numeric order."""
        if not self.directory.is_dir():
            return []
        return sorted(int(found[1]) for path in self.directory.iterdir() if (found := _NAME.fullmatch(path.name)))

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is."""
        return self.directory / f"step-{step:010d}"

    def newest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint; `report` is told of each newer one that is damaged, and how."""
        for left in sorted(self.directory.glob(".tmp-*")) if self.directory.is_dir() else ():
            report(f"{left.name}: a checkpoint that was not finished; it is not used")
        for step in reversed(self.steps()):
            path = self.path(step)
            found = problems(path)
            if not found:
                return Checkpoint.open(path)
            report(f"CHECKPOINT DAMAGED: {path}: {'; '.join(found)}; using the one before it")
        return None

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Write, sync and verify a checkpoint, then delete the oldest beyond `keep_last`; its path.

        Raises:
            CheckpointError: for a state that cannot be held, or files that cannot be written; earlier ones stay whole.
        """
        tree, tensors = flatten(dict(state))
        final = self.path(step)
        temporary = self.directory / f".tmp-{final.name}-{os.getpid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for left in self.directory.glob(".tmp-*"):  # one run writes here at a time, so these are dead
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
            _write(temporary, step, tree, tensors, dict(meta))
            _put_in_place(temporary, final)
            found = problems(final)
        except (OSError, safetensors.SafetensorError) as e:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.directory}: {e}",
                "the checkpoints before it are untouched",
                "free space or check permissions, then save again",
            ) from e
        if found:
            raise CheckpointError(f"{final} does not read back as written: {'; '.join(found)}", "check the disk")
        if self._keep_last is not None:
            for old in self.steps()[: -self._keep_last]:
                shutil.rmtree(self.path(old), ignore_errors=True)
        return final


def _write(directory: Path, step: int, tree: Any, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    distinct: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            distinct[name] = tensor.contiguous().cpu()
            if distinct[name].untyped_storage().nbytes() != distinct[name].nbytes:
                distinct[name] = distinct[name].clone()  # a view would bring its whole storage
    file = directory / _TENSORS
    # safetensors' own writer maps memory and reports a full disk as a bus error; serialised bytes fail as OSError does
    file.write_bytes(safetensors.torch.save(distinct))
    sync(file)
    manifest = Manifest(
        step=step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"samestep": samestep.__version__, "torch": str(torch.__version__)},
        meta=meta,
        state=tree,
        aliases=aliases,
        files={_TENSORS: {"bytes": file.stat().st_size, "sha256": _sha256(file)}},
    )
    (directory / _MANIFEST).write_text(manifest.to_text())
    sync(directory / _MANIFEST)
    sync(directory)


def _put_in_place(temporary: Path, final: Path) -> None:
    if final.exists():
        aside = final.with_name(f".tmp-old-{final.name}-{os.getpid()}")
        final.rename(aside)
        temporary.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        temporary.rename(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Have the file or directory on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def problems(path: Path) -> list[str]:
    """What is wrong with the checkpoint at `path`; nothing if it is whole. Each names a file and a cause."""
    try:
        manifest = Checkpoint.open(path).manifest
    except CheckpointError as e:
        return [str(e)]
    found = []
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != expected["bytes"]:
            found.append(f"{name} has {file.stat().st_size} bytes, {expected['bytes']} were written")
        elif _sha256(file) != expected["sha256"]:
            found.append(f"{name} has other bytes than were written (sha256 differs)")
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Checkpoints on disk: a directory each, written aside, synced, verified, renamed; read only when whole."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

import samestep
from samestep.checkpoint.layout import distinct
from samestep.checkpoint.manifest import Manifest, plain_json
from samestep.checkpoint.retention import Retention
from samestep.checkpoint.snapshot import HostBuffer
from samestep.checkpoint.tree import flatten, unflatten
from samestep.checkpoint.writer import sync, write_file, write_snapshot
from samestep.errors import CheckpointError

__all__ = ["TENSORS", "Checkpoint", "Store", "draft", "naming_the_step", "sync", "verify", "write_file"]

TENSORS, _MANIFEST = "tensors.safetensors", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_LEFT = re.compile(r"\.tmp-(?:delete-)?step-\d+(?:\.old)?-(\d+)(?:x[0-9a-f]+)?")


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint; `Store.newest` gives whole ones."""

    path: Path
    manifest: Manifest
    verified: bool = False
    """Its files' digests have been compared a moment ago: loading does not do it again."""

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
        if not self.verified and (found := verify(self.path)):
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
        keep_every: keep also those whose step is a multiple of it.
        best_is: "max" or "min": of those saved with a metric, the best is kept too.
        token: letters and digits in the name of what is being written, the same for all processes that write it.

    Raises:
        CheckpointError: when keep_last or keep_every is not a positive whole number.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int | None = 3,
        *,
        keep_every: int | None = None,
        best_is: str = "max",
        token: str | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._retention = Retention(keep_last=keep_last, keep_every=keep_every, best_is=best_is)
        self._token = token or f"{os.getpid()}"
        self._metrics: dict[int, float | None] = {}

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
                    return dataclasses.replace(Checkpoint.open(path), verified=True)
                report(f"CHECKPOINT DAMAGED: {path}: {'; '.join(found)}; trying the one before it")
        return None

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Write, sync and verify a checkpoint, then delete what is not to be kept; its path.

        Args:
            step: windows finished; a checkpoint of the same step is replaced.
            state: nested state, as `tree.flatten` takes it.
            meta: JSON for the manifest; its "metric" is what the best is judged by.

        Raises:
            CheckpointError: for a state that cannot be held, or files that cannot be written; earlier ones stay whole.
        """
        manifest, tensors = draft(step, state, meta)
        snapshot = HostBuffer().take(tensors)
        with self.writing(step) as temporary:
            files = {TENSORS: write_snapshot(temporary / TENSORS, snapshot)}
            return self.commit(temporary, dataclasses.replace(manifest, files=files))

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of `step` is while it is written."""
        return self.directory / f".tmp-{self.path(step).name}-{self._token}"

    @contextlib.contextmanager
    def writing(self, step: int, shared: bool = False) -> Iterator[Path]:
        """Make room and a temporary directory, which is gone afterwards unless `commit` has given it its name.

        Args:
            step: of the checkpoint.
            shared: other processes write into the directory too, and may have made it already.

        Raises:
            CheckpointError: in place of an OSError, with the file and its cause.
        """
        temporary = self.temporary(step)
        try:
            with naming_the_step(step, temporary):
                self._make_room(temporary)
                if not shared:
                    shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(exist_ok=shared)
                yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # renamed away when all went well

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Make what is in `temporary`, which others have verified, the checkpoint that `manifest` describes; its path.

        Raises:
            OSError: as in `writing`.
            CheckpointError: when the manifest does not read back as written.
        """
        write_file(temporary / _MANIFEST, [manifest.to_text().encode("ascii")])
        sync(temporary)
        Checkpoint.open(temporary)  # reads it back and checks its digest
        self._put_in_place(temporary, manifest.step)
        self._metrics.pop(manifest.step, None)
        self._retire(manifest.step)
        return self.path(manifest.step)

    def _make_room(self, temporary: Path) -> None:
        """Make the directory; remove what writers that are dead now left."""
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            sync(self.directory.parent)
        for left in self.directory.glob(".tmp-*"):
            writer = _LEFT.fullmatch(left.name)
            if writer and left != temporary and not _is_another_process(int(writer[1])):
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
        for step in self._retention.doomed(self.steps(), saved, self._metric):
            for path in self._versions(step):
                with contextlib.suppress(OSError):  # the new checkpoint is safe; the next save tries again
                    _remove(path)

    def _metric(self, step: int) -> float | None:
        """What the checkpoint of `step` was saved with."""
        if step not in self._metrics:
            self._metrics[step] = None
            with contextlib.suppress(CheckpointError):
                metric = Checkpoint.open(self.path(step)).manifest.meta.get("metric")
                self._metrics[step] = metric if isinstance(metric, int | float) else None
        return self._metrics[step]


def draft(step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """A checkpoint's manifest but for its files, and the distinct tensors that go into them, not copied.

    Raises:
        CheckpointError: for what a checkpoint cannot hold.
    """
    if type(step) is not int or step < 0:
        raise CheckpointError(f"got step={step!r}", "a step is a whole number from 0", "pass the windows finished")
    tree, tensors = flatten(dict(state))
    tensors, aliases = distinct(tensors)
    manifest = Manifest(
        step=step,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"samestep": samestep.__version__, "torch": str(torch.__version__)},
        meta=plain_json(dict(meta)),
        state=tree,
        aliases=aliases,
        files={},
    )
    return manifest, tensors


@contextlib.contextmanager
def naming_the_step(step: int, where: Path) -> Iterator[None]:
    """An OSError as a CheckpointError that names the step, the file and the cause."""
    try:
        yield
    except OSError as e:
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written: {e.filename or where}: {e.strerror or e}",
            "the checkpoints before it are untouched",
            "free space or check permissions, then save again",
        ) from e


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

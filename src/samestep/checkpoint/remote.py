"""Checkpoints on remote storage (S3 and whatever else fsspec reaches): copied there and back, the manifest last.

An object store has no rename. A checkpoint is there when its manifest is, and the manifest is written after the files
that it names and deleted before them; so a reader sees a whole checkpoint or none. Every byte is checked against its
digests on the way in and on the way out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.storage import Store, sync
from samestep.checkpoint.survey import entries, fault
from samestep.errors import CheckpointError

__all__ = ["Remote", "mirror"]

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_CHUNK_BYTES = 8 << 20
_MAX_MANIFEST_BYTES = 1 << 28


class Remote:
    """The checkpoints under a URL.

    Args:
        url: what fsspec understands: s3://bucket/folder, gs://..., memory://..., or a path. Credentials and endpoints are
            fsspec's own business (its configuration files and the environment).

    Raises:
        CheckpointError: when fsspec, or its driver for the protocol, is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = re.sub(r"//[^/@]*@", "//", url)  # for messages: without a password
        try:
            import fsspec
        except ImportError:
            raise CheckpointError(
                f"{self.url} needs the package fsspec", "remote storage is an extra", "pip install 'samestep[remote]'"
            ) from None
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as e:
            raise CheckpointError(
                f"cannot reach {self.url}: {e}", "fsspec has a driver for each protocol", "install it, or check the URL"
            ) from None
        self._root = str(root).rstrip("/")

    def _at(self, step: int, name: str = "") -> str:
        return f"{self._root}/step-{step:08d}" + (f"/{name}" if name else "")

    @contextlib.contextmanager
    def _reaching(self, what: str) -> Iterator[None]:
        """A driver may fail in any way; the user hears of it in one form."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as e:
            raise CheckpointError(
                f"cannot {what} {self.url}: {type(e).__name__}: {str(e)[:300]}",
                "a checkpoint whose manifest is not there does not count",
                "check access and network, then do it again",
            ) from e

    def steps(self) -> list[int]:
        """Steps that have a manifest, in numeric order."""
        with self._reaching("list"):
            self._fs.invalidate_cache()
            if not self._fs.exists(self._root):
                return []
            names = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
            found = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
            return [step for step in found if self._fs.exists(self._at(step, _MANIFEST))]

    def manifest(self, step: int) -> Manifest:
        """That of a step, checked.

        Raises:
            CheckpointError: when it is damaged, or says another step.
        """
        return self._parsed(step, self._manifest_bytes(step))

    def _parsed(self, step: int, content: bytes) -> Manifest:
        where = f"{self.url}/step-{step:08d}/{_MANIFEST}"
        manifest = Manifest.from_text(content.decode("ascii", "replace"), where)
        if manifest.step != step:
            raise CheckpointError(f"{where} is of step {manifest.step}", "", "use another checkpoint")
        return manifest

    def _manifest_bytes(self, step: int) -> bytes:
        with self._reaching("read from"), self._fs.open(self._at(step, _MANIFEST), "rb") as file:
            content = bytes(file.read(_MAX_MANIFEST_BYTES + 1))
        if len(content) > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{self.url}: the manifest of step {step} is too large for one", "", "use another")
        return content

    def push(self, path: Path, *, replace: bool = False) -> bool:
        """Copy a local checkpoint there; False if it was there already.

        Args:
            path: a whole checkpoint's directory.
            replace: write over another checkpoint of the same step.

        Raises:
            CheckpointError: when it is damaged, cannot be copied, or another one of its step is there.
        """
        if wrong := fault(path):
            raise CheckpointError(f"{path} is damaged: {'; '.join(wrong)}", "", "push a whole checkpoint")
        content = (path / _MANIFEST).read_bytes()
        manifest = Manifest.from_text(content.decode("ascii"), str(path))
        step = manifest.step
        if step in self.steps():
            if self._manifest_bytes(step) == content and self._has_files(manifest):
                return False
            if not replace:
                raise CheckpointError(
                    f"{self.url} has another checkpoint of step {step}",
                    "a checkpoint is replaced only when asked",
                    "pass --replace, or another URL",
                )
        with self._reaching("write to"):
            self._forget(step)
            self._fs.makedirs(self._at(step), exist_ok=True)
            for name, entry in manifest.files.items():
                with (path / name).open("rb") as source, self._fs.open(self._at(step, name), "wb") as target:
                    _copy(source.read, target, entry, name)
                self._fs.invalidate_cache()
                if self._fs.info(self._at(step, name))["size"] != entry["bytes"]:
                    raise OSError(f"{name} does not have the size that was written")
            self._fs.pipe_file(self._at(step, _MANIFEST), content)
        return True

    def _has_files(self, manifest: Manifest) -> bool:
        with self._reaching("look at"):
            for name, entry in manifest.files.items():
                file = self._at(manifest.step, name)
                if not self._fs.exists(file) or self._fs.info(file)["size"] != entry["bytes"]:
                    return False
        return True

    def pull(self, directory: Path, step: int | None, report: Callable[[str], None]) -> Path:
        """Copy a checkpoint into a local checkpoints directory; its path.

        Args:
            directory: such as "runs/name/checkpoints"; made if it is not there.
            step: which; None: the newest that arrives whole.
            report: is told of newer ones that do not.

        Raises:
            CheckpointError: when none arrives whole, or another one of its step is there.
        """
        steps = self.steps() if step is None else [step]
        for number in reversed(steps):
            try:
                return self._pull(directory, number)
            except _DamagedError as e:
                if step is not None:
                    raise
                report(f"CHECKPOINT DAMAGED: {e.got}; trying the one before it")
        raise CheckpointError(f"{self.url} holds no whole checkpoint", "", "check the URL")

    def _pull(self, directory: Path, step: int) -> Path:
        content = self._manifest_bytes(step)
        try:
            manifest = self._parsed(step, content)
        except CheckpointError as e:
            raise _DamagedError(e.got, e.rule, e.fix) from None
        final = Store(directory).path(step)
        if final.exists():
            if not fault(final) and (final / _MANIFEST).read_bytes() == content:
                return final
            raise CheckpointError(
                f"{final} is there, and is another or damaged", "nothing local is replaced", "move it away first"
            )
        temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
        try:
            temporary.mkdir(parents=True)
            for name, entry in manifest.files.items():
                self._fetch(step, name, entry, temporary / name)
            _write(temporary / _MANIFEST, content)
            sync(temporary)
            temporary.rename(final)
            sync(directory)
        except OSError as e:
            raise CheckpointError(
                f"{final} could not be written: {e.strerror or e}", "", "free space or check permissions"
            ) from e
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def _fetch(self, step: int, name: str, entry: dict[str, Any], to: Path) -> None:
        file = self._at(step, name)
        with self._reaching("read from"):
            if not self._fs.exists(file):
                raise _DamagedError(f"{self.url}/step-{step:08d}/{name} is missing")
            source = self._fs.open(file, "rb")
        with source, to.open("wb") as target:

            def read(size: int) -> bytes:
                with self._reaching("read from"):  # and not the writing here, whose errors are the local disk's
                    return bytes(source.read(size))

            _copy(read, target, entry, f"{self.url}/step-{step:08d}/{name}")
            target.flush()
            os.fsync(target.fileno())

    def delete(self, step: int) -> None:
        """Delete a step, the manifest first.

        Raises:
            CheckpointError: when it cannot be deleted, or is the only one.
        """
        if self.steps() == [step]:
            raise CheckpointError(
                f"step {step} is the only one in {self.url}", "the newest is kept", "delete it by hand"
            )
        with self._reaching("delete from"):
            self._forget(step)
            if self._fs.exists(self._at(step)):
                self._fs.rm(self._at(step), recursive=True)

    def _forget(self, step: int) -> None:
        if self._fs.exists(self._at(step, _MANIFEST)):
            self._fs.rm_file(self._at(step, _MANIFEST))


class _DamagedError(CheckpointError):
    """What is there is not what was written; an older one may be."""


def _copy(read: Callable[[int], bytes], target: IO[bytes], entry: dict[str, Any], name: str) -> None:
    """Copy as many bytes as there should be, and no more, and check their digest."""
    digest, size = hashlib.sha256(), 0
    while size < entry["bytes"] and (chunk := read(min(_CHUNK_BYTES, entry["bytes"] - size))):
        target.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    if size != entry["bytes"] or read(1):
        raise _DamagedError(
            f"{name} has {'more' if size == entry['bytes'] else size} bytes, {entry['bytes']} were written"
        )
    if digest.hexdigest() != entry["sha256"]:
        raise _DamagedError(f"{name} has other bytes than were written (sha256 differs)")


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())


def mirror(directory: Path, url: str, keep_last: int | None = None) -> list[int]:
    """Push the checkpoints of a local directory that the remote lacks, oldest first, then delete its oldest.

    Args:
        directory: a checkpoints directory; what is not whole in it is left.
        url: as for `Remote`.
        keep_last: how many the remote keeps, of those with a manifest; None: all.

    Returns:
        The steps that were pushed.

    Raises:
        CheckpointError: when one cannot be pushed.
    """
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"got keep_last={keep_last}", "the newest is kept", "pass 1 or more")
    remote = Remote(url)
    whole = [entry for entry in entries(directory) if entry.checkpoint is not None]
    if keep_last is not None:
        whole = whole[-keep_last:]
    pushed = [entry.step for entry in whole if remote.push(entry.path)]
    if keep_last is not None:
        for step in remote.steps()[:-keep_last]:
            remote.delete(step)
    return pushed

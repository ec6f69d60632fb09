"""Looking at checkpoints without loading them: which there are, whether they are whole, what they hold."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors

from samestep.checkpoint.storage import Checkpoint, Store, verify
from samestep.errors import CheckpointError

__all__ = [
    "Entry", "TensorInfo", "checkpoint_directory", "entries", "fault", "find", "meta_part", "outline", "tensor_infos",
]  # fmt: skip

_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 28
"""A manifest has some 200 bytes a tensor; one of 256 MiB is no manifest, and is not read into memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One directory under a checkpoint's name."""

    path: Path
    step: int
    num_bytes: int
    """Of the regular files in it."""
    fault: str | None
    """What is wrong with it; None if it is whole."""
    checkpoint: Checkpoint | None
    """None when its manifest cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    """As safetensors writes it, such as F32; for a dtype that safetensors lacks, as torch does."""
    shape: tuple[int, ...]
    num_bytes: int
    file: str
    same_as: str | None = None
    """The name that it is stored under, when it shares its memory with another."""


def checkpoint_directory(target: Path) -> Path:
    """Where the checkpoints of a run are.

    Args:
        target: a run's directory, or its checkpoints directory.

    Raises:
        CheckpointError: when `target` is neither.
    """
    if not target.exists():
        raise CheckpointError(f"{target} does not exist", "a run is a directory", "check the path")
    if not target.is_dir():
        raise CheckpointError(
            f"{target} is a file", "a run is a directory that holds checkpoints/", "pass the directory"
        )
    inner = target / "checkpoints"
    if inner.is_dir():
        return inner
    if Store(target).steps():
        return target
    raise CheckpointError(
        f"{target} holds no checkpoints directory",
        "a run that saved has checkpoints/step-<number>/ in its directory",
        "pass the directory that was given to samestep.Run, or one checkpoint's",
    )


def fault(path: Path, *, digests: bool = True) -> list[str]:
    """What is wrong with the checkpoint at `path`, each a file and a cause; nothing if it is whole.

    Stricter than reading it: links, pipes and devices are faults, even if what they lead to is right.

    Args:
        path: its directory.
        digests: read the files and compare their digests; without, their sizes only.
    """
    if path.is_symlink():
        return [f"{path.name} is a link to {path.readlink()}"]
    file = path / _MANIFEST
    try:
        mode = file.lstat()
    except OSError as e:
        return [f"{_MANIFEST}: {e.strerror}"]
    if not stat.S_ISREG(mode.st_mode):
        return [f"{_MANIFEST} is {_kind(file)}, not a file"]
    if mode.st_size > _MAX_MANIFEST_BYTES:
        return [f"{_MANIFEST} has {mode.st_size} bytes, more than a manifest can have"]
    try:
        manifest = Checkpoint.open(path).manifest
    except CheckpointError as e:
        return [e.got]
    odd = [_odd(path / name, entry["bytes"]) for name, entry in manifest.files.items()]
    if found := [text for text in odd if text]:
        return found
    return verify(path) if digests else []


def _odd(file: Path, expected: int) -> str | None:
    try:
        mode = file.lstat()
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as e:
        return f"{file.name} cannot be read: {e.strerror}"
    if not stat.S_ISREG(mode.st_mode):
        return f"{file.name} is {_kind(file)}, not a file"
    if mode.st_size != expected:
        return f"{file.name} has {mode.st_size} bytes, {expected} were written"
    return None


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"a link to {path.readlink()}"
    return "a directory" if stat.S_ISDIR(mode) else "a pipe, socket or device"


def entries(directory: Path, *, digests: bool = False, only: int | None = None) -> list[Entry]:
    """The checkpoints in a checkpoints directory, oldest first, whole or not.

    Args:
        directory: from `checkpoint_directory`.
        digests: as in `fault`.
        only: look at this step alone.
    """
    store = Store(directory)
    found = []
    for step in store.steps() if only is None else [only]:
        for path in (store.path(step), store.path(step).with_name(f"{store.path(step).name}.old")):
            if path.is_dir() or path.is_symlink():
                found.append(_entry(path, step, digests))
    return found


def _entry(path: Path, step: int, digests: bool) -> Entry:
    wrong = fault(path, digests=digests)
    checkpoint = None
    if not wrong:
        checkpoint = Checkpoint.open(path)
    sizes = [] if path.is_symlink() else [file.lstat().st_size for file in path.iterdir()]
    return Entry(path, step, sum(sizes), "; ".join(wrong) or None, checkpoint)


def find(target: Path, step: int | None = None) -> Checkpoint:
    """One whole checkpoint, sizes checked and digests not (loading it checks them).

    Args:
        target: a checkpoint's directory, or a run's.
        step: which of a run's; None: the newest that is whole.

    Raises:
        CheckpointError: when there is none, naming what is wrong with those that there are.
    """
    if (target / _MANIFEST).exists():
        if wrong := fault(target, digests=False):
            raise _damaged(target, wrong)
        return Checkpoint.open(target)
    directory = checkpoint_directory(target)
    known = entries(directory)
    if step is not None:
        known = [entry for entry in known if entry.step == step]
        if not known:
            steps = ", ".join(map(str, Store(directory).steps())) or "none"
            raise CheckpointError(f"{directory} has no step {step}", f"its steps are {steps}", "pass one of them")
    for entry in reversed(known):
        if entry.checkpoint is not None:
            return entry.checkpoint
    if known:
        raise _damaged(known[-1].path, [known[-1].fault or ""])
    raise CheckpointError(f"{directory} holds no checkpoint", "a run saves at the end of an epoch", "check the path")


def _damaged(path: Path, wrong: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {'; '.join(wrong)}",
        "sizes and digests are those of the manifest",
        "use another checkpoint",
    )


def tensor_infos(checkpoint: Checkpoint) -> list[TensorInfo]:
    """The checkpoint's tensors in the order of their names, from the files' headers.

    Raises:
        CheckpointError: when a file is no safetensors file, or lacks a tensor that the manifest names.
    """
    held: dict[str, TensorInfo] = {}
    with _understanding(checkpoint):
        special = dict(_special(checkpoint.manifest.state))
    for file in checkpoint.manifest.files:
        if not file.endswith(".safetensors"):
            continue
        try:
            with safetensors.safe_open(checkpoint.path / file, framework="pt", device="cpu") as content:
                for name in content.keys():  # noqa: SIM118 (it is no dict, and cannot be iterated)
                    part = content.get_slice(name)
                    info = _info(name, part.get_dtype(), tuple(part.get_shape()), file)
                    before = held[name].num_bytes if name in held else 0  # of a sharded tensor's other shards
                    info = dataclasses.replace(info, num_bytes=info.num_bytes + before)
                    held[name] = dataclasses.replace(info, **special.get(name, {}))
        except (OSError, safetensors.SafetensorError) as e:
            raise CheckpointError(
                f"{checkpoint.path / file} is not a safetensors file ({e})", "", "run samestep ckpt verify"
            ) from e
    for name, stored in checkpoint.manifest.aliases.items():
        if stored not in held:
            raise CheckpointError(f"{checkpoint.path} lacks the tensor {stored}", "", "run samestep ckpt verify")
        held[name] = dataclasses.replace(held[stored], name=name, same_as=stored)
    return [held[name] for name in sorted(held)]


def _info(name: str, dtype: str, shape: tuple[int, ...], file: str) -> TensorInfo:
    bits = int("".join(c for c in dtype.split("_")[0] if c.isdigit()) or 8)
    return TensorInfo(name, dtype, shape, math.prod(shape) * bits // 8, file)


def _special(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tensors whose dtype safetensors lacks, or that are sharded: the manifest says what their bytes are."""
    if isinstance(value, dict):
        if isinstance(value.get("$"), str) and isinstance(value.get("is"), str) and "dtype" in value:
            yield value["is"], {"dtype": str(value["dtype"]), "shape": tuple(value.get("shape", ()))}
        for item in value.values():
            yield from _special(item)
    elif isinstance(value, list):
        for item in value:
            yield from _special(item)


def outline(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's nested state with `TensorInfo` in place of tensors: {"model0": {...}, "optimizer0": {...}, ...}."""
    held = {info.name: info for info in tensor_infos(checkpoint)}
    with _understanding(checkpoint):
        state = _outline(checkpoint.manifest.state, held)
    return state if isinstance(state, dict) else {}


@contextlib.contextmanager
def _understanding(checkpoint: Checkpoint) -> Iterator[None]:
    """A manifest with a right digest may still hold what no version of samestep wrote."""
    try:
        yield
    except (TypeError, ValueError, KeyError, RecursionError) as e:
        raise CheckpointError(
            f"the state in {checkpoint.path / _MANIFEST} cannot be understood ({type(e).__name__}: {str(e)[:200]})",
            "it is what samestep.checkpoint.tree makes",
            "use another checkpoint",
        ) from None


def meta_part(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """A part of the manifest's meta that is a dict, such as "config"; empty if it is not there, or something else."""
    part = checkpoint.manifest.meta.get(name)
    return part if isinstance(part, dict) else {}


def _outline(value: Any, held: dict[str, TensorInfo]) -> Any:
    if isinstance(value, list):
        return [_outline(item, held) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {name: _outline(item, held) for name, item in value.items()}
    kind, content = value["$"], value.get("is", [])
    if kind in ("tensor", "array", "scalar", "sharded"):
        return held.get(str(content), content)
    if kind in ("dict", "counter"):
        return {name: _outline(item, held) for name, item in content}
    return _outline(content, held) if isinstance(content, list) else content

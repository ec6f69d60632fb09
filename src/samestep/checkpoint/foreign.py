"""Files written by torch.save, of other programs and for them: read without running code, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.storage import sync
from samestep.errors import CheckpointError

__all__ = ["read_torch_file", "write_torch_file"]

_MODEL = ("model_state_dict", "state_dict", "model")
_OPTIMIZER = ("optimizer_state_dict", "optimizer")


def read_torch_file(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The weights of a file that torch.save wrote, on `device` whatever device they were saved from.

    Understood: {"model_state_dict": ..., "optimizer_state_dict": ..., "epoch": ...}, {"state_dict": ...},
    {"model": ...}, and a bare state_dict. On the CPU the tensors are a private mapping of the file where its format
    allows that: do not overwrite the file in place while they are in use.

    Returns:
        {"model": {name: tensor}, "optimizer": the optimizer's state_dict or None, "epoch": int or None}. Dtypes are
        the file's.

    Raises:
        CheckpointError: when the file is missing, is not of torch.save, holds no weights, or needs code to be read.
    """
    file = Path(path)
    content = _load(file, device)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file} holds a {type(content).__name__}", "it should hold a dict of weights", _SAVE)
    key = next((key for key in _MODEL if isinstance(content.get(key), Mapping)), None)
    model = content if key is None else content[key]
    if not any(isinstance(value, torch.Tensor) for value in model.values()):
        raise CheckpointError(
            f"{file} holds no weights; it has {', '.join(map(str, [*content][:10])) or 'nothing'}",
            f"weights stand under {', '.join(_MODEL)}, or alone",
            _SAVE,
        )
    if key is None and (odd := [name for name, value in model.items() if not _is_weight(name, value)]):
        raise CheckpointError(
            f"{file} has {', '.join(map(str, odd[:10]))} beside tensors", "a bare state_dict holds tensors only", _SAVE
        )
    beside = {} if key is None else content
    epoch = beside.get("epoch")
    return {
        "model": dict(model),
        "optimizer": next((beside[name] for name in _OPTIMIZER if beside.get(name) is not None), None),
        "epoch": epoch if type(epoch) is int else None,
    }


_SAVE = "save it again where it was made, with torch.save({'model_state_dict': model.state_dict()}, path)"


def _is_weight(name: Any, value: Any) -> bool:
    return isinstance(value, torch.Tensor) or str(name).endswith("_extra_state")


def _load(file: Path, device: str | torch.device) -> Any:
    try:
        with file.open("rb"):
            mapped = zipfile.is_zipfile(file)  # the older format cannot be mapped
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}", "it is a file of torch.save", "check path") from None
    torch.empty(0, device=device)  # a device that cannot be used is no fault of the file
    try:
        return torch.load(file, map_location=torch.device(device), weights_only=True, mmap=mapped)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # on bytes that are no pickle, torch's reader fails in many ways
        needs = _classes(file, str(e)) if isinstance(e, pickle.UnpicklingError) else []
        if not needs:
            raise _not_torch(file, e) from e
        raise CheckpointError(
            f"{file} needs {', '.join(needs[:10])} to be read",
            "loading runs no code from a file, so it holds tensors, numbers, text, lists and dicts only",
            f"if you trust it, {_SAVE}",
        ) from None


def _not_torch(file: Path, cause: Exception) -> CheckpointError:
    first = (str(cause).splitlines() or [""])[0][:200]
    return CheckpointError(
        f"{file} ({file.stat().st_size} bytes) is damaged or not a file of torch.save ({type(cause).__name__}: {first})",
        "torch.save writes a zip archive",
        "copy it again, or name another file",
    )


def _classes(file: Path, message: str) -> list[str]:
    """What a file would import: all of it if torch can tell, else what its refusal names."""
    with contextlib.suppress(Exception):  # it only makes the message better
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return names
    return re.findall(r"GLOBAL ([\w.]+)", message)[:1]


def write_torch_file(
    path: str | Path,
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None = None,
    epoch: int | None = None,
) -> None:
    """Write {"epoch", "model_state_dict", "optimizer_state_dict"} with torch.save; a file at `path` is replaced at once.

    Raises:
        CheckpointError: when it cannot be written; a file that was there before is untouched.
    """
    final = Path(path)
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    content = {"epoch": epoch, "model_state_dict": dict(model_state), "optimizer_state_dict": optimizer_state}
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(final)
        sync(final.parent)
    except (OSError, RuntimeError) as e:
        raise CheckpointError(
            f"{final} could not be written: {_cause(e)}",
            "a file that was there before is untouched",
            "free space or check permissions, then save again",
        ) from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _cause(error: BaseException) -> str:
    """Of a failed write; torch's writer raises a RuntimeError of its own on the way out of the disk's error."""
    first = error
    while not isinstance(first, OSError) and first.__context__ is not None:
        first = first.__context__
    return str(getattr(first, "strerror", None) or error)

"""Files of other programs and for them (torch.save, safetensors): read without code, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from samestep.checkpoint.storage import sync
from samestep.checkpoint.tree import STORED_DTYPES, as_bytes
from samestep.errors import CheckpointError

__all__ = [
    "is_safetensors", "load_plain", "read_safetensors", "read_torch_file", "weights_of", "write_safetensors",
    "write_torch_file",
]  # fmt: skip

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
    return weights_of(load_plain(file, device), file)


def weights_of(content: Any, file: Path) -> dict[str, Any]:
    """The parts of what `load_plain` gave, as `read_torch_file` returns them; `file` is for messages."""
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
    _refuse_expanded(model, file)
    beside = {} if key is None else content
    epoch = beside.get("epoch")
    return {
        "model": dict(model),
        "optimizer": next((beside[name] for name in _OPTIMIZER if beside.get(name) is not None), None),
        "epoch": epoch if type(epoch) is int else None,
    }


def _refuse_expanded(model: Mapping[Any, Any], file: Path) -> None:
    """A view with strides of 0 takes no room in a file, and all of the memory when it is copied."""
    size = file.stat().st_size
    for name, value in model.items():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() * value.itemsize > size:
            raise CheckpointError(
                f"{file} ({size} bytes) has a tensor {str(name)[:100]} of {value.numel() * value.itemsize} bytes",
                "a tensor is not larger than its file",
                "save it with .contiguous() where it was made, if you trust it",
            )


_SAVE = "save it again where it was made, with torch.save({'model_state_dict': model.state_dict()}, path)"


def _is_weight(name: Any, value: Any) -> bool:
    return isinstance(value, torch.Tensor) or str(name).endswith("_extra_state")


def load_plain(file: Path, device: str | torch.device = "cpu") -> Any:
    """What torch.save wrote, if it is tensors, numbers, text, lists and dicts.

    Raises:
        CheckpointError: for anything else, and for a file that would take more memory than its size.
    """
    _check_regular(file)
    try:
        with file.open("rb"):
            mapped = zipfile.is_zipfile(file)  # the older format cannot be mapped
        if mapped:
            _refuse_compressed(file)
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


def _check_regular(file: Path) -> None:
    """A pipe would keep the reader waiting for ever."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise CheckpointError(f"{file} is a pipe, socket or device", "weights are read from files", "copy it to a file")


def _refuse_compressed(file: Path) -> None:
    """torch.save stores; a compressed entry of 1 kB may be 1 GB in memory."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except zipfile.BadZipFile as e:
        raise _not_torch(file, e) from None
    size = file.stat().st_size
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos) or sum(i.file_size for i in infos) > size:
        raise CheckpointError(
            f"{file} is a zip archive that unpacks to {sum(info.file_size for info in infos)} bytes from {size}",
            "torch.save does not compress",
            "if you trust it, unpack it and save it again with torch.save",
        )


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
    *,
    short_keys: bool = False,
) -> None:
    """Write {"epoch", "model_state_dict", "optimizer_state_dict"} with torch.save; a file at `path` is replaced at once.

    With `short_keys` they are called "epoch", "model" and "optimizer".

    Raises:
        CheckpointError: when it cannot be written; a file that was there before is untouched.
    """
    end = "" if short_keys else "_state_dict"
    content = {"epoch": epoch, f"model{end}": dict(model_state), f"optimizer{end}": optimizer_state}
    _write_whole(Path(path), lambda file: torch.save(content, file))


def _write_whole(final: Path, write: Callable[[Any], None]) -> None:
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
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


def is_safetensors(file: Path) -> bool:
    """Whether it begins as a safetensors file does: the header's length, and a JSON object."""
    try:
        with file.open("rb") as content:
            start = content.read(9)
    except OSError:
        return False
    return len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] <= file.stat().st_size


def read_safetensors(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, in memory of their own.

    Raises:
        CheckpointError: when it is missing, damaged, or something else. Headers over 100 MB are refused by safetensors.
    """
    file = Path(path)
    _check_regular(file)
    try:
        with safetensors.safe_open(file, framework="pt", device="cpu") as content:
            # a copy: a mapping does not outlive truncation or a lost network disk
            return {name: content.get_tensor(name).clone() for name in content.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, safetensors.SafetensorError) as e:
        raise CheckpointError(
            f"{file} is missing, damaged or no safetensors file ({e})", "", "copy it again, or name another file"
        ) from None


def write_safetensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; one that is at `path` is replaced at once. Tied weights are written under each name.

    Not by the package's own writers: one holds the file in memory twice, the other writes through a memory mapping, where
    a full disk is a bus error and not an exception.

    Raises:
        CheckpointError: when it cannot be written (a file that was there before is untouched), or for a dtype that
            safetensors lacks.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"{name} is of {tensor.dtype}", "a safetensors file holds other dtypes", "export to a .pt file"
            )
    _write_whole(Path(path), lambda file: file.writelines(_safetensors_chunks(tensors, metadata)))


def _safetensors_chunks(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[Any]:
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
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


def _cause(error: BaseException) -> str:
    """Of a failed write; torch's writer raises a RuntimeError of its own on the way out of the disk's error."""
    first = error
    while not isinstance(first, OSError) and first.__context__ is not None:
        first = first.__context__
    return str(getattr(first, "strerror", None) or error)

"""Nested state as JSON and tensors: what a checkpoint can hold, without pickle on the way in or out."""

from __future__ import annotations

import base64
import collections
import enum
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from samestep.errors import CheckpointError

__all__ = ["STORED_DTYPES", "as_bytes", "flatten", "unflatten"]

STORED_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""{dtype: its name in a safetensors file}. Tensors of another dtype are given as their bytes."""

_KIND = "$"  # a JSON object with this key stands for something that JSON lacks
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def flatten(state: Any, prefix: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Split nested state into a JSON value and its tensors by name.

    Held: None, bool, int, float (non-finite too), str, bytes, list, tuple, dict with str or int keys, Counter, strided
    tensors of any dtype on any device, numpy arrays and scalars of the dtypes torch has, torch.dtype. Subclasses of
    dict come back as dict, parameters as plain tensors. The tensors are not copied; each has a dtype of STORED_DTYPES.

    Args:
        state: what to split.
        prefix: begins the names of the tensors and the places in messages.

    Raises:
        CheckpointError: for anything else, naming its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        return _flatten(state, prefix, tensors), tensors
    except RecursionError:
        raise CheckpointError(
            f"{prefix or 'the state'} is nested too deeply, or holds itself", "a state is a tree", "leave out the cycle"
        ) from None


def _flatten(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        raise _refusal(
            value, where
        )  # they would come back as the plain value, and code that uses their names would fail
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return {_KIND: "bytes", "is": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic):
        return _flatten_tensor("array" if isinstance(value, np.ndarray) else "scalar", value, where, tensors)
    if isinstance(value, torch.Tensor):
        return _flatten_tensor("tensor", value, where, tensors)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "is": str(float(value))}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "is": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        items = [_flatten(item, f"{where}[{number}]", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "is": items}
    if isinstance(value, dict):
        return _flatten_dict(value, where, tensors)
    raise _refusal(value, where)


def _flatten_dict(value: dict[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> Any:
    items = []
    for name, item in value.items():
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise CheckpointError(
                f"{where or 'the state'} has the key {name!r}", "keys are text or whole numbers", "rename it"
            )
        items.append((name, _flatten(item, f"{where}.{name}" if where else str(name), tensors)))
    if isinstance(value, collections.Counter):
        return {_KIND: "counter", "is": [list(item) for item in items]}
    if all(isinstance(name, str) for name in value) and _KIND not in value:
        return dict(items)
    return {_KIND: "dict", "is": [list(item) for item in items]}


def _flatten_tensor(kind: str, value: Any, where: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    data = _from_numpy(value, where) if kind != "tensor" else value
    if (
        data.layout != torch.strided
        or data.is_quantized
        or data.is_meta
        or is_lazy(data)
        or is_traceable_wrapper_subclass(data)
    ):
        raise _refusal(value, where)
    data = data.detach().resolve_conj().resolve_neg()
    name = where.encode("utf-8", "backslashreplace").decode() or "tensor"
    while name in tensors or name == "__metadata__":  # {"a": {"b": t}, "a.b": u}; one name is the file's own
        name += "'"
    entry: dict[str, Any] = {_KIND: kind, "is": name}
    if data.dtype not in STORED_DTYPES:
        entry |= {"dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape)}
        data = as_bytes(data)
    tensors[name] = data
    return entry


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order as a uint8 vector, where they are; not copied if they are contiguous."""
    if not tensor.numel():  # its strides may be anything, and then torch refuses the view
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _from_numpy(value: Any, where: str) -> torch.Tensor:
    array = np.array(value, order="C")  # a copy: torch warns of arrays that cannot be written
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError:
        raise CheckpointError(
            f"{where or 'the state'} is a numpy {type(value).__name__} of dtype {array.dtype}",
            "a checkpoint holds the dtypes that torch has",
            "convert it, for example with .tolist()",
        ) from None


def _refusal(value: Any, where: str) -> CheckpointError:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        kind += f" ({value.layout}, {value.dtype}, on {value.device})"
    return CheckpointError(
        f"{where or 'the state'} is a {kind}",
        "a checkpoint holds dense tensors, numbers, text, and lists, tuples and dicts of them: no code runs on loading",
        "leave it out of state_dict(), or give it in one of these forms",
    )


def unflatten(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The nested state from `flatten`'s two parts. Tensors are those of `tensors`; arrays are on the CPU anyway.

    Raises:
        CheckpointError: for a value that flatten does not make, or a tensor that is not there.
    """
    try:
        return _unflatten(value, tensors)
    except (TypeError, ValueError, KeyError, RuntimeError, RecursionError) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(
            f"the checkpoint's state cannot be read ({type(e).__name__}: {e})",
            "the manifest names every tensor and kind it holds",
            "use an earlier checkpoint, or the version of samestep that wrote this one",
        ) from e


def _unflatten(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {name: _unflatten(item, tensors) for name, item in value.items()}
    kind, content = value[_KIND], value["is"]
    if kind in ("tensor", "array", "scalar"):
        tensor = tensors[content]
        if "dtype" in value:
            tensor = tensor.view(_DTYPES[value["dtype"]]).reshape(value["shape"])
        return tensor if kind == "tensor" else tensor.numpy(force=True)[() if kind == "scalar" else ...]
    if kind in ("dict", "counter"):
        pairs = {name: _unflatten(item, tensors) for name, item in content}
        return collections.Counter(pairs) if kind == "counter" else pairs
    if kind == "tuple":
        return tuple(_unflatten(item, tensors) for item in content)
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    raise ValueError(f"unknown kind {kind!r}")

"""Nested state as JSON and tensors: what a checkpoint can hold, without pickle on the way in or out."""

from __future__ import annotations

import base64
import collections
import math
from typing import Any, cast

import numpy as np
import torch

from samestep.errors import CheckpointError

__all__ = ["flatten", "unflatten"]

_KIND = "$"  # a JSON object with this key stands for something that JSON lacks


def flatten(state: Any, where: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Split nested state into a JSON value and its tensors by name.

    Held: None, bool, int, float (non-finite too), str, bytes, list, tuple, dict with str or int keys, Counter, tensors
    of any dtype, numpy arrays and scalars, torch.dtype. Subclasses of dict come back as dict.

    Raises:
        CheckpointError: for anything else, naming its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _flatten(state, where, tensors), tensors


def _flatten(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        tensors[where] = torch.from_numpy(np.ascontiguousarray(value).reshape(np.shape(value)))
        return {_KIND: "array" if isinstance(value, np.ndarray) else "scalar", "is": where}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "is": str(value)}
    if isinstance(value, torch.Tensor):
        tensors[where] = value.detach()
        return {_KIND: "tensor", "is": where}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "is": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "is": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [_flatten(item, f"{where}.{number}", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "is": items}
    if isinstance(value, dict):
        return _flatten_dict(value, where, tensors)
    raise CheckpointError(
        f"{where or 'the state'} is a {type(value).__name__}",
        "a checkpoint holds tensors, numbers, text, and lists, tuples and dicts of them: nothing that runs code on loading",
        "leave it out of state_dict(), or give it in one of these forms",
    )


def _flatten_dict(value: dict[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> Any:
    for name in value:
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise CheckpointError(f"{where} has the key {name!r}", "keys are text or whole numbers", "rename it")
    items = [(name, _flatten(item, f"{where}.{name}" if where else str(name), tensors)) for name, item in value.items()]
    if isinstance(value, collections.Counter):
        return {_KIND: "counter", "is": [list(item) for item in items]}
    if all(isinstance(name, str) for name in value) and _KIND not in value:
        return dict(items)
    return {_KIND: "dict", "is": [list(item) for item in items]}


def unflatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The nested state from `flatten`'s two parts.

    Raises:
        CheckpointError: for a value that flatten does not make.
    """
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {name: unflatten(item, tensors) for name, item in value.items()}
    kind, content = value[_KIND], value.get("is", "")
    content = cast(Any, content)
    if kind in ("tensor", "array", "scalar"):
        if content not in tensors:
            raise CheckpointError(f"tensor {content} is missing", "the manifest names it", "the checkpoint is damaged")
        tensor = tensors[content]
        return tensor if kind == "tensor" else tensor.numpy() if kind == "array" else tensor.numpy()[()]
    if kind in ("dict", "counter"):
        pairs = {name: unflatten(item, tensors) for name, item in content}
        return collections.Counter(pairs) if kind == "counter" else pairs
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in content)
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "dtype" and isinstance(getattr(torch, content, None), torch.dtype):
        return getattr(torch, content)
    if kind == "bytes":
        return base64.b64decode(content)
    raise CheckpointError(f"the manifest holds a {kind!r}", "this version does not know it", "update samestep")

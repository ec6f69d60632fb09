"""How two checkpoints differ: which tensors, by how much, and in which settings. Holds one pair of tensors at a time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import safetensors
import torch

from samestep.checkpoint.storage import Checkpoint
from samestep.checkpoint.survey import TensorInfo, fault, meta_part, outline, tensor_infos
from samestep.errors import CheckpointError

__all__ = ["CheckpointDifference", "TensorDifference", "compare"]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that is not the same to the bit."""

    name: str
    what: str
    """"only in A", "only in B", "shape", "dtype" or "values"."""
    a: str
    """Its dtype and shape; empty where it is not."""
    b: str
    num_elements: int = 0
    num_different: int = 0
    """Elements whose bits differ: NaN equals the same NaN, and 0.0 differs from -0.0."""
    absolute: float | None = None
    """The largest |a - b|, in float64; None where it has no meaning, NaN where one side alone is not finite."""
    relative: float | None = None
    """That, of the largest |a| or |b|."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """What `compare` found."""

    tensors: list[TensorDifference]
    num_same: int
    """Tensors that are the same to the bit."""
    settings: dict[str, tuple[Any, Any]]
    """{setting: (in A, in B)}: configuration, precision, number of ranks, loaders, versions."""
    values: dict[str, tuple[Any, Any]]
    """{place: (in A, in B)}: numbers and text of the state, such as counters and learning rates."""

    @property
    def same(self) -> bool:
        """Whether the states are the same; settings do not count."""
        return not self.tensors and not self.values


def compare(a: Checkpoint, b: Checkpoint) -> CheckpointDifference:
    """Compare two checkpoints.

    Raises:
        CheckpointError: when one is damaged: a difference would then say nothing.
    """
    for side in (a, b):
        if wrong := fault(side.path):
            raise CheckpointError(f"{side.path} is damaged: {'; '.join(wrong)}", "", "compare whole checkpoints")
        if side.manifest.meta.get("layout") == "sharded":
            raise CheckpointError(
                f"{side.path} is sharded", "whole tensors are compared", "export both, and compare the files"
            )
    ours, theirs = ({info.name: info for info in tensor_infos(side)} for side in (a, b))
    found, num_same = [], 0
    with contextlib.ExitStack() as stack:
        readers = [_Reader(side, stack) for side in (a, b)]
        for name in sorted(ours.keys() | theirs.keys()):
            difference = _tensor(name, ours.get(name), theirs.get(name), readers)
            num_same += difference is None
            if difference is not None:
                found.append(difference)
    return CheckpointDifference(found, num_same, _settings(a, b), _different(_values(a), _values(b)))


class _Reader:
    """A checkpoint's tensors, each read when asked for."""

    def __init__(self, checkpoint: Checkpoint, stack: contextlib.ExitStack) -> None:
        self._files: dict[str, Any] = {
            file: stack.enter_context(safetensors.safe_open(checkpoint.path / file, framework="pt", device="cpu"))
            for file in checkpoint.manifest.files
            if file.endswith(".safetensors")
        }

    def bytes(self, info: TensorInfo) -> torch.Tensor:
        """The tensor as it is stored."""
        tensor: torch.Tensor = self._files[info.file].get_tensor(info.same_as or info.name)
        return tensor


def _tensor(name: str, a: TensorInfo | None, b: TensorInfo | None, readers: list[_Reader]) -> TensorDifference | None:
    if a is None or b is None:
        return TensorDifference(name, "only in B" if a is None else "only in A", _kind(a), _kind(b))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return TensorDifference(name, "shape" if a.shape != b.shape else "dtype", _kind(a), _kind(b))
    left, right = (reader.bytes(info) for reader, info in zip(readers, (a, b), strict=True))
    size = left.element_size()
    different = (_raw(left, size) != _raw(right, size)).any(dim=1) if left.numel() else torch.zeros(0, dtype=torch.bool)
    num_different = int(different.sum())
    if not num_different:
        return None
    absolute, relative = _distance(left.reshape(-1)[different], right.reshape(-1)[different], left, right)
    return TensorDifference(name, "values", _kind(a), _kind(b), left.numel(), num_different, absolute, relative)


def _raw(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size)


def _distance(a: torch.Tensor, b: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    absolute = float((a.double() - b.double()).abs().max())
    size = max(float(left.double().abs().max()), float(right.double().abs().max()))
    return absolute, absolute / size if size else 0.0


def _kind(info: TensorInfo | None) -> str:
    return "" if info is None else f"{info.dtype} {list(info.shape)}"


def _settings(a: Checkpoint, b: Checkpoint) -> dict[str, tuple[Any, Any]]:
    sides = []
    for side in (a, b):
        meta = {name: value for name, value in side.manifest.meta.items() if name != "position"}
        meta["config"] = {name: value for name, value in meta_part(side, "config").items() if name != "directory"}
        sides.append(dict(_flat({**meta, "versions": side.manifest.versions}, "")))
    return _different(*sides)


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    place = {"position": checkpoint.manifest.meta.get("position"), "step": checkpoint.manifest.step}
    return dict(_flat({**place, **outline(checkpoint)}, ""))


def _flat(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of all that is no tensor, dict or list."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{where}.{key}" if where else str(key))
    elif not isinstance(value, TensorInfo):
        yield where, value


def _different(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    absent = "(absent)"
    pairs = {name: (a.get(name, absent), b.get(name, absent)) for name in [*a, *(b.keys() - a.keys())]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] or type(pair[0]) is not type(pair[1])}

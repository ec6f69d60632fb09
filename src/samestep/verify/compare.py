"""How far two sets of gradients are apart, and whether rounding can explain it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping

import torch

__all__ = ["ENVELOPE", "Difference", "against_reference", "by_envelope", "by_order_of_sums", "digest", "unit_roundoff"]

Tensors = Mapping[str, torch.Tensor]

ENVELOPE = 96.0
"""Of a 16-bit gradient against the fp32 one: |difference| <= ENVELOPE * u |sum of absolute micro-batch gradients|, as
2-norms over all parameters. Empirical: of 300 random small models none needed more than a third of it."""

_UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11, "fp32": 2.0**-24}


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Between two sets of named tensors."""

    equal: bool
    """Bitwise, names included."""
    relative: float
    """The largest |difference| of an element, divided by the largest element of the truth."""
    used: float
    """Share of the bound that the difference takes up; more than 1 is not rounding."""
    name: str
    """The tensor in which most of the bound is used up; "" when equal."""


_SAME = Difference(True, 0.0, 0.0, "")


def unit_roundoff(precision: str) -> float:
    """u of a precision's compute dtype: half the distance from 1 to the next larger number."""
    return _UNIT[precision]


def by_order_of_sums(mine: Tensors, truth: Tensors, sums: Tensors, leaves: int) -> Difference:
    """Compare sums of the same `leaves` terms, added in two orders.

    Each order is off by at most gamma * sum|x|, gamma = (n - 1) u / (1 - (n - 1) u), so the two are at most twice that
    apart, element by element. Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2.

    Args:
        mine, truth: gradients by parameter name, any shapes.
        sums: the sums of the terms' absolute values.
        leaves: number of terms n.
    """
    unlike = _unlike_names(mine, truth)
    if unlike is not None:
        return unlike
    top = max((float(g.abs().max()) for g in truth.values() if g.numel()), default=0.0)
    equal, relative, used, worst = True, 0.0, 0.0, ""
    for name, value in truth.items():
        if not value.numel() or torch.equal(mine[name], value):
            continue
        equal = False
        terms = (leaves - 1) * torch.finfo(value.dtype).eps / 2
        gap = (mine[name].double() - value.double()).abs()
        bound = 2 * terms / (1 - terms) * sums[name].double()
        part = _largest(gap / bound) if leaves > 1 else math.inf
        relative = max(relative, _largest(gap) / top if top else math.inf)
        if part > used or not worst:
            used, worst = part, name
    return Difference(equal, relative, used, worst)


def by_envelope(mine: Tensors, truth: Tensors, sums: Tensors, precision: str) -> Difference:
    """Compare gradients of a precision with those of fp32, by ENVELOPE. Arguments as `by_order_of_sums`."""
    unlike = _unlike_names(mine, truth)
    if unlike is not None:
        return unlike
    gaps = {name: float((mine[name].double() - value.double()).norm()) for name, value in truth.items()}
    scale = math.hypot(*(float(sums[name].double().norm()) for name in truth))
    gap = math.hypot(*gaps.values())
    if gap == 0:
        return _SAME
    relative = gap / scale if scale else math.inf
    if math.isnan(relative):
        relative = math.inf
    worst = max(gaps, key=lambda name: math.inf if math.isnan(gaps[name]) else gaps[name])
    return Difference(False, relative, relative / (ENVELOPE * unit_roundoff(precision)), worst)


def against_reference(mine: Tensors, truth: Tensors, tolerance: float) -> Difference:
    """Compare by |difference| <= tolerance * |truth|, as 2-norms over all tensors together.

    The name is that of the tensor with the largest difference relative to its own norm.
    """
    unlike = _unlike_names(mine, truth)
    if unlike is not None:
        return unlike
    if all(torch.equal(mine[name], value) for name, value in truth.items()):
        return _SAME
    gaps = {name: float((mine[name].double() - value.double()).norm()) for name, value in truth.items()}
    norms = {name: float(value.double().norm()) for name, value in truth.items()}
    scale, gap = math.hypot(*norms.values()), math.hypot(*gaps.values())
    relative = gap / scale if scale else math.inf
    if math.isnan(relative):
        relative = math.inf
    worst = max(gaps, key=lambda name: gaps[name] / (norms[name] + 1e-3 * scale + 1e-300))
    return Difference(False, relative, relative / tolerance, worst)


def digest(tensors: Tensors) -> str:
    """SHA-256 of names and bits."""
    total = hashlib.sha256()
    for name, value in tensors.items():
        total.update(name.encode())
        total.update(value.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()


def _unlike_names(mine: Tensors, truth: Tensors) -> Difference | None:
    """Infinitely far apart when a tensor is missing on one side, or has another shape."""
    names: Iterable[str] = [*truth, *mine]
    for name in names:
        if name not in mine or name not in truth or mine[name].shape != truth[name].shape:
            return Difference(False, math.inf, math.inf, name)
    return None


def _largest(values: torch.Tensor) -> float:
    """The largest element; 0/0 (equal where the bound is 0) counts as 0, NaN from a NaN gradient as infinite."""
    largest = float(torch.nan_to_num(values, nan=0.0, posinf=math.inf).max())
    return math.inf if bool(values.isnan().all()) else largest

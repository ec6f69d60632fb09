"""The end of an optimizer step: from summed, scaled gradients to updated (or untouched) weights, in one pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from samestep.errors import ConfigError, ModelError
from samestep.precision.scaler import LossScaler

__all__ = ["Number", "Outcome", "check_clip", "divide", "finish", "total_norm"]

Number = float | torch.Tensor
"""One number: a Python float on a CPU, a 0-d tensor on a GPU, where reading it would wait."""

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a finish decided. Tensors are 0-d and on the device: nothing here has waited for it."""

    grad_norm: Number
    """fp64: the 2-norm of the true gradient, before clipping; non-finite where the gradient is."""
    skipped: Number
    """fp32: 1 when the weights were left as they were, else 0."""
    overflow: Number
    """fp32: 1 when the gradients as they stood were not finite, else 0; what the loss scale is updated by."""
    params: list[torch.Tensor]
    """The parameters that have a gradient, each once."""
    norms: list[float] | list[torch.Tensor]
    """The 2-norm of each one's gradient as it stood: says later which one was not finite."""


def check_clip(clip_norm: float | None, clip_value: float | None) -> None:
    """Refuse limits that cannot be obeyed.

    Raises:
        ConfigError: for a limit that is not positive, or both at once.
    """
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if limit is not None and not limit > 0:
            raise ConfigError(f"got {name}={limit!r}", "a limit is a positive number", "pass None for no clipping")
    if clip_norm is not None and clip_value is not None:
        raise ConfigError("got clip_norm and clip_value", "one of them limits a step", "leave one out")


def finish(
    optimizers: Sequence[Optimizer],
    *,
    divisor: Number,
    loss: Number,
    scaler: LossScaler | None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> Outcome:
    """Unscale, average, clip, and step or skip.

    The gradients of all `optimizers` together are one vector: one norm, one decision. Unscaling, averaging and clipping
    are ONE factor; fused optimizers take it as `grad_scale` together with `found_inf` and read the gradients once.
    Others get a foreach multiply, and cost one host read of the decision. Gradients are equal on all ranks here, so
    the decision is too.

    Args:
        optimizers: what to step.
        divisor: the gradient is what stands in `.grad` divided by it (and by the loss scale). A float on the CPU, where
            all is decided on the host; or 0-d fp64 on the device, and then nothing waits for it.
        loss: alike; a non-finite one skips the update like a non-finite gradient.
        scaler: the loss scale in use. It is not updated here: a window has one update of it, however many finishes.
        clip_norm: largest 2-norm of the true gradient, or None. Source: Pascanu et al., "On the difficulty of training
            recurrent neural networks", ICML 2013.
        clip_value: largest absolute value of an element of the true gradient, or None.
    """
    params = _with_gradients(optimizers)
    values = [grad._values() if grad.is_sparse else grad for param in params if (grad := param.grad) is not None]
    scaled_norm, norms = total_norm(values, divisor)
    denominator = divisor
    if scaler is not None:
        denominator = divisor * (scaler.scale if isinstance(divisor, torch.Tensor) else float(scaler.scale))
    # A zero total weight gives 0/0 here: there is nothing to learn from such a window, so it is skipped too.
    grad_norm = divide(scaled_norm, denominator)
    skipped = _nonfinite(grad_norm + loss)
    if clip_norm is not None:
        denominator = denominator * _at_least_one((grad_norm + _CLIP_EPSILON) / clip_norm)
    if clip_value is not None and not (isinstance(skipped, float) and skipped):
        torch._foreach_div_(values, denominator.float() if isinstance(denominator, torch.Tensor) else denominator)
        torch._foreach_clamp_max_(values, clip_value)
        torch._foreach_clamp_min_(values, -clip_value)
        denominator = denominator / denominator
    if isinstance(skipped, torch.Tensor):
        assert isinstance(denominator, torch.Tensor)
        _step(optimizers, values, denominator.float(), skipped)
    elif not skipped:
        _step_on_host(optimizers, values, float(denominator))
    return Outcome(grad_norm, skipped, skipped if scaler is None else _nonfinite(scaled_norm), params, norms)


def divide(a: Number, b: Number) -> Number:
    """a / b, and NaN for b = 0 on the host, where Python would raise."""
    return a / b if isinstance(b, torch.Tensor) or b else math.nan


def _nonfinite(number: Number) -> Number:
    """1 for NaN and infinity, else 0. On a device x * 0 is NaN for both; torch.isfinite costs three times as much."""
    if not isinstance(number, torch.Tensor):
        return 0.0 if math.isfinite(number) else 1.0
    zero = number * 0
    return zero.ne(zero).float()


def _at_least_one(number: Number) -> Number:
    return number.clamp(min=1.0) if isinstance(number, torch.Tensor) else max(number, 1.0)


def total_norm(grads: list[torch.Tensor], like: Number) -> tuple[Number, list[Any]]:
    """The 2-norm of all gradients as one vector, in fp64, non-finite only if an element is; and that of each.

    Squares of finite fp32 numbers can overflow fp32 (from about 1e19). CUDA sums in fp64 at the speed of memory; the
    CPU sums in fp32, which is several times faster, and again in fp64 if the result is not finite.

    Args:
        grads: dense, on one device.
        like: a float for host numbers, or a 0-d tensor for numbers on its device.
    """
    if isinstance(like, torch.Tensor):
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=like.device), []
        norms = torch._foreach_norm(grads, 2, dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(norms)), list(norms)
    if not grads:
        return 0.0, []
    numbers = _host_norms(torch._foreach_norm(grads))
    if not math.isfinite(total := math.hypot(*numbers)):
        numbers = _host_norms(torch._foreach_norm(grads, 2, dtype=torch.float64))
        total = math.hypot(*numbers)
    return total, numbers


def _host_norms(norms: Sequence[torch.Tensor]) -> list[float]:
    if len(norms) < 16:
        return [norm.item() for norm in norms]
    numbers: list[float] = torch.stack(list(norms)).tolist()
    return numbers


def _with_gradients(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Each distinct parameter once; sparse gradients with duplicate rows summed, so that norms and limits are true."""
    params: list[torch.Tensor] = []
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None or id(param) in seen:
                    continue
                seen.add(id(param))
                if param.grad.is_sparse:
                    param.grad = param.grad.coalesce()
                params.append(param)
    return params


def _step_on_host(optimizers: Sequence[Optimizer], values: list[torch.Tensor], denominator: float) -> None:
    """Divide and step, where it is known that the gradients are finite."""
    if denominator == 1.0 or not all(_takes_scale(optimizer) for optimizer in optimizers):
        if denominator != 1.0:
            torch._foreach_div_(values, denominator)
        for optimizer in optimizers:
            optimizer.step()
        return
    grad_scale = torch.tensor(denominator)
    for optimizer in optimizers:
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]


def _step(
    optimizers: Sequence[Optimizer], values: list[torch.Tensor], grad_scale: torch.Tensor, skipped: torch.Tensor
) -> None:
    """Divide and step, or not, as the device decides."""
    fused = [optimizer for optimizer in optimizers if _takes_scale(optimizer)]
    for optimizer in fused:
        if _first_step_is_special(optimizer) and bool(skipped):
            continue
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    others = [optimizer for optimizer in optimizers if not _takes_scale(optimizer)]
    if not others or bool(skipped):
        return
    if fused:
        # The fused kernels have divided their own gradients in place; only the rest is left to divide.
        grads = [param.grad for param in _with_gradients(others)]
        values = [grad._values() if grad.is_sparse else grad for grad in grads if grad is not None]
    torch._foreach_div_(values, grad_scale)
    for optimizer in others:
        optimizer.step()


def _takes_scale(optimizer: Optimizer) -> bool:
    """True for torch's fused Adam, AdamW, SGD and Adagrad: their kernels take `grad_scale` and `found_inf`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def _first_step_is_special(optimizer: Optimizer) -> bool:
    """True when a skipped step would spoil state: fused SGD fills a missing momentum buffer even under found_inf."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(
        group["momentum"] and optimizer.state[param].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that cannot take part in a window.

    Raises:
        ConfigError: for one that needs a closure.
        ModelError: for one without parameters that train.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "got an LBFGS optimizer",
            "a window computes its gradient once, and LBFGS needs to compute it again through a closure",
            "use another optimizer",
        )
    if not any(param.requires_grad for group in optimizer.param_groups for param in group["params"]):
        raise ModelError(
            f"got a {type(optimizer).__name__} without a parameter that requires a gradient",
            "an optimizer steps at least one",
            "unfreeze a parameter or leave the optimizer out",
        )

"""The rules of a window, checked where they are broken: each message says what was got, the rule, and what to change."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import torch

from samestep.errors import ModelError, NonFiniteError, WindowError

if TYPE_CHECKING:
    from samestep.train.window import Window

__all__ = ["check_loss", "check_step", "checked_weight"]


def check_loss(window: Window, loss: torch.Tensor, reduction: str) -> int:
    """The place in the share of the micro-batch that `loss` belongs to.

    Raises:
        WindowError: outside a micro-batch, twice in one, or for a loss that is not one number with a gradient.
        ModelError: for a loss computed past the prepared model.
    """
    k = window.current
    if k is None:
        raise WindowError(
            "window.backward outside a micro-batch",
            "backward belongs into the loop over the window",
            "for batch in window: window.backward(...)",
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.ndim > 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
        raise WindowError(f"got a loss of {got}", "a loss is one number", "reduce it: loss.mean() or loss.sum()")
    if not loss.requires_grad:
        raise WindowError(
            "got a loss without a gradient",
            "a loss is computed from the prepared model's output with gradients on",
            "look for .detach(), .item(), torch.no_grad() or frozen parameters on the way",
        )
    if window.had_backward(k):
        raise WindowError(
            "a second backward in one micro-batch", "a micro-batch has one", "add the losses and call it once"
        )
    agreed = window.engine.reduction
    if reduction not in ("mean", "sum") or agreed not in (None, reduction):
        raise WindowError(
            f"got reduction={reduction!r}" + (f" in a run that began with {agreed!r}" if agreed else ""),
            "it is 'mean' or 'sum', the same in the whole run",
            "pass one of them",
        )
    if window.forwards() == window.forwards_before:
        raise ModelError(
            "the loss was computed past the prepared model",
            "only a forward of what run.prepare returned has the run's precision and exchanges gradients",
            "call model(...), not model.module(...), the original module, or another of its methods",
        )
    return k


def checked_weight(window: Window, weight: float | torch.Tensor) -> float | torch.Tensor:
    """`weight` as a float, or as a 0-d fp64 tensor when it is on a GPU (reading it would wait for the device).

    Raises:
        WindowError: for a tensor of more than one number.
        NonFiniteError: for NaN, infinity or a negative number.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise WindowError(f"got a weight of shape {tuple(weight.shape)}", "a weight is one number", "sum it")
        weight = weight.detach().reshape(())
        if weight.device.type == "cuda":
            return weight.double()
        weight = float(weight)
    given: Any = weight  # annotations do not stop a caller from passing text
    if not isinstance(given, numbers.Real) or not math.isfinite(weight) or weight < 0:
        place = f"micro-batch {window.share[window.current or 0]} of window {window.number}, epoch {window.epoch}"
        raise NonFiniteError(
            f"got weight={weight!r} in {place}",
            "a weight is a finite number, 0 or more",
            "count the terms that the loss is the mean of",
        )
    return float(weight)


def check_step(window: Window) -> None:
    """Refuse a step that has nothing to finish, or would spoil what comes next.

    Raises:
        WindowError: without a backward although this rank has micro-batches, twice, or inside an open autocast.
    """
    if window.closed or not window.phase_open:
        raise WindowError(
            "window.step() for the second time" if window.closed else "window.step() before the loop over the window",
            "a step finishes the micro-batches before it, once",
            "for batch in window: window.backward(...); then window.step()",
        )
    if window.share and not window.backwards:
        raise WindowError(
            "window.step() without window.backward()",
            f"this rank has {len(window.share)} micro-batch(es) in window {window.number}",
            "call window.backward for each, or leave the whole window out on all ranks",
        )
    if torch.is_autocast_enabled(window.engine.device.type):
        raise WindowError(
            "window.step() inside an open autocast",
            "autocast caches 16-bit copies of the weights, which the step makes stale",
            "close the autocast context before step",
        )

"""Which parameter, micro-batch, rank and samples a non-finite window is to be blamed on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from samestep.distributed.collectives import gather_json
from samestep.distributed.process_group import World
from samestep.optim.finish import Outcome
from samestep.train.prepared import Prepared, unwrap

__all__ = ["Finder", "Suspects", "all_finite", "explain"]


@dataclasses.dataclass(slots=True)
class Suspects:
    """What a window leaves behind for the case that it was not finite."""

    bounds: list[int]
    """Rank r had the micro-batches [bounds[r], bounds[r + 1])."""
    outcomes: list[Outcome]
    locate: Callable[[int], tuple[int, list[int]] | None]
    """A micro-batch's first position in the epoch and its sample indices; None when they have none."""


def explain(models: list[Prepared], suspects: Suspects, losses: dict[int, float]) -> str:
    """In words: the micro-batches without a finite loss, or else the first parameter without a finite gradient.

    Args:
        models: the prepared ones.
        suspects: what the window left.
        losses: {micro-batch: its loss}, those that are not finite.
    """
    if losses:
        place = "; ".join(_blame(suspects, number, loss) for number, loss in list(losses.items())[:3])
        more = f"; and in {len(losses) - 3} more" if len(losses) > 3 else ""
        return f"{place}{more}"
    names = {
        id(param): f"{number}:{name}" if len(models) > 1 else name
        for number, model in enumerate(models)
        for name, param in unwrap(model.module).named_parameters()
    }
    params = [param for outcome in suspects.outcomes for param in outcome.params]
    norms = [norm for outcome in suspects.outcomes for norm in outcome.norms]
    bad = [names.get(id(param), "?") for param, norm in zip(params, norms, strict=True) if not math.isfinite(norm)]
    if not bad:
        return "each loss and gradient is finite, their mean is not"
    return f"the gradient of {bad[0]} is not finite ({len(bad)} of {len(params)} parameters), though each loss is"


def _blame(suspects: Suspects, number: int, loss: float) -> str:
    bounds = suspects.bounds
    rank = next(r for r in range(len(bounds) - 1) if bounds[r] <= number < bounds[r + 1])
    where = f"loss {loss} in micro-batch {number} on rank {rank}"
    found = suspects.locate(number)
    if found is None:
        return where
    start, samples = found
    shown = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    return f"{where}: samples {shown} (positions {start} to {start + len(samples) - 1} of the epoch)"


class Finder:
    """Watches one window's forwards and backwards for the first module whose output or gradient is not finite.

    It looks at each output on the host, so a watched window is slow.

    Args:
        models: the prepared ones.
    """

    def __init__(self, models: list[Prepared]) -> None:
        self.micro_batch = 0
        self.found: list[str] = []
        self._handles = []
        for number, model in enumerate(models):
            prefix = f"{number}:" if len(models) > 1 else ""
            for name, module in unwrap(model.module).named_modules():
                label = f"{prefix}{name or 'the model'} ({type(module).__name__})"
                self._handles.append(module.register_forward_hook(self._forward(label)))

    def _forward(self, label: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            # Inner modules come before the ones that hold them, so the first note is the closest one.
            clean = all_finite(given)
            for tensor in _tensors(output):
                if not all_finite(tensor):
                    self._note(f"the output of {label} is not finite", "" if clean else ", nor is its input")
                elif tensor.requires_grad:
                    tensor.register_hook(self._backward(label))  # type: ignore[no-untyped-call]

        return hook

    def _backward(self, label: str) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            if not all_finite(grad):
                self._note(f"the gradient that comes back to {label} is not finite", "")

        return hook

    def _note(self, what: str, more: str) -> None:
        place = f"in micro-batch {self.micro_batch} "
        if not any(note.startswith(place) for note in self.found):
            self.found.append(f"{place}{what}{more}")

    def verdict(self, world: World) -> list[str]:
        """What all ranks found, one line a micro-batch; ends the watching. A collective."""
        for handle in self._handles:
            handle.remove()
        everyone = gather_json(world, "non-finite modules", self.found)
        return [f"on rank {rank} {note}" for rank, notes in enumerate(everyone) for note in notes]


def all_finite(value: Any) -> bool:
    """Whether no floating-point tensor in a nest of them has NaN or infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

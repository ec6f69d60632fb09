"""Buffers that training changes (BatchNorm's statistics): the same on all ranks, and the same for any number of ranks.

Each micro-batch of a window starts from the window's opening buffers; the window closes with the weighted mean of what
its micro-batches left. So a buffer is a function of the grid, as a gradient is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.distributed.collectives import sum_in_place
from samestep.distributed.process_group import World
from samestep.errors import ConfigError, ModelError

__all__ = ["BufferRule", "Buffers"]

BufferRule = Literal["mean", "last"] | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""How a buffer closes: the weighted mean, what the last micro-batch left, or f(values (M, ...), weights (M,))."""


class _Slot:
    """One buffer and its rule."""

    def __init__(self, owner: nn.Module, attribute: str, name: str, rule: BufferRule) -> None:
        self.owner, self.attribute, self.name, self.rule = owner, attribute, name, rule

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self.owner._buffers[self.attribute]
        assert tensor is not None
        return tensor


class Buffers:
    """The changing buffers of the prepared models.

    Args:
        world: the ranks.
        modules: the user's own modules (not their wrappers).
        rules: {buffer name: rule} for buffers of other modules than torch's own normalisation layers.
    """

    def __init__(self, world: World, modules: list[nn.Module], rules: Mapping[str, BufferRule] | None = None) -> None:
        self._world = world
        self._slots: list[_Slot] = []
        self._watched: list[_Slot] = []
        rules = dict(rules or {})
        for name, rule in rules.items():
            if rule not in ("mean", "last") and not callable(rule):
                raise ConfigError(
                    f"got buffers={{{name!r}: {rule!r}}}",
                    "a rule is 'mean', 'last', or a function of (values, weights)",
                    "pass one of them",
                )
        for module in modules:
            for prefix, owner in module.named_modules():
                kept = (b for b in owner._buffers if b not in owner._non_persistent_buffers_set)
                for attribute in (b for b in kept if owner._buffers[b] is not None):
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    if name in rules or isinstance(owner, _NormBase):
                        self._slots.append(_Slot(owner, attribute, name, rules.pop(name, "mean")))
                    else:
                        self._watched.append(_Slot(owner, attribute, name, "last"))
        if rules:
            raise ConfigError(
                f"got buffers={{{next(iter(rules))!r}: ...}}",
                "there is no such persistent buffer",
                "see named_buffers()",
            )
        self._versions: list[tuple[int, int]] = []
        self._opening: list[torch.Tensor] = []
        self._rows: dict[int, torch.Tensor] = {}

    def open(self) -> None:
        """Remember the window's opening values."""
        if self._watched:
            self._versions = [(id(slot.tensor), slot.tensor._version) for slot in self._watched]
        if self._slots:
            self._opening = [slot.tensor.detach().clone() for slot in self._slots]
            self._rows = {}

    @torch.no_grad()
    def leave(self, micro_batch: int, keep: bool) -> None:
        """Keep what `micro_batch` left (after its backward), if it counts, and go back to the opening values."""
        if not self._slots:
            return
        if keep:
            changes = [slot.tensor.double() - opening for slot, opening in zip(self._slots, self._opening, strict=True)]
            self._rows[micro_batch] = torch.cat([change.reshape(-1) for change in changes])
        for slot, opening in zip(self._slots, self._opening, strict=True):
            slot.tensor.copy_(opening)

    @torch.no_grad()
    def close(self, num_micro_batches: int, weights: list[float] | torch.Tensor, skipped: float | torch.Tensor) -> None:
        """Set the closing values from what all micro-batches of all ranks left.

        Args:
            num_micro_batches: M of this window.
            weights: the micro-batches' weights: M numbers, or fp64 on a GPU.
            skipped: 0-d on a GPU; where it is 1 the opening values stay: a skipped window leaves no trace.

        Raises:
            ModelError: when a buffer without a rule changed.
        """
        self._refuse_unruled()
        if not self._slots or (not isinstance(skipped, torch.Tensor) and skipped):
            return
        weights = torch.as_tensor(weights, dtype=torch.float64)
        width = sum(opening.numel() for opening in self._opening)
        # Each row is written by one rank and zero on the others, so the sum has the same bits on any number of ranks.
        rows = torch.zeros(num_micro_batches, width, dtype=torch.float64, device=weights.device)
        for micro_batch, row in self._rows.items():
            rows[micro_batch] = row
        sum_in_place(self._world, rows)
        start = 0
        for slot, opening in zip(self._slots, self._opening, strict=True):
            changes = rows[:, start : start + opening.numel()].reshape(num_micro_batches, *opening.shape)
            start += opening.numel()
            closing = _closing(slot.rule, opening, changes, weights)
            if isinstance(skipped, torch.Tensor):
                closing = torch.where(skipped > 0, opening.double(), closing)
            slot.tensor.copy_(closing)

    def _refuse_unruled(self) -> None:
        for slot, before in zip(self._watched, self._versions, strict=True):
            if (id(slot.tensor), slot.tensor._version) != before:
                raise ModelError(
                    f"buffer {slot.name} changed during a window",
                    "only the statistics of torch's normalisation layers have a rule for meeting over micro-batches",
                    f"pass prepare(..., buffers={{{slot.name!r}: 'mean'}}) or 'last', or a function of (values, weights)",
                )


def _closing(rule: BufferRule, opening: torch.Tensor, changes: torch.Tensor, weights: torch.Tensor) -> Any:
    """Integers (num_batches_tracked) count the window as one update; one micro-batch is taken as it is."""
    if callable(rule):
        return rule(opening + changes, weights)
    if rule == "last" or len(changes) == 1:
        return opening.double() + changes[-1]
    if not opening.is_floating_point():
        return opening + changes.amax(0)
    shares = weights / weights.sum()
    return opening.double() + torch.tensordot(shares, changes, 1)

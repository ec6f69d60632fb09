"""torchmetrics objects, reduced over ranks from their states, so that an AUC is that of all samples.

torchmetrics' own reduction needs every rank to have had a batch; an evaluation with fewer samples than ranks has not.
"""

from __future__ import annotations

from typing import Any

import torch

from samestep.distributed.collectives import gather_json, gather_tensors
from samestep.distributed.process_group import World

__all__ = ["compute", "is_metric"]


def is_metric(value: Any) -> bool:
    """Whether `value` is a torchmetrics Metric or MetricCollection."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "update", None))


def compute(world: World, metric: Any) -> Any:
    """The metric's value over all ranks' samples; the metric itself is left as it is. A collective.

    Returns:
        What its `compute` returns: a number, a tensor, or a dict of them.
    """
    if hasattr(metric, "items"):  # a MetricCollection
        return {name: compute(world, member) for name, member in metric.items()}
    merged = metric.clone()
    merged.sync_on_compute = False
    merged._computed = None
    merged._update_count = sum(gather_json(world, "metric updates", metric._update_count))
    for name, state in metric.metric_state.items():
        setattr(merged, name, _merged(world, state, metric._reductions[name]))
    return merged.compute()


def _merged(world: World, state: Any, reduction: Any) -> Any:
    """One state of all ranks: lists are joined in rank order, tensors stacked and reduced as the metric says."""
    if isinstance(state, list):
        mine = torch.cat([part.reshape(-1) if part.ndim == 0 else part for part in state]) if state else torch.empty(0)
        return [part.to(mine.device) for part in gather_tensors(world, mine) if len(part)]
    everyone = torch.stack(gather_tensors(world, state))
    if reduction is not None:
        return reduction(everyone)
    return everyone if world.size > 1 else state

"""Losses over the whole global batch (in-batch negatives), which are no mean over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from samestep.distributed.collectives import gather_tensors
from samestep.errors import WindowError
from samestep.train.engine import Engine

if TYPE_CHECKING:
    from samestep.train.window import Window

__all__ = ["gather", "global_batch"]


def gather(engine: Engine, rows: torch.Tensor) -> torch.Tensor:
    """See `Run.gather`."""
    window = engine.window
    if window is None or window.current is None:
        raise WindowError(
            "run.gather outside a micro-batch", "it gathers the embeddings of an open window's global batch"
        )
    sizes = [stop - start for start, stop in zip(window.bounds, window.bounds[1:], strict=False)]
    if set(sizes) != {1}:
        raise WindowError(
            f"run.gather in a window where the ranks have {sizes} micro-batches",
            "gathered embeddings are the whole global batch only while each rank has exactly one",
            "use window.global_batch(embed, loss), or micro_batch_size = batch_size / ranks with drop_last=True",
        )
    window.gathered = True
    everyone = gather_tensors(engine.world, rows)
    counts = [len(other) for other in everyone]
    gathered: torch.Tensor = _Rows.apply(rows, counts, engine.world.rank, everyone)  # type: ignore[no-untyped-call]
    return gathered


class _Rows(torch.autograd.Function):
    """All ranks' rows; backward keeps the own rows' gradient, times the number of ranks.

    Each rank computes the same loss from the same rows, and the window takes the mean over ranks: the sum over ranks of
    what their own rows contribute is the whole gradient, and the factor undoes the mean.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts: list[int], rank: int, everyone: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.start, ctx.stop, ctx.ranks = sum(counts[:rank]), sum(counts[: rank + 1]), len(counts)
        return torch.cat(everyone)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grads[0][ctx.start : ctx.stop] * ctx.ranks, None, None, None


def global_batch(
    window: Window, embed: Callable[[Any], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """See `Window.global_batch`.

    Embed all micro-batches without gradients, compute the loss once over all rows and its gradient with respect to them,
    then embed again with the same random numbers and hand each micro-batch its rows' gradient. Source: Gao, Zhang, Han,
    Callan, "Scaling deep contrastive learning batch size under memory limited setup" (GradCache), RepL4NLP 2021.
    """
    engine = window.engine
    rows = window.embedded(embed)
    mine = torch.cat(rows) if rows else torch.empty(0, device=engine.device)
    everyone = gather_tensors(engine.world, mine)
    whole = torch.cat([part for part in everyone if len(part)]).requires_grad_()
    value = loss(whole)
    (gradient,) = torch.autograd.grad(value, whole)
    start = sum(len(part) for part in everyone[: engine.world.rank])
    for batch in window.again():
        part = embed(batch)
        own = gradient[start : start + len(part)]
        start += len(part)
        # The window takes the mean of its micro-batches, and the whole gradient is their sum.
        window.backward_as((part * own).sum() * window.bounds[-1], value.detach())
    return value.detach()

"""Small models and loops that the cases share; all functions a rank runs are at module level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep


class Weight(nn.Module):
    """`w * x`, one weight that starts at the given value: the gradient of its mean is the mean of x."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(value)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def quiet_run(directory: Any = None, **settings: Any) -> samestep.Run:
    """A run in fp32 without progress."""
    return samestep.Run(directory, **{"precision": "fp32", "progress": False, **settings})


def train_weight(
    values: list[float],
    batch_size: int,
    micro_batch_size: int | None = None,
    *,
    lr: float = 0.1,
    epochs: int = 1,
    reduction: str = "mean",
    loader: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    after_step: Callable[[Any, Any], None] | None = None,
) -> dict[str, Any]:
    """Train `Weight` with SGD on loss = w * x; the weight, and the records of all windows."""
    records: list[Any] = []
    with quiet_run(**(run or {})) as r:
        net = Weight()
        model, _ = r.prepare(net, torch.optim.SGD(net.parameters(), lr=lr))
        train = r.loader(
            torch.tensor(values), batch_size=batch_size, micro_batch_size=micro_batch_size, **(loader or {})
        )
        r._engine.on_record.append(records.append)
        for _ in r.epochs(epochs):
            for window in train:
                for (x,) in window:
                    out = model(x)
                    window.backward(out.sum() if reduction == "sum" else out.mean(), reduction=reduction)
                window.step()
        return {"w": net.w.item(), "records": records, "updates": r.updates, "skips": r.skips}

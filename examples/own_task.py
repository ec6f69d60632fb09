"""A task of your own: five methods, and the command line gives it ranks, precisions, checkpoints, restarts, a ledger.

    samestep train examples/own_task.py:MyTask --nproc 2 --precision bf16 --run-dir runs/mine
    samestep plan examples/own_task.py:MyTask --nproc 2

It finds the centre of the ink, a regression: two numbers for an image.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from samestep import Task


class MyTask(Task):
    """The centre of a digit's ink, as (row, column) in [-1, 1]."""

    epochs = 5
    batch_size = 64
    micro_batch_size = 16
    learning_rate = 5e-3
    goal = ("close", 0.9)

    def model(self) -> nn.Module:
        """fp32 (N, 64) to (N, 2)."""
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def data(self) -> tuple[Any, Any]:
        """(training set, validation set) as tensors; any dataset with indices or stream will do."""
        images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
        places = torch.linspace(-1, 1, 8)
        ink = images.sum((1, 2))
        rows = (images.sum(2) * places).sum(1) / ink
        columns = (images.sum(1) * places).sum(1) / ink
        centres = torch.stack([rows, columns], 1) * 4
        held_out = torch.arange(len(images)) % 5 == 0
        inputs = images.flatten(1)
        return (inputs[~held_out], centres[~held_out]), (inputs[held_out], centres[held_out])

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        """(mean over the samples, how many)."""
        inputs, centres = batch
        return F.smooth_l1_loss(model(inputs), centres), len(inputs)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        """The share of images whose centre is found to within 0.2."""
        inputs, centres = batch
        distance = (model(inputs) - centres).norm(dim=1)
        return {"close": ((distance < 0.2).double().mean(), len(inputs)), "distance": (distance.mean(), len(inputs))}

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        """Optional: without it AdamW, fused. The schedule may be overridden as well."""
        return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=1e-4, fused=True)

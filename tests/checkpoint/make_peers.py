"""Write checkpoints with Accelerate and Lightning themselves; run in a process of its own, whose warnings are theirs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def data() -> Any:
    x = torch.arange(32.0).reshape(8, 4)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.arange(8) % 2), batch_size=4)


def accelerate(directory: Path, safe: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, data(), schedule)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(str(directory), safe_serialization=safe)


def lightning(file: Path) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=file.parent, **quiet)
    trainer.fit(Module(3), data())
    trainer.save_checkpoint(file)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    out = Path(sys.argv[2])
    {
        "accelerate": lambda: accelerate(out, True),
        "accelerate-bin": lambda: accelerate(out, False),
        "lightning": lambda: lightning(out),
    }[sys.argv[1]]()

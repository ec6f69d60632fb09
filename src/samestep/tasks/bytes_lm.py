"""A byte-level language model on the Python standard library's own source, and a small transformer."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from samestep.errors import ConfigError
from samestep.tasks.base import Task

__all__ = ["BytesLm"]

_IGNORE = -100
_NUM_FILES = 60


class _Chunks(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Files cut into rows of `length` + 1 bytes; the last row of a file is padded with targets that are ignored."""

    def __init__(self, files: list[bytes], length: int) -> None:
        rows = [file[start : start + length + 1] for file in files for start in range(0, len(file) - 1, length)]
        padded = [np.frombuffer(row.ljust(length + 1, b"\0"), dtype=np.uint8) for row in rows]
        self._bytes = torch.from_numpy(np.stack(padded).astype(np.int64))
        self._valid = torch.tensor([len(row) - 1 for row in rows])
        self._length = length

    def __len__(self) -> int:
        return len(self._valid)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._bytes[index]
        targets = row[1:].clone()
        targets[self._valid[index] :] = _IGNORE
        return row[:-1], targets


class BytesLm(Task):
    """Predict the next byte of Python source. Rows end with their file, so the number of targets differs by row."""

    epochs = 2
    batch_size = 64
    micro_batch_size = 16
    learning_rate = 4e-3
    length = 64
    width = 64
    layers = 2

    def model(self) -> nn.Module:
        """A causal transformer: int64 (N, length) to logits (N, length, 256)."""
        return _Transformer(self.width, self.layers, self.length)

    def data(self) -> tuple[Any, Any]:
        """The first files of the standard library by name; each tenth validates."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = [path.read_bytes() for path in sorted(folder.glob("*.py"))[:_NUM_FILES]]
        files = [file[:20_000] for file in files if len(file) > 1]
        if len(files) < 2:
            raise ConfigError(f"no Python source in {folder}", "this task reads the standard library", "use digits")
        train = [file for number, file in enumerate(files) if number % 10]
        return _Chunks(train, self.length), _Chunks(files[::10], self.length)

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy in nats, a mean over the targets that are not ignored."""
        inputs, targets = batch
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORE), (targets >= 0).sum()

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
        """Bits a byte."""
        loss, weight = self.loss(model, batch)
        return {"bits_per_byte": (loss / math.log(2), weight)}


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(_Block(width, heads=4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class _Block(nn.Module):
    """Pre-norm attention and MLP. Source: Radford et al., "Language models are unsupervised multitask learners", 2019."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result

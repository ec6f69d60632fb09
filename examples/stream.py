"""A stream: a dataset that can only be iterated. Shards belong to the run, so that ranks and workers change nothing.

A window has M = batch_size / micro_batch_size micro-batches, and micro-batch i comes from shard i of M. With a method
`shard(num_shards, index)` each rank and worker reads its own shards only; without it each reads everything and keeps
its part (right, but as many times the reading). The epoch ends when the longest shard does; nothing is padded.

    python examples/stream.py
    samestep launch -n 2 examples/stream.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import IterableDataset

import samestep


class Stream(IterableDataset):
    """Every `step`-th digit from number `first` on, as from a file that is read line by line."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        images, labels = load_digits(return_X_y=True)
        for image, label in zip(images[self.first :: self.step], labels[self.first :: self.step], strict=True):
            yield torch.tensor(image, dtype=torch.float32) / 16, int(label)

    def shard(self, num_shards: int, index: int) -> Stream:
        """Part `index` of `num_shards`."""
        return Stream(self.first + index * self.step, self.step * num_shards)


def main() -> None:
    """Two epochs; how many samples were seen, and how they were learnt."""
    with samestep.Run(precision="bf16", seed=0, progress=False) as run:
        net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=5e-3, fused=True))
        train = run.loader(Stream(), batch_size=64, micro_batch_size=16, num_workers=1)
        for epoch in run.epochs(2):
            loss, before = samestep.Mean(), run.samples
            for window in train:
                for x, y in window:
                    value = F.cross_entropy(model(x), y)
                    window.backward(value, weight=len(y))
                    loss.add(value, len(y))
                window.step(clip_norm=1.0)
            run.print(f"epoch {epoch}: {run.samples - before} samples, mean loss {run.mean(loss):.3f}")


if __name__ == "__main__":
    main()

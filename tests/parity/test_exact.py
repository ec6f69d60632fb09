"""exchange="exact": one SHA-256 of the final weights for any number of ranks, workers, and restarts."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.tasks.base import load_task
from samestep.testing import run_ranks


def digest(net: nn.Module) -> str:
    """SHA-256 of all weights and buffers."""
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def train(
    task_name: str,
    precision: str,
    windows: int,
    *,
    workers: int = 0,
    directory: str | None = None,
    stop: int | None = None,
) -> str:
    """Train a built-in task to `windows` windows (or leave at `stop`); the digest."""
    task = load_task(task_name)
    settings = {"exchange": "exact", "precision": precision, "progress": False}
    with samestep.Run(directory, **settings) as run:
        net = task.model()
        model, _ = run.prepare(net, task.optimizer(net, task.learning_rate))
        data, _ = task.data()
        if task_name == "digits":
            data = tuple(part[:200] for part in data)  # 200 = 3 windows of 60 + a tail of 20: 3 micro-batches of 8
            loader = run.loader(data, batch_size=60, micro_batch_size=8, shuffle=True, num_workers=workers)
        else:
            data = torch.utils.data.Subset(data, range(45))  # 4 windows of 10 + a tail of 5
            loader = run.loader(data, batch_size=10, micro_batch_size=2, shuffle=True, num_workers=workers)
        for _ in itertools.takewhile(lambda _: run.step < windows, run.epochs(10**6)):
            for window in loader:
                for batch in window:
                    loss, weight = task.loss(model, batch)
                    window.backward(loss, weight=weight)
                window.step(clip_norm=1.0)
                if run.step == stop:
                    run.save()
                if run.step in (stop, windows):
                    return digest(net)
    raise AssertionError


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("task", ["digits", "bytes_lm"])
def test_one_digest_for_any_number_of_ranks(task: str, precision: str) -> None:
    found = {ranks: set(run_ranks(train, ranks, task, precision, 9)) for ranks in (1, 2, 3, 4)}
    assert len(set.union(*found.values())) == 1, found


def with_workers() -> str:
    return train("digits", "fp32", 9, workers=2)


def test_workers_do_not_change_the_digest() -> None:
    assert set(run_ranks(with_workers, 2)) == set(run_ranks(train, 1, "digits", "fp32", 9))


def until(directory: str, stop: int | None) -> str:
    return train("digits", "bf16", 11, directory=directory, stop=stop)


def test_a_restart_from_three_ranks_on_two_in_mid_epoch_gives_the_same_digest(tmp_path: Any) -> None:
    whole = set(run_ranks(train, 1, "digits", "bf16", 11))
    run_ranks(until, 3, str(tmp_path), 6)  # in the middle of the second epoch of 4 windows
    assert set(run_ranks(until, 2, str(tmp_path), None)) == whole


class Branches(nn.Module):
    """Parts that are used in some micro-batches only; one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, part: int) -> torch.Tensor:
        return self.parts[part](x)


def branches(first: list[int]) -> tuple[str, bool, float]:
    """`first[w]`: samples from which window w's parts are chosen; short windows leave ranks without work."""
    with samestep.Run(exchange="exact", precision="fp32", progress=False) as run:
        net = Branches()
        before = net.never.weight.sum().item()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
        model, _ = run.prepare(net, optimizer, find_unused_parameters=True, bucket_cap_mb=0.00005)
        generator = torch.Generator().manual_seed(0)
        loader = run.loader(torch.randn(13, 3, generator=generator), batch_size=4, micro_batch_size=1, drop_last=False)
        for _ in range(2):
            for window in loader:
                for number, (x,) in zip(window.share, window, strict=True):
                    window.backward(model(x, (first[window.number] + number) % 2).square().mean())
                window.step(clip_norm=0.5)
        return digest(net), net.never.weight.grad is None, net.never.weight.sum().item() - before


def test_unused_parameters_and_empty_shares_are_exact_too() -> None:
    found = {ranks: run_ranks(branches, ranks, [0, 1, 2, 3]) for ranks in (1, 2, 3, 4)}
    assert len({result for results in found.values() for result in results}) == 1, found
    assert found[2][0][1:] == (True, 0.0), "a parameter that no rank used keeps grad None and its value"


def weighted(gradients: list[float], weights: list[float]) -> float:
    """Two micro-batches with these mean gradients and weights; the window's gradient."""
    with samestep.Run(exchange="exact", precision="fp32", progress=False) as run:
        net = nn.Linear(1, 1, bias=False)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        data = torch.tensor(gradients).unsqueeze(1)
        for window in run.loader(data, batch_size=2, micro_batch_size=1):
            for number, (x,) in zip(window.share, window, strict=True):
                window.backward(model(x).mean(), weight=weights[number])
            window.step()
        return net.weight.grad.item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_worked_example_of_token_weights(ranks: int) -> None:
    # sums 2 over 1 token and 90 over 9: (2 + 90) / (1 + 9) = 9.2, where a mean of means gives (2 + 10) / 2 = 6.0
    assert run_ranks(weighted, ranks, [2.0, 10.0], [1.0, 9.0]) == pytest.approx([9.2] * ranks)


def sparse() -> None:
    with samestep.Run(exchange="exact", precision="fp32", progress=False) as run:
        net = nn.Embedding(4, 2, sparse=True)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.arange(4), batch_size=4):
            for (x,) in window:
                window.backward(model(x).sum())
            window.step()


def test_sparse_gradients_are_refused_by_name() -> None:
    with pytest.raises(samestep.ModelError, match="got a sparse gradient for a parameter of shape"):
        sparse()

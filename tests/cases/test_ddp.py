"""Cases C09, C11-C13, C30, C34: what DistributedDataParallel does not see."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import samestep
from samestep.testing import run_ranks
from tests.cases.helpers import Weight, quiet_run


class Two(nn.Module):
    """Two weights; either can be left out of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.c = nn.Parameter(torch.ones(()))  # never used

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return sum(getattr(self, name) * x for name in use)


def c09() -> tuple[float, float, bool, float]:
    with quiet_run() as run:
        net = Two()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.1)
        model, _ = run.prepare(net, optimizer, find_unused_parameters=True)
        # micro-batches in window order: rank 0 has 0 and 1, rank 1 has 2 and 3
        data = torch.tensor([1.0, 2.0, 3.0, 6.0])
        for window in run.loader(data, batch_size=4, micro_batch_size=1):
            for number, (x,) in zip(window.share, window, strict=True):
                window.backward(model(x, "a" if number % 2 == 0 else "b").sum() / 2, reduction="sum")
            window.step()
        # (1 + 3) / 2 and (2 + 6) / 2: the sums over both ranks of what each accumulated
        return net.a.grad.item(), net.b.grad.item(), net.c.grad is None, net.c.item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_c09_a_layer_used_in_an_early_micro_batch_only_is_exchanged(ranks: int) -> None:
    assert run_ranks(c09, ranks) == [(2.0, 4.0, True, 1.0)] * ranks


def c11(how: str) -> str:
    with quiet_run() as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        train = run.loader(torch.tensor([1.0, 3.0, 1.0, 3.0]), batch_size=2)
        try:
            for window in train:
                for (x,) in window:
                    first = window.number == 0
                    forward = model if how == "late" and first else (net if how != "method" else model.module)
                    window.backward(forward(x).mean())
                window.step()
        except samestep.ModelError as e:
            return f"{window.number}: {e}"
        return "trained"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("how", "window"), [("inner", 0), ("late", 1), ("method", 0)])
def test_c11_a_loss_past_the_wrapper_is_refused_at_once(ranks: int, how: str, window: int) -> None:
    for message in run_ranks(c11, ranks, how):
        assert message.startswith(f"{window}: the loss was computed past the prepared model")


class Sum(nn.Module):
    """a * x + b * x."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x + self.b * x


def c12() -> list[float]:
    with quiet_run() as run:
        net = Sum()
        net.a.requires_grad_(False)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        for window in run.loader(torch.tensor([1.0, 3.0, 1.0, 3.0]), batch_size=2, micro_batch_size=1):
            if window.number == 1:
                net.a.requires_grad_(True)
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        return [net.a.grad.item(), net.b.grad.item()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_c12_a_layer_unfrozen_after_prepare_trains_in_step(ranks: int) -> None:
    assert run_ranks(c12, ranks) == [[2.0, 2.0]] * ranks


def c13() -> tuple[float, float, int]:
    with quiet_run() as run:
        net = nn.BatchNorm1d(1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.tensor([[0.0], [2.0], [2.0], [4.0]]), batch_size=4, micro_batch_size=2):
            for (x,) in window:
                window.backward(model(x).sum())
            window.step()
        return net.running_mean.item(), net.running_var.item(), int(net.num_batches_tracked)


@pytest.mark.parametrize("ranks", [1, 2])
def test_c13_batchnorm_statistics_are_the_same_on_all_ranks_and_for_any_number(ranks: int) -> None:
    # The window's statistics are the mean of its micro-batches': mean 0.1 * (1 + 3) / 2, variance 0.9 + 0.1 * 2
    assert run_ranks(c13, ranks) == [(pytest.approx(0.2), pytest.approx(1.1), 1)] * ranks


def c30() -> float:
    with quiet_run(timeout_s=20) as run:
        net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.randn(8, 1), batch_size=8):
            for (x,) in window:
                window.backward(model(x).sum())
            window.step()
        start = time.monotonic()
        if run.is_main:
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 1))
            model.train()
            model(torch.ones(4, 1))  # with gradients, outside a window: nothing is exchanged either
        seconds = time.monotonic() - start
        run.mean(0.0)
        return seconds


def test_c30_validation_on_one_rank_communicates_nothing() -> None:
    assert max(run_ranks(c30, 2)) < 5


def c34(nonfinite: str) -> tuple[float, int, str]:
    with quiet_run(nonfinite=nonfinite) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        bad = float("nan")
        message = ""
        try:
            for window in run.loader(torch.tensor([1.0, 3.0, 1.0, bad, 1.0, 3.0]), batch_size=2, micro_batch_size=1):
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
        except samestep.NonFiniteError as e:
            message = str(e)
        return net.w.item(), run.skips, message


@pytest.mark.parametrize("ranks", [1, 2])
def test_c34_one_ranks_nan_skips_the_window_on_all_ranks(ranks: int) -> None:
    assert run_ranks(c34, ranks, "skip") == [(pytest.approx(0.6), 1, "")] * ranks
    for weight, skips, message in run_ranks(c34, ranks, "raise"):
        assert (weight, skips) == (pytest.approx(0.8), 1)
        assert "window 1 of epoch 0 (step 2)" in message

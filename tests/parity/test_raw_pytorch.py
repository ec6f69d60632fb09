"""A loop in plain PyTorch on one process against Samestep on 1, 2 and 3 ranks; and 1 against N ranks on digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samestep.tasks.base import load_task
from samestep.testing import run_ranks
from tests.cases.helpers import quiet_run

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH, MICRO, CLIP = 12, 2, 0.5


def make_net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def make_optimizer(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=kind == "adamw fused")


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(56, 5, generator=generator), torch.randint(4, (56,), generator=generator)


def raw(precision: str, kind: str, epochs: int = 2) -> tuple[list[torch.Tensor], list[float], float]:
    """What a careful person writes: each micro-batch weighted by its share of its own window, also in the short one."""
    net, (x, y), dtype = make_net(), data(), DTYPES[precision]
    optimizer = make_optimizer(kind, net)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=2.0**10, growth_interval=4)
    losses = []
    for _ in range(epochs):
        for start in range(0, len(x), BATCH):
            stop = min(len(x), start + BATCH)
            optimizer.zero_grad()
            total = 0.0
            for a in range(start, stop, MICRO):
                part = slice(a, min(stop, a + MICRO))
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    out = net(x[part])
                loss = F.cross_entropy(out.float(), y[part]) * len(y[part]) / (stop - start)
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            losses.append(total)
    return [param.detach() for param in net.parameters()], losses, scaler.get_scale()


def ours(precision: str, kind: str, workers: int = 0) -> tuple[list[torch.Tensor], list[float], float | None]:
    losses: list[float] = []
    with quiet_run(precision=precision, init_scale=2.0**10, growth_interval=4) as run:
        net = make_net()
        model, _ = run.prepare(net, make_optimizer(kind, net))
        run._engine.on_record.append(lambda record: losses.append(record.loss))
        train = run.loader(data(), batch_size=BATCH, micro_batch_size=MICRO, num_workers=workers)
        for _ in run.epochs(2):
            for window in train:
                for x, y in window:
                    window.backward(F.cross_entropy(model(x), y))
                window.step(clip_norm=CLIP)
        return [param.detach() for param in net.parameters()], losses, run.loss_scale


@pytest.mark.parametrize("kind", ["adamw fused", "adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_and_losses_are_those_of_a_plain_loop(precision: str, kind: str) -> None:
    weights, losses, scale = raw(precision, kind)
    tolerance = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 3e-3}[precision]
    for ranks in (1, 2, 3):
        for mine, seen, our_scale in run_ranks(ours, ranks, precision, kind):
            torch.testing.assert_close(mine, weights, rtol=tolerance, atol=tolerance)
            assert seen == pytest.approx(losses, rel=tolerance)
            assert our_scale == (scale if precision == "fp16" else None)


def digits(precision: str, windows: int, directory: str | None = None) -> tuple[list[Any], list[float], list[float]]:
    """Convolutions, BatchNorm and dropout on scikit-learn's digits."""
    task = load_task("digits")
    seen: list[Any] = []
    with quiet_run(precision=precision, seed=3) as run:
        net = task.model()
        model, _ = run.prepare(net, task.optimizer(net, 1e-3))
        run._engine.on_record.append(seen.append)
        train_set, _ = task.data()
        part = tuple(each[:230] for each in train_set)  # 3 windows of 64 and a tail of 38
        train = run.loader(part, batch_size=64, micro_batch_size=8, shuffle=True)
        for _ in run.epochs(10):
            for window in train:
                for batch in window:
                    loss, weight = task.loss(model, batch)
                    window.backward(loss, weight=weight)
                window.step(clip_norm=1.0)
            if run.step >= windows:
                break
        buffers = [float(b.double().sum()) for b in net.buffers()]
        return [r.digest for r in seen], [r.loss for r in seen], buffers


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_digits_with_dropout_and_batchnorm_on_more_ranks(precision: str) -> None:
    ((digests, losses, buffers),) = run_ranks(digits, 1, precision, 8)
    assert len(set(digests)) == len(digests) == 8
    for ranks in (2, 3):
        for mine, seen, ours in run_ranks(digits, ranks, precision, 8):
            assert mine == digests, "the same samples at the same places"
            assert seen == pytest.approx(losses, rel=1e-4 if precision == "fp32" else 2e-3)
            assert ours == pytest.approx(buffers, rel=1e-3)

"""On a GPU: the same loop in each precision, without waiting for the device, and the same bits from run to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.testing import run_ranks
from tests.cases.helpers import quiet_run

pytestmark = pytest.mark.gpu


def train(precision: str, settings: dict[str, Any], synchronising: str = "default") -> tuple[list[float], list[float]]:
    """(losses, weights) of two epochs of a small network with dropout and BatchNorm."""
    losses: list[float] = []
    with quiet_run(precision=precision, **settings) as run:
        assert run.device.type == "cuda"
        net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 4))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        model, _, _ = run.prepare(net, optimizer, schedule)
        run.ema(model, 0.9)
        run._engine.on_record.append(lambda record: losses.append(record.loss))
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(100, 16, generator=generator), torch.randint(0, 4, (100,), generator=generator)
        loader = run.loader(data, batch_size=32, micro_batch_size=8, shuffle=True)
        for epoch in run.epochs(2):
            if epoch == 1:
                torch.cuda.set_sync_debug_mode(synchronising)
            for window in loader:
                for x, y in window:
                    window.backward(F.cross_entropy(model(x), y), weight=len(y))
                window.step(clip_norm=1.0)
            torch.cuda.set_sync_debug_mode("default")
        return losses, torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_each_precision_trains_on_a_gpu(precision: str) -> None:
    ((losses, weights),) = run_ranks(train, 1, precision, {})
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert all(weight == weight for weight in weights)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_loop_never_waits_for_the_gpu(precision: str) -> None:
    # torch raises where an operation synchronises; the numbers of a window are read through an event, a window late
    run_ranks(train, 1, precision, {}, "error")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_exact_runs_on_one_gpu_give_the_same_bits(precision: str) -> None:
    first, second = (run_ranks(train, 1, precision, {"exchange": "exact"})[0] for _ in range(2))
    assert first == second


def resume(directory: str) -> tuple[str, float]:
    """One epoch, or what is left of it."""
    with quiet_run(directory, precision="fp16") as run:
        net = nn.Linear(4, 2)
        model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=True))
        train = run.loader(torch.ones(8, 4), batch_size=4)
        for _ in run.epochs(1):
            for window in train:
                for (x,) in window:
                    window.backward(model(x).square().mean())
                window.step()
        return str(optimizer.state[net.weight]["exp_avg"].device), run.loss_scale or 0.0


def test_a_restart_puts_everything_back_on_the_ranks_own_device(tmp_path: Any) -> None:
    first = run_ranks(resume, 1, str(tmp_path))
    assert run_ranks(resume, 1, str(tmp_path)) == first
    assert first[0][0].startswith("cuda")


def test_memory_is_reported_for_the_gpu() -> None:
    block = torch.empty(1 << 20, device="cuda")
    report = samestep.memory_report("cuda")
    assert report["allocated"] >= block.numel() * 4
    assert report["peak_reserved"] >= report["peak_allocated"] >= report["allocated"]


def test_batches_are_pinned_and_copied_ahead() -> None:
    with quiet_run() as run:
        for (x,) in run.evaluate(run.loader(torch.arange(10), batch_size=4, num_workers=1)):
            assert x.device.type == "cuda"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_as_one() -> None:
    (alone,) = run_ranks(train, 1, "fp32", {"exchange": "exact"}, timeout_s=120)
    assert run_ranks(train, 2, "fp32", {"exchange": "exact"}, timeout_s=120) == [alone] * 2

"""Cases C01-C06, C22 (the scale's part): what 16 bits can and cannot hold."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.testing import run_ranks
from tests.cases.helpers import Weight, quiet_run


def c01(indices: list[list[int]], settings: dict, scale_down: float) -> tuple[list[float], list[float]]:
    with quiet_run(**settings) as run:
        net = nn.Embedding(4, 1, sparse=True)
        nn.init.ones_(net.weight)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        train = run.loader(torch.tensor(indices), batch_size=len(indices), micro_batch_size=1)
        for window in train:
            for (rows,) in window:
                window.backward(model(rows[0]).sum() * scale_down, reduction="sum")
            window.step()
        return net.weight.grad.to_dense().flatten().tolist(), net.weight.detach().flatten().tolist()


def test_c01_sparse_gradients_are_unscaled_with_repeated_rows_added() -> None:
    ((_, weights),) = run_ranks(c01, 1, [[0, 0, 2]], {"precision": "fp16", "init_scale": 1024.0}, 1.0)
    assert weights == pytest.approx([0.8, 1.0, 0.9, 1.0])


def test_c01_sparse_gradients_meet_over_two_ranks() -> None:
    for gradient, _ in run_ranks(c01, 2, [[0, 0, 2], [1, 2, 2]], {}, 0.5):
        assert gradient == pytest.approx([1.0, 0.5, 1.5, 0.0])


def c02(ranks: int) -> tuple[float, list[float]]:
    with quiet_run(precision="fp16") as run:
        net = nn.Module()
        net.w = nn.Parameter(torch.zeros(2))
        net.forward = lambda x: (net.w * x).sum()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        for window in run.loader(torch.tensor([[3.0, 4.0]] * ranks), batch_size=ranks):
            for (x,) in window:
                window.backward(model(x[0]))
            window.step(clip_norm=1.0)
            return window.grad_norm, net.w.tolist()
    raise AssertionError


@pytest.mark.parametrize("ranks", [1, 2])
def test_c02_clipping_measures_the_true_norm_not_the_scaled_one(ranks: int) -> None:
    for norm, weights in run_ranks(c02, ranks, ranks):
        assert norm == pytest.approx(5.0)
        assert weights == pytest.approx([-0.6, -0.8])


class NormaliseScores(nn.Module):
    """(s - min) / (max - min + 1e-8), a constant that fp16 rounds to zero."""

    def __init__(self, run: samestep.Run | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0))
        self.run, self.dtype = run, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.w * x).to(self.dtype)
        if self.run is not None:
            scores = scores.float()
        return (scores - scores.min()) / (scores.max() - scores.min() + 1e-8)


def c03(precision: str, in_fp32: bool) -> tuple[bool, float, str]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with quiet_run(precision=precision, nonfinite="raise") as run:
        net = NormaliseScores(run if in_fp32 else None, dtype)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        try:
            for window in run.loader(torch.ones(4), batch_size=4):
                for (x,) in window:
                    window.backward(model(x).sum())
                window.step()
        except samestep.NonFiniteError as e:
            return True, net.w.item(), str(e)
        return False, net.w.item(), ""


def test_c03_a_vanishing_constant_is_reported_in_fp16_and_no_weight_changes() -> None:
    ((failed, weight, message),) = run_ranks(c03, 1, "fp16", False)
    assert failed
    assert weight == 3.0
    assert "window 0 of epoch 0 (step 1)" in message
    for precision, in_fp32 in (("fp32", False), ("bf16", False), ("fp16", True)):
        ((failed, _, message),) = run_ranks(c03, 1, precision, in_fp32)
        assert not failed, message


class LongSum(nn.Module):
    """ones(1, 70000) @ ones(70000, 1): more than fp16 can hold."""

    def __init__(self, run: samestep.Run, in_fp32: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.run, self.in_fp32 = run, in_fp32

    def forward(self, n: int) -> torch.Tensor:
        a, b = self.w * torch.ones(1, n), torch.ones(n, 1)
        if self.in_fp32:
            with self.run.fp32():
                return (a.float() @ b.float()).squeeze()
        return (a @ b).squeeze()


def c04(in_fp32: bool) -> tuple[float, float, int]:
    with quiet_run(precision="fp16", init_scale=1.0) as run:
        net = LongSum(run, in_fp32)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0 if in_fp32 else 1.0))
        for window in run.loader(torch.ones(1), batch_size=1):
            for _ in window:
                window.backward(model(70000))
            window.step()
        return window.loss, net.w.item(), run.skips


def test_c04_a_long_sum_is_exact_in_an_fp32_region_and_else_skips_the_window() -> None:
    assert run_ranks(c04, 1, True) == [(70000.0, 1.0, 0)]
    ((loss, weight, skips),) = run_ranks(c04, 1, False)
    assert math.isinf(loss)
    assert (weight, skips) == (1.0, 1)


def c05(precision: str) -> float:
    with quiet_run(precision=precision) as run:
        net = nn.Module()
        net.w = nn.Parameter(torch.ones(()))
        net.forward = lambda logits: torch.sigmoid(net.w * logits)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        data = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 0.0])
        for window in run.loader(data, batch_size=2):
            for x, y in window:
                window.backward(F.binary_cross_entropy(model(x), y))
            window.step()
        return window.loss


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_c05_a_loss_outside_the_model_is_evaluated_in_fp32(precision: str) -> None:
    assert run_ranks(c05, 1, precision) == [pytest.approx(0.220095, abs=1e-6)]


def test_c06_half_parameters_are_refused_by_name_before_the_first_step() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with quiet_run(precision="fp16") as run:
        with pytest.raises(samestep.ModelError, match=r"1\.weight is torch\.float16.*fp32"):
            run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert run.step == 0


def c22(directory: str) -> tuple[float | None, float | None, int, bool]:
    def script(values: list[float]) -> samestep.Run:
        with quiet_run(directory, precision="fp16") as run:
            net = Weight()
            model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            train = run.loader(torch.arange(9), batch_size=1)
            start = run.loss_scale
            for window in train:
                for (i,) in window:
                    window.backward(model(torch.tensor(values[int(i)])))
                window.step()
                if window.number == len(values) - 1:
                    run.save()
                    break
            return start, run.loss_scale, run.updates, window.skipped

    overflow = float("inf")
    script([overflow] * 8)
    return script([overflow] * 8 + [200.0])


def test_c22_the_loss_scale_survives_a_restart(tmp_path) -> None:
    ((start, after, updates, skipped),) = run_ranks(c22, 1, str(tmp_path))
    assert (start, after) == (256.0, 256.0)
    assert not skipped
    assert updates == 1

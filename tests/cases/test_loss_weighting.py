"""Cases C07, C14-C17, C32 (part B), C37: what the mean of a loss is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.testing import run_ranks
from tests.cases.helpers import Weight, quiet_run, train_weight


def c07() -> list[tuple[int, float, bool]]:
    out = train_weight([1.0] * 63, 8, 1, epochs=2, lr=0.0)
    assert out["updates"] == 16
    return [(r.micro_batches, r.loss, r.skipped) for r in out["records"]]


def test_c07_the_tail_window_is_divided_by_its_own_size() -> None:
    (records,) = run_ranks(c07, 1)
    assert [m for m, _, _ in records] == ([8] * 7 + [7]) * 2
    assert all(loss == 1.0 for _, loss, _ in records)


def c14(reduction: str) -> float:
    return 1.0 - train_weight([1.0, 2.0, 3.0, 4.0], 4, 2, lr=1.0, reduction=reduction)["w"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_c14_a_sum_loss_gives_the_sum_and_a_mean_loss_the_mean(ranks: int) -> None:
    assert run_ranks(c14, ranks, "sum") == pytest.approx([10.0] * ranks)
    assert run_ranks(c14, ranks, "mean") == pytest.approx([2.5] * ranks)


def c15() -> tuple[float, int]:
    out = train_weight([1.0, 2.0, 6.0], 3, 2, lr=1.0)
    return 1.0 - out["w"], out["records"][0].samples


def test_c15_the_last_batch_is_not_padded_with_repeated_samples() -> None:
    assert run_ranks(c15, 2) == [(pytest.approx(3.0), 3)] * 2


def c16() -> float:
    torch.distributed.init_process_group("gloo")
    try:
        rank = torch.distributed.get_rank()
        net = Weight()
        batches = [(torch.tensor([1.0 if rank == 0 else 3.0]), 0)] * (5 if rank == 0 else 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        samestep.train_one_epoch(
            net, batches, optimizer, lambda out, _: out.mean(), "cpu", precision="fp32", clip_norm=None
        )
        return net.w.item()
    finally:
        torch.distributed.destroy_process_group()


def test_c16_ranks_with_different_numbers_of_batches_finish_with_the_right_weights() -> None:
    assert run_ranks(c16, 2) == pytest.approx([0.2, 0.2])


def c17() -> tuple[list[float], float, int]:
    with quiet_run() as run:
        net = nn.Module()
        net.logits = nn.Parameter(torch.zeros(3))
        net.forward = lambda n: net.logits.expand(n, 3)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        train = run.loader(torch.tensor([0, 1, -100, -100]), batch_size=4, micro_batch_size=2)
        for window in train:
            for (labels,) in window:
                window.backward(F.cross_entropy(model(len(labels)), labels), weight=(labels >= 0).sum())
            window.step()
            loss = window.loss
        return (-net.logits.detach()).tolist(), loss, run.skips


@pytest.mark.parametrize("ranks", [1, 2])
def test_c17_a_micro_batch_without_valid_targets_changes_nothing(ranks: int) -> None:
    for gradient, loss, skips in run_ranks(c17, ranks):
        assert gradient == pytest.approx([-1 / 6, -1 / 6, 1 / 3])
        assert loss == pytest.approx(math.log(3))
        assert skips == 0


def c32() -> tuple[float, float]:
    with quiet_run() as run:
        a, b = samestep.Mean(), samestep.Mean()
        a.add(1.0, 4)
        a.add(6.0, 1)
        b.add(*((2.0, 3) if run.rank == 0 else (6.0, 1)))
        return a.sums()[0] / a.sums()[1], run.mean(b)


def test_c32_evaluation_means_are_over_samples_not_batches() -> None:
    for a, b in run_ranks(c32, 2):
        assert a == pytest.approx(2.0)
        assert math.exp(b) == pytest.approx(20.0855, rel=1e-5)


def c37(weights: list[int]) -> tuple[float, float]:
    with quiet_run() as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        records: list = []
        run._engine.on_record.append(records.append)
        for window in run.loader(torch.tensor([1.0, 3.0]), batch_size=2, micro_batch_size=1):
            for k, (x,) in zip(window.share, window, strict=True):
                window.backward(model(x).mean(), weight=weights[k])
            window.step()
        return records[0].loss, window.loss


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("weights", "right"), [([3, 1], 1.5), ([1, 1], 2.0)])
def test_c37_the_recorded_loss_is_the_global_weighted_mean(ranks: int, weights: list[int], right: float) -> None:
    assert run_ranks(c37, ranks, weights) == [(pytest.approx(right), pytest.approx(right))] * ranks

"""Buffers that training changes: a function of the grid, the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import quiet_run


class Net(nn.Module):
    """Three kinds of normalisation and one in eval mode."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.free = nn.BatchNorm1d(3, momentum=momentum)
        self.conv = nn.Conv1d(1, 3, 1)
        self.instance = nn.InstanceNorm1d(3, track_running_stats=True)
        self.frozen = nn.BatchNorm1d(3).eval()
        nn.init.normal_(self.frozen.running_mean)
        nn.init.uniform_(self.frozen.running_var)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.instance(self.conv(self.free(x)[:, None, :]))
        return self.frozen(y.mean(2))


def trained(momentum: float | None, samples: int, nonfinite: bool = False) -> dict[str, list[float]]:
    with quiet_run(nonfinite="skip") as run:
        net = Net(momentum)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        net.frozen.eval()
        data = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))[:samples] * 3
        if nonfinite:
            data[8:12] = float("nan")
        for window in run.loader(data, batch_size=8, micro_batch_size=2):
            for (x,) in window:
                window.backward(model(x).square().mean())
            window.step()
        return {name: buffer.flatten().tolist() for name, buffer in net.named_buffers()}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("samples", [24, 18, 12])  # no tail; a tail of one micro-batch; of two
def test_statistics_are_the_same_on_any_number_of_ranks(momentum: float | None, samples: int) -> None:
    (alone,) = run_ranks(trained, 1, momentum, samples)
    for ranks in (2, 3):
        for other in run_ranks(trained, ranks, momentum, samples):
            assert other.keys() == alone.keys()
            for name, values in other.items():
                assert values == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_counts_as_one_update_of_the_batches_tracked(ranks: int) -> None:
    for buffers in run_ranks(trained, ranks, None, 24):
        assert buffers["free.num_batches_tracked"] == [3]
        assert buffers["frozen.num_batches_tracked"] == [0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batchnorm_in_eval_mode_is_bitwise_untouched(ranks: int) -> None:
    before = Net(0.1).frozen
    for buffers in run_ranks(trained, ranks, 0.1, 24):
        assert buffers["frozen.running_mean"] == before.running_mean.tolist()
        assert buffers["frozen.running_var"] == before.running_var.tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_window_leaves_no_trace_in_the_buffers(ranks: int) -> None:
    for buffers in run_ranks(trained, ranks, 0.1, 16, True):
        (first_window_only,) = run_ranks(trained, 1, 0.1, 8)
        for name, values in buffers.items():
            assert values == pytest.approx(first_window_only[name], rel=1e-5, abs=1e-6), name


def test_without_accumulation_the_statistics_are_torchs_own() -> None:
    with quiet_run() as run:
        net, twin = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        data = torch.randn(24, 3)
        for window in run.loader(data, batch_size=8):
            for (x,) in window:
                window.backward(model(x).sum())
                twin(x)
            window.step()
        for mine, theirs in zip(net.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


class Counting(nn.Module):
    """A buffer that forward changes: the largest absolute input seen, and one that is not saved."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.register_buffer("largest", torch.zeros(()), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return self.w * x


def counting(rules: dict[str, Any] | None, persistent: bool = True) -> float:
    with quiet_run(timeout_s=20) as run:
        net = nn.Sequential(Counting(persistent))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), buffers=rules)
        for window in run.loader(torch.tensor([1.0, 7.0, 3.0, 5.0]), batch_size=4, micro_batch_size=1):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
        return net[0].largest.item()


def largest(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return values.amax(0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_another_changing_buffer_is_refused_by_name(ranks: int) -> None:
    with pytest.raises(RanksFailed, match=r"buffer 0\.largest changed during a window.*'0\.largest': 'mean'"):
        run_ranks(counting, ranks, None)


@pytest.mark.parametrize(("rule", "right"), [("mean", 4.0), ("last", 5.0), (largest, 7.0)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_another_changing_buffer_meets_by_the_rule_that_it_is_given(ranks: int, rule: Any, right: float) -> None:
    assert run_ranks(counting, ranks, {"0.largest": rule}) == [pytest.approx(right)] * ranks


def test_a_buffer_that_is_not_saved_is_the_models_own_business() -> None:
    assert counting(None, persistent=False) == 7.0


@pytest.mark.parametrize("rule", ["average", 3, None])
def test_a_rule_that_is_none_is_refused(rule: Any) -> None:
    with pytest.raises(samestep.ConfigError, match=r"0\.largest"):
        counting({"0.largest": rule})


def test_a_rule_for_no_buffer_is_refused() -> None:
    with pytest.raises(samestep.ConfigError, match="no such persistent buffer"):
        counting({"largets": "mean", "0.largest": "last"})


def test_a_buffer_that_is_replaced_by_a_new_tensor_is_noticed() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + len(x)
            return self.w * x

    with quiet_run() as run:
        net = Replacing()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(samestep.ModelError, match="buffer seen changed"):
            for window in run.loader(torch.ones(2), batch_size=2):
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()


def left_in_the_middle(directory: str, stop: bool) -> list[float]:
    with quiet_run(directory) as run:
        net = nn.BatchNorm1d(3)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        train = run.loader(
            torch.randn(16, 3, generator=torch.Generator().manual_seed(1)), batch_size=8, micro_batch_size=2
        )
        for _ in run.epochs(1):
            for window in train:
                for (x,) in window:
                    window.backward(model(x).square().mean())
                    if stop and window.number == 1:
                        break
                if stop and window.number == 1:
                    run.save()
                    return []
                window.step()
        return net.running_mean.tolist() + net.running_var.tolist()


def test_a_save_after_leaving_a_window_in_the_middle_holds_the_windows_opening_buffers(tmp_path: Any) -> None:
    whole = left_in_the_middle(str(tmp_path / "whole"), False)
    left_in_the_middle(str(tmp_path / "parts"), True)
    assert left_in_the_middle(str(tmp_path / "parts"), False) == whole

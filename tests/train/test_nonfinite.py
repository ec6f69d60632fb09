"""A non-finite window is blamed on its samples, its parameter, and on request its module: the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import quiet_run


class Rooted(nn.Module):
    """A square root, whose gradient at 0 is infinite, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(2, 2, bias=False), nn.Linear(2, 1)
        self.root = Root()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.root(self.first(x).square()))


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


def train(poison: str, settings: dict[str, Any], accumulate: int = 1) -> int:
    data = torch.arange(1.0, 25.0).reshape(12, 2)
    if poison == "loss":
        data[[5, 8]] = float("nan")
    elif poison == "gradient":
        data[7] = 0.0
    with quiet_run(**settings, timeout_s=30) as run:
        net = Rooted()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4))
        for window in run.loader((data, torch.arange(12)), batch_size=4, micro_batch_size=1, sampler=range(11, -1, -1)):
            for x, _ in window:
                window.backward(model(x).mean())
            window.step()
        return run.skips


def message(ranks: int, poison: str, **settings: Any) -> str:
    if ranks == 1:
        with pytest.raises(samestep.NonFiniteError) as error:
            train(poison, settings)
        return str(error.value)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(train, ranks, poison, settings)
    said = {error.got for error in failed.value.errors.values() if isinstance(error, samestep.NonFiniteError)}
    assert len(said) == 1
    return said.pop()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_loss_that_is_not_finite_is_blamed_on_its_micro_batch_rank_and_samples(ranks: int, precision: str) -> None:
    text = message(ranks, "loss", precision=precision)
    # Sample 8 is in window 0 and comes first; with M = 4 its micro-batch is the last one.
    assert "window 0 of epoch 0 (step 1)" in text
    assert f"loss nan in micro-batch 3 on rank {ranks - 1}: samples 8 (positions 3 to 3 of the epoch)" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gradient_that_is_not_finite_is_blamed_on_its_parameter(ranks: int) -> None:
    text = message(ranks, "gradient")
    assert "the gradient of first.weight is not finite (1 of 3 parameters), though each loss is" in text
    assert "window 1 of epoch 0" in text


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_find_nonfinite_names_the_module_whose_output_is_not_finite(ranks: int) -> None:
    text = message(ranks, "loss", find_nonfinite=True)
    assert f"on rank {ranks - 1} in micro-batch 3 the output of first (Linear) is not finite, nor is its input" in text


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("exchange", ["fast", "exact"])
def test_find_nonfinite_names_the_module_where_the_gradient_breaks(ranks: int, exchange: str) -> None:
    text = message(ranks, "gradient", find_nonfinite=True, exchange=exchange)
    assert "in micro-batch 0 the gradient that comes back to first (Linear) is not finite" in text


def test_find_nonfinite_changes_nothing_in_a_sound_training() -> None:
    assert train("", {"find_nonfinite": True}) == 0


def test_find_nonfinite_leaves_a_window_that_may_be_skipped_alone() -> None:
    assert train("loss", {"find_nonfinite": True, "nonfinite": "skip"}) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_skipped_in_a_row_end_the_run_and_name_the_samples(ranks: int) -> None:
    text = message(ranks, "loss", nonfinite="skip", max_skips=1)
    assert "1 windows in a row were skipped, the last is window 0" in text
    assert "samples 8 (" in text


def all_nan(precision: str) -> None:
    with quiet_run(precision=precision, nonfinite="skip") as run:
        net = nn.Linear(1, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.full((200, 1), torch.nan), batch_size=1):
            for x in window:
                window.backward(model(x[0]).mean())
            window.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_hundred_nan_batches_end_in_25_windows_and_not_with_a_scale_of_zero(precision: str) -> None:
    with pytest.raises(samestep.NonFiniteError, match="25 windows in a row were skipped") as error:
        all_nan(precision)
    assert ("loss scale now 0.00195312" in str(error.value)) == (precision == "fp16")

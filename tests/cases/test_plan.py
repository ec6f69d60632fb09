"""Case C41: a tail of one sample under BatchNorm is announced before training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samestep.data.grid import Grid
from tests.cases.helpers import quiet_run


def begin(samples: int, batch_size: int, **loader: object) -> int:
    """Make the model and loader, train until the tail if there is none; windows done."""
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.randn(samples, 3), batch_size=batch_size, **loader):
            for (x,) in window:
                window.backward(model(x).sum())
            window.step()
        return run.samples


def test_c41_a_tail_of_one_sample_is_announced_before_any_training() -> None:
    with pytest.warns(UserWarning, match=r"9 samples = 1 window of 8 \+ a tail of 1.*BatchNorm cannot"):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            begin(9, 8)


def test_c41_a_dropped_tail_trains_the_rest_without_a_warning() -> None:
    assert begin(9, 8, drop_last=True) == 8
    grid = Grid.make(num_samples=9, batch_size=8, drop_last=True)
    assert (grid.num_windows, grid.num_dropped) == (1, 1)
    assert "1 of 9 samples dropped" in grid.describe()


def test_c41_two_ranks_of_four_share_the_tail_as_one_and_none() -> None:
    grid = Grid.make(num_samples=9, batch_size=8, world_size=2)
    assert [len(grid.share(1, rank, 2)) for rank in (0, 1)] == [1, 0]


def test_a_model_without_batchnorm_is_not_warned() -> None:
    with quiet_run() as run:
        net = nn.Linear(3, 2)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.randn(9, 3), batch_size=8):
            for (x,) in window:
                window.backward(model(x).sum())
            window.step()
        assert run.samples == 9

"""The moving average: once for each applied update, and saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import samestep
from samestep.optim.ema import Ema
from tests.cases.helpers import Weight, quiet_run


@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.booleans()), max_size=20), st.floats(0, 0.999))
@settings(deadline=None, max_examples=40)
def test_the_average_is_that_of_the_applied_updates_only(steps: list[tuple[float, bool]], decay: float) -> None:
    net = Weight(1.0)
    ema, right = Ema(net, decay), 1.0
    for value, skipped in steps:
        with torch.no_grad():
            net.w.fill_(value)
        before = ema.averages[0].clone()
        ema.update(torch.tensor(float(skipped)))
        if skipped:
            assert torch.equal(ema.averages[0], before)
        else:
            right = decay * right + (1 - decay) * value
    assert ema.averages[0].item() == pytest.approx(right, rel=1e-4, abs=1e-4)


def test_applied_swaps_the_weights_in_and_back_also_after_an_error() -> None:
    net = nn.Linear(2, 2)
    ema = Ema(net, 0.5)
    with torch.no_grad():
        net.weight.add_(1.0)
    own = net.weight.detach().clone()
    with pytest.raises(KeyError), ema.applied():
        assert torch.equal(net.weight, ema.averages[0])
        raise KeyError
    assert torch.equal(net.weight, own)
    assert net.weight.requires_grad


@pytest.mark.parametrize("decay", [1.0, -0.1, 1.5, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(samestep.ConfigError, match="decay"):
        Ema(Weight(), decay)


def test_a_state_of_other_parameters_is_refused() -> None:
    with pytest.raises(samestep.ConfigError, match="other parameters"):
        Ema(Weight(), 0.5).load_state_dict(Ema(nn.Linear(1, 1), 0.5).state_dict())


def trained(directory: Any, epochs: int) -> list[float]:
    with quiet_run(directory) as run:
        net = Weight()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        ema = run.ema(model, 0.9)
        train = run.loader(torch.arange(6.0), batch_size=2)
        for _ in run.epochs(epochs):
            for window in train:
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
        return [net.w.item(), ema.averages[0].item()]


def test_a_restart_continues_the_average(tmp_path: Any) -> None:
    whole = trained(tmp_path / "whole", 2)
    trained(tmp_path / "parts", 1)
    assert trained(tmp_path / "parts", 2) == whole

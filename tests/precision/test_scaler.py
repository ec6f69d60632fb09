"""The loss scale: torch.amp.GradScaler's state machine, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import samestep
from samestep.precision.scaler import LossScaler
from tests.cases.helpers import quiet_run

CPU = torch.device("cpu")


class Theirs:
    """torch's own scaler with one parameter, whose gradient is inf where the window overflowed."""

    def __init__(self, **settings: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **settings)
        self.param = nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.param], lr=0.0)

    def update(self, overflow: bool) -> None:
        self.scaler.scale(torch.ones(()))  # makes the scale's tensors
        self.param.grad = torch.tensor(float("inf") if overflow else 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def update(scaler: LossScaler, overflow: bool) -> None:
    scaler.update(torch.tensor(float(overflow)))


SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**-140, 1.0, 3.0, 65536.0, 3e38]),
        "growth_factor": st.sampled_from([1.5, 2.0, 7.0]),
        "backoff_factor": st.sampled_from([0.1, 0.5, 0.9]),
        "growth_interval": st.integers(1, 4),
    }
)


@given(SETTINGS, st.lists(st.booleans(), max_size=60))
@settings(deadline=None, max_examples=40)
def test_scale_and_growth_are_gradscalers_after_any_sequence_of_overflows(options: dict, overflows: list[bool]) -> None:
    ours, theirs = LossScaler(CPU, **options), Theirs(**options)
    for overflow in overflows:
        update(ours, overflow)
        theirs.update(overflow)
        assert ours.state_dict() == theirs.scaler.state_dict()


@given(st.lists(st.booleans(), max_size=8), st.lists(st.booleans(), max_size=8))
@settings(deadline=None, max_examples=25)
def test_states_are_interchangeable_with_gradscalers(before: list[bool], after: list[bool]) -> None:
    options = {"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    ours, theirs = LossScaler(CPU, **options), Theirs(**options)
    theirs.scaler.scale(torch.ones(()))
    for overflow in before:
        update(ours, overflow)
        theirs.update(overflow)
    loaded, given_ours = LossScaler(CPU), Theirs()
    loaded.load_state_dict(theirs.scaler.state_dict())
    given_ours.scaler.load_state_dict(ours.state_dict())
    for overflow in after:
        update(loaded, overflow)
        given_ours.update(overflow)
    assert loaded.state_dict() == given_ours.scaler.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0.0},
        {"init_scale": -1.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
    ],
)
def test_settings_that_are_no_scale_are_refused(options: dict) -> None:
    with pytest.raises(samestep.ConfigError, match="a scale is positive"):
        LossScaler(CPU, **options)


def make_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    x, y = torch.randn(48, 6), torch.randint(3, (48,))
    x[20:24] *= 3e4  # overflows fp16's gradients at most scales
    return x, y


def test_a_whole_fp16_run_has_the_scale_of_a_hand_written_loop_at_each_step() -> None:
    net, (x, y) = make_net(), make_data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
    theirs = []
    for start in range(0, 48, 4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x[start : start + 4])
        scaler.scale(F.cross_entropy(out.float(), y[start : start + 4])).backward()
        scaler.step(optimizer)
        scaler.update()
        theirs.append(scaler.get_scale())

    ours: list[Any] = []
    with quiet_run(precision="fp16", init_scale=2.0**22, growth_interval=3) as run:
        twin = make_net()
        model, _ = run.prepare(twin, torch.optim.SGD(twin.parameters(), lr=0.05))
        run._engine.on_record.append(lambda record: ours.append(record.scale))
        for window in run.loader((x, y), batch_size=4):
            for a, b in window:
                window.backward(F.cross_entropy(model(a), b))
            window.step()
        assert run.loss_scale == theirs[-1]
        assert run.skips > 0
        assert run.skips + run.updates == 12
    assert ours == theirs
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

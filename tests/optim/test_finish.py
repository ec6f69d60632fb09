"""Finish: unscale, average, clip, step or skip, as one pass that equals torch's separate ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import samestep
from samestep.optim.finish import check_clip, finish, total_norm
from samestep.precision.scaler import LossScaler
from tests.cases.helpers import quiet_run

CPU = torch.device("cpu")
KINDS: dict[str, Any] = {
    "adam": lambda p, **how: torch.optim.Adam(p, lr=0.1, weight_decay=0.01, **how),
    "adam amsgrad": lambda p, **how: torch.optim.Adam(p, lr=0.1, amsgrad=True, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, **how),
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, **how),
    "sgd momentum": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, **how),
    "sgd nesterov": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **how),
    "sgd dampening": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.1, **how),
}
WAYS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for loop": {"foreach": False},
}


def params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 4), (5,), ()]]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in [(3, 4), (5,), ()]]


def set_scaled(ours: list[nn.Parameter], grads: list[torch.Tensor], factor: float) -> None:
    for param, grad in zip(ours, grads, strict=True):
        param.grad = grad * factor


HOME = ["host"]


@pytest.fixture(autouse=True, params=["host", "device"])
def home(request: pytest.FixtureRequest) -> None:
    """Where numbers live: Python floats as on a CPU, or tensors that nobody reads, as on a GPU."""
    HOME[0] = request.param


def number(value: float) -> Any:
    return value if HOME[0] == "host" else torch.tensor(value, dtype=torch.float64)


def close(optimizers: Any, divisor: float = 1.0, loss: float = 1.0, **rest: Any) -> Any:
    numbers = {"divisor": number(divisor), "loss": number(loss)}
    return finish(optimizers if isinstance(optimizers, list) else [optimizers], **numbers, **{"scaler": None, **rest})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [{}, {"clip_norm": 0.5}, {"clip_norm": 1e6}, {"clip_value": 0.3}])
def test_finish_is_unscale_then_clip_then_step(kind: str, way: str, limit: dict[str, float]) -> None:
    ours, theirs = params(), params()
    optimizer, reference = KINDS[kind](ours, **WAYS[way]), KINDS[kind](theirs, foreach=False)
    scaler = LossScaler(CPU, init_scale=1024.0)
    for step in range(4):
        grads = gradients(step)
        set_scaled(ours, grads, 1024.0 * 3)
        outcome = close(optimizer, 3.0, scaler=scaler, **limit)
        set_scaled(theirs, grads, 1.0)
        norm = torch.nn.utils.get_total_norm(grads)
        if "clip_norm" in limit:
            torch.nn.utils.clip_grad_norm_(theirs, limit["clip_norm"])
        if "clip_value" in limit:
            torch.nn.utils.clip_grad_value_(theirs, limit["clip_value"])
        reference.step()
        assert outcome.skipped == outcome.overflow == 0
        assert float(outcome.grad_norm) == pytest.approx(float(norm), rel=1e-6)
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("skipped_step", [0, 2])
def test_a_skipped_step_is_as_if_it_never_happened(kind: str, way: str, bad: float, skipped_step: int) -> None:
    ours, never = params(), params()
    optimizer, reference = KINDS[kind](ours, **WAYS[way]), KINDS[kind](never, **WAYS[way])
    for step in range(4):
        if step == skipped_step:
            before = [param.detach().clone() for param in ours]
            grads = gradients(50)
            grads[1][2] = bad
            set_scaled(ours, grads, 1.0)
            outcome = close(optimizer)
            assert outcome.skipped == outcome.overflow == 1
            assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
        for each, which in ((ours, optimizer), (never, reference)):
            set_scaled(each, gradients(step), 1.0)
            close(which, clip_norm=1.0)
        assert all(torch.equal(a, b) for a, b in zip(ours, never, strict=True)), step
    for a, b in zip(ours, never, strict=True):
        mine, other = optimizer.state[a], reference.state[b]
        assert mine.keys() == other.keys()
        assert all(
            torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(other[name]))
            for name in mine
            if mine[name] is not None
        )


@pytest.mark.parametrize("way", WAYS)
def test_a_nonfinite_loss_skips_although_the_gradient_is_finite_and_is_no_overflow(way: str) -> None:
    ours = params()
    before = copy.deepcopy(ours)
    set_scaled(ours, gradients(0), 1.0)
    outcome = close(KINDS["adamw"](ours, **WAYS[way]), loss=float("inf"), scaler=LossScaler(CPU, init_scale=1.0))
    assert (outcome.skipped, outcome.overflow) == (1, 0)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_huge_finite_gradients_are_no_overflow_and_clip_to_the_limit(way: str) -> None:
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.full((4,), 1e20)
    outcome = close(torch.optim.SGD([param], lr=1.0, **WAYS[way]), clip_norm=2.0)
    assert (outcome.skipped, outcome.overflow) == (0, 0)
    assert float(outcome.grad_norm) == pytest.approx(2e20)
    torch.testing.assert_close(param.detach(), torch.full((4,), -1.0))


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=6))
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_norm_is_finite_exactly_when_every_element_is(values: list[float]) -> None:
    norm, norms = total_norm([torch.tensor(values[:1]), torch.tensor(values)], number(0.0))
    assert math.isfinite(norm) == all(map(math.isfinite, values))
    assert math.isfinite(norms[1]) == all(map(math.isfinite, values))
    assert math.isfinite(norms[0]) == math.isfinite(values[0])


def test_no_gradient_at_all_has_the_norm_zero_and_moves_nothing() -> None:
    ours = params()
    before = copy.deepcopy(ours)
    outcome = close(KINDS["adamw"](ours, fused=True), clip_norm=1.0)
    assert (outcome.grad_norm, outcome.skipped) == (0, 0)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


def test_a_window_of_weight_zero_is_skipped() -> None:
    ours = params()
    before = copy.deepcopy(ours)
    set_scaled(ours, gradients(0), 0.0)
    assert close(KINDS["sgd momentum"](ours, fused=True), 0.0, clip_norm=1.0).skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


@pytest.mark.parametrize(
    "ways", [("fused", "fused"), ("fused", "for loop"), ("foreach", "fused"), ("foreach", "foreach")]
)
@pytest.mark.parametrize("limit", [{"clip_norm": 0.7}, {"clip_value": 0.2}, {}])
def test_several_optimizers_have_one_norm_and_one_decision(ways: tuple[str, str], limit: dict[str, float]) -> None:
    ours, theirs = params(), params()
    both = [KINDS["sgd"](ours[:1], **WAYS[ways[0]]), KINDS["adamw"](ours[1:], **WAYS[ways[1]])]
    reference = [KINDS["sgd"](theirs[:1]), KINDS["adamw"](theirs[1:])]
    for step in range(3):
        set_scaled(ours, gradients(step), 5.0)
        outcome = close(both, 5.0, **limit)
        set_scaled(theirs, gradients(step), 1.0)
        assert float(outcome.grad_norm) == pytest.approx(torch.nn.utils.get_total_norm(gradients(step)).item())
        if "clip_norm" in limit:
            torch.nn.utils.clip_grad_norm_(theirs, limit["clip_norm"])
        if "clip_value" in limit:
            torch.nn.utils.clip_grad_value_(theirs, limit["clip_value"])
        for each in reference:
            each.step()
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    before = copy.deepcopy(ours)
    set_scaled(ours, gradients(9), 1.0)
    ours[2].grad = torch.tensor(float("inf"))  # of the second optimizer only
    assert close(both).skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


@pytest.mark.parametrize("limit", [{}, {"clip_norm": 0.5}, {"clip_value": 0.4}])
def test_sparse_gradients_count_a_repeated_row_as_its_sum(limit: dict[str, float]) -> None:
    ours, theirs = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    ours.grad = torch.sparse_coo_tensor([[1, 3, 1]], torch.ones(3, 2) * 6.0, (4, 2), check_invariants=True)
    theirs.grad = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]])
    outcome = close(torch.optim.SGD([ours], lr=0.1), 6.0, **limit)
    assert float(outcome.grad_norm) == pytest.approx(theirs.grad.norm().item())
    if "clip_norm" in limit:
        torch.nn.utils.clip_grad_norm_([theirs], 0.5)
    if "clip_value" in limit:
        torch.nn.utils.clip_grad_value_([theirs], 0.4)
    torch.optim.SGD([theirs], lr=0.1).step()
    torch.testing.assert_close(ours, theirs)


def test_a_parameter_shared_by_two_groups_counts_once_in_the_norm() -> None:
    shared = nn.Parameter(torch.zeros(1))
    shared.grad = torch.tensor([3.0])
    outcome = close([torch.optim.SGD([shared], lr=0.0), torch.optim.SGD([shared], lr=0.0)])
    assert outcome.grad_norm == 3.0


@pytest.mark.parametrize("limits", [(1.0, 1.0), (0.0, None), (-1.0, None), (None, 0), (float("nan"), None)])
def test_limits_that_cannot_be_obeyed_are_refused(limits: tuple[Any, Any]) -> None:
    with pytest.raises(samestep.ConfigError, match="clip"):
        check_clip(*limits)


def test_an_optimizer_that_needs_a_closure_is_refused_by_name() -> None:
    net = nn.Linear(1, 1)
    with quiet_run() as run, pytest.raises(samestep.ConfigError, match=r"LBFGS.*closure"):
        run.prepare(net, torch.optim.LBFGS(net.parameters()))


def test_an_optimizer_without_anything_to_train_is_refused() -> None:
    net = nn.Linear(1, 1).requires_grad_(False)
    with quiet_run() as run, pytest.raises(samestep.ModelError, match="without a parameter that requires a gradient"):
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

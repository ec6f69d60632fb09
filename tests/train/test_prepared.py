"""The prepared model behaves as the user's own, and is used, moved and cast only through it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.testing import RanksFailed, run_ranks
from tests.cases.helpers import Weight, quiet_run


class Named(nn.Module):
    """Has attributes and methods that loops read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.b(self.a(x)) * self.temperature}

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_names_attributes_and_methods_are_the_models_own() -> None:
    with quiet_run() as run:
        net = Named()
        model = run.prepare(net)
        assert list(model.state_dict()) == list(net.state_dict())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
        assert [name for name, _ in model.named_modules()] == ["", "a", "b"]
        model.temperature = 3.0
        assert net.temperature == 3.0
        assert model.a is net.a
        assert model.doubled(torch.ones(1)).item() == 2.0
        assert not hasattr(model, "nothing")
        model.load_state_dict({name: torch.zeros_like(value) for name, value in net.state_dict().items()})
        assert net.a.weight.sum() == 0
        assert not model.eval().training
        assert not net.b.training
        assert model.train().training
        assert net.b.training


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_assign_is_refused_and_ordinary_loading_keeps_the_optimizers_hold(precision: str) -> None:
    with quiet_run(precision=precision) as run:
        net = nn.Linear(2, 1)
        model = run.prepare(net)
        weight = net.weight
        with pytest.raises(samestep.ModelError, match="assign=True"):
            model.load_state_dict(net.state_dict(), assign=True)
        model.load_state_dict(net.state_dict())
        assert net.weight is weight


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to("cpu"), lambda m: m.double(), lambda m: m.cuda()])
def test_moving_or_casting_the_prepared_model_is_refused(move: Any) -> None:
    with quiet_run() as run:
        net = nn.Linear(2, 1)
        model = run.prepare(net)
        with pytest.raises(samestep.ModelError, match="moved or cast"):
            move(model)
        assert net.weight.dtype == torch.float32


@pytest.mark.parametrize("cast", [lambda net: net.half(), lambda net: net[1].double(), lambda net: net[0].bfloat16()])
def test_casting_the_inner_model_is_noticed_at_the_next_window_with_the_names(cast: Any) -> None:
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(
            samestep.ModelError, match=r"cast after prepare: [01]\.weight is torch\.\w+, was torch\.float32"
        ):
            for window in run.loader(torch.ones(4, 2), batch_size=2):
                for (x,) in window:
                    window.backward(model(x).mean())
                window.step()
                cast(net)
        assert run.step == 1


@pytest.mark.parametrize("exchange", ["fast", "exact"])
def test_preparing_twice_is_refused(exchange: str) -> None:
    with quiet_run(exchange=exchange) as run:
        model = run.prepare(nn.Linear(2, 1))
        with pytest.raises(samestep.ModelError, match="already wrapped in Prepared"):
            run.prepare(model)


def test_preparing_a_parameter_or_an_optimizer_twice_is_refused() -> None:
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run.prepare(net, optimizer)
        for again in (net, net[0], nn.Sequential(nn.Linear(1, 1), net)):
            with pytest.raises(samestep.ModelError, match=r"weight belongs to a model that was prepared before"):
                run.prepare(again)
        with pytest.raises(samestep.ConfigError, match="same SGD to prepare twice"):
            run.prepare(optimizer)


def a_ddp_model() -> str:
    with quiet_run() as run:
        net = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        with pytest.raises(samestep.ModelError) as error:
            run.prepare(net)
        return str(error.value)


def test_a_ddp_model_is_refused() -> None:
    for message in run_ranks(a_ddp_model, 2):
        assert "already wrapped in DistributedDataParallel" in message


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with quiet_run() as run:
        net, other = Weight(), nn.Linear(3, 2)
        with pytest.raises(samestep.ModelError, match=r"SGD holds a parameter of shape \(2, 3\) of no prepared model"):
            run.prepare(net, torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1))


@pytest.mark.parametrize("thing", [None, 3, [nn.Linear(1, 1)], torch.ones(1), nn.Linear])
def test_anything_else_to_prepare_is_refused(thing: Any) -> None:
    with quiet_run() as run, pytest.raises(samestep.ConfigError, match=r"to prepare; prepare takes modules"):
        run.prepare(thing)


def test_a_lazy_model_is_refused_until_it_has_shapes() -> None:
    with quiet_run() as run:
        net = nn.Sequential(nn.LazyLinear(2))
        with pytest.raises(samestep.ModelError, match=r"0\.weight is not initialised"):
            run.prepare(net)
        net(torch.ones(1, 3))
        run.prepare(net)


def test_things_come_back_in_the_order_given_and_one_alone_not_in_a_tuple() -> None:
    with quiet_run() as run:
        net, other = Weight(), Weight()
        optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
        first, back, second = run.prepare(net, optimizer, other)
        assert back is optimizer
        assert (first.module, second.module) == (net, other)
        assert run.prepare(Weight()).w.item() == 1.0


def differing(what: str) -> None:
    with quiet_run(timeout_s=20) as run:
        odd = run.rank == 1
        net: nn.Module = nn.Sequential(nn.Linear(2, 3 if odd and what == "shape" else 2), nn.Linear(2, 2))
        if odd and what == "number":
            net.append(nn.Linear(2, 2))
        if odd and what == "dtype":
            net[1].double()
        if odd and what == "frozen":
            net[1].weight.requires_grad_(False)
        if odd and what == "buffer":
            net[0].register_buffer("extra", torch.ones(1))
        run.prepare(net)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("shape", r"0\.weight.*\[3, 2\]"),
        ("number", "4 tensors.*6 tensors"),
        ("dtype", r"1\.weight.*float64"),
        ("frozen", r"1\.weight.*False"),
        ("buffer", "extra|4 tensors.*5 tensors"),
    ],
)
def test_a_model_that_differs_between_ranks_is_refused_on_all_naming_where(what: str, named: str) -> None:
    with pytest.raises(RanksFailed, match=named) as failed:
        run_ranks(differing, 2, what)
    assert {type(error) for error in failed.value.errors.values()} == {samestep.RankError}
    assert len(failed.value.errors) == 2


def started_differently() -> tuple[float, float]:
    with quiet_run() as run:
        net = nn.BatchNorm1d(1)
        nn.init.constant_(net.weight, 5.0 + run.rank)
        net.running_mean.fill_(7.0 + run.rank)
        run.prepare(net)
        return net.weight.item(), net.running_mean.item()


def test_all_ranks_start_from_mains_weights_and_buffers() -> None:
    assert run_ranks(started_differently, 3) == [(5.0, 7.0)] * 3


def test_the_inner_model_can_be_copied_and_pickled_after_training() -> None:
    with quiet_run() as run:
        net = nn.Linear(2, 1)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for window in run.loader(torch.ones(4, 2), batch_size=2):
            for (x,) in window:
                window.backward(model(x).mean())
            window.step()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin.weight, net.weight)
    assert torch.equal(model(torch.ones(1, 2)), net(torch.ones(1, 2))), "and used after the run"

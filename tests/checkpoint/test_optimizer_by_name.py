import json

import pytest
import torch
from torch import nn

from samestep.checkpoint.optimizer import number_optimizer, optimizer_from_names, optimizer_to_names, unnamed
from samestep.checkpoint.tree import flatten, unflatten
from samestep.errors import CheckpointError

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "tensor_lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
}


def model_of(seed: int) -> nn.Module:
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(param): name for name, param in model.named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.default_generator.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


def through_a_file(state):
    value, tensors = flatten(state)
    return unflatten(json.loads(json.dumps(value)), {name: tensor.clone() for name, tensor in tensors.items()})


def continued(model: nn.Module, saved: dict, make, order: list[int] | None = None) -> nn.Module:
    """A model with the weights of `model`, its optimizer made anew from parameters in `order` and restored."""
    again = model_of(1)
    again.load_state_dict(model.state_dict())
    params = list(again.parameters())
    optimizer = make([params[number] for number in order] if order else params)
    optimizer_from_names(optimizer, names_of(again), saved)
    train(again, optimizer, range(4, 8))
    return again


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("order", [None, [3, 1, 0, 2]])
def test_training_continues_as_if_not_interrupted_in_any_order_of_parameters(name, order):
    model = model_of(0)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, range(4))
    saved = through_a_file(optimizer_to_names(optimizer, names_of(model)))
    again = continued(model, saved, OPTIMIZERS[name], order)
    train(model, optimizer, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_groups_added_later_come_back_with_their_own_hyperparameters():
    def make(params):
        optimizer = torch.optim.AdamW(params[:2], lr=0.1)
        optimizer.add_param_group({"params": params[2:], "lr": 0.3, "weight_decay": 0.5})
        return optimizer

    model = model_of(0)
    optimizer = make(list(model.parameters()))
    train(model, optimizer, range(4))
    optimizer.param_groups[1]["lr"] = 0.01
    saved = through_a_file(optimizer_to_names(optimizer, names_of(model)))
    assert [group["names"] for group in saved["groups"]] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    again = continued(model, saved, make)
    train(model, optimizer, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_an_optimizer_that_never_stepped_comes_back():
    model = model_of(0)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    saved = through_a_file(optimizer_to_names(optimizer, names_of(model)))
    assert saved["state"] == {}
    continued(model, saved, OPTIMIZERS["adamw"])


def test_how_a_step_is_computed_stays_the_live_optimizers_choice():
    model = model_of(0)
    fused = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    train(model, fused, range(1))
    plain = torch.optim.AdamW(model.parameters(), lr=0.2, foreach=False)
    optimizer_from_names(plain, names_of(model), through_a_file(optimizer_to_names(fused, names_of(model))))
    group = plain.param_groups[0]
    assert (group["lr"], group["fused"], group["foreach"]) == (0.1, None, False)
    train(model, plain, range(1))


def test_hyperparameters_that_the_file_does_not_know_keep_their_live_value():
    model = model_of(0)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    saved = optimizer_to_names(optimizer, names_of(model))
    del saved["groups"][0]["nesterov"]
    optimizer.param_groups[0]["nesterov"] = True
    optimizer_from_names(optimizer, names_of(model), saved)
    assert optimizer.param_groups[0]["nesterov"] is True


def test_an_optimizer_of_named_parameters_keeps_its_names_beside_its_parameters():
    model = model_of(0)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    saved = through_a_file(optimizer_to_names(optimizer, names_of(model)))
    other = torch.optim.SGD(list(model.named_parameters())[::-1], lr=0.2)
    optimizer_from_names(other, names_of(model), saved)
    assert other.param_groups[0]["param_names"] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    assert other.param_groups[0]["lr"] == 0.1


def test_state_is_cast_by_torchs_rules():
    model = model_of(0)
    optimizer = OPTIMIZERS["adamw_fused"](model.parameters())
    train(model, optimizer, range(1))
    saved = through_a_file(optimizer_to_names(optimizer, names_of(model)))
    low = model_of(0).bfloat16()
    live = OPTIMIZERS["adamw_fused"](low.parameters())
    optimizer_from_names(live, names_of(low), saved)
    state = live.state[next(low.parameters())]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.bfloat16, torch.float32)


def refuses(message: str, optimizer, names, saved) -> None:
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(CheckpointError, match=message):
        optimizer_from_names(optimizer, names, saved)
    assert [dict(group) for group in optimizer.param_groups] == before


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing():
    model = model_of(0)
    names, params = names_of(model), list(model.parameters())
    saved = optimizer_to_names(torch.optim.SGD(params[:3], lr=0.1), names)
    refuses(r"group 0: 1 missing in the checkpoint: 1\.bias; 0 unexpected", torch.optim.SGD(params, 0.5), names, saved)
    refuses(r"group 0: 0 missing .*: none; 1 unexpected: 1\.weight", torch.optim.SGD(params[:2], 0.5), names, saved)
    two = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:3]}], 0.5)
    refuses("has 1 parameter groups, this one has 2", two, names, saved)
    three = torch.optim.SGD(params[:3], 0.5)
    refuses("not optimizer state by name", three, names, three.state_dict())
    refuses("has optimizer state for 1.bias", three, names, {**saved, "state": {"1.bias": {}}})
    refuses(r"parameter 1 of group 0, of shape \(4,\), has no name", three, {id(params[0]): "0.weight"}, saved)


def test_state_that_belongs_to_no_parameter_is_refused():
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 3}
    with pytest.raises(CheckpointError, match=r"SGD keeps state under \['global'\]"):
        optimizer_to_names(optimizer, names_of(model))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", ["out", "in"])
def test_torchs_own_state_goes_out_and_in_and_trains_on_the_same(kind, way):
    model, other = model_of(0), model_of(0)
    groups = [{"params": [*model[0].parameters()], "lr": 0.05}, {"params": [*model[1].parameters()]}]
    optimizer = OPTIMIZERS[kind](groups)
    train(model, optimizer, range(2))
    other.load_state_dict(model.state_dict())
    again = OPTIMIZERS[kind]([{"params": [*other[0].parameters()]}, {"params": [*other[1].parameters()]}])
    if way == "out":
        again.load_state_dict(number_optimizer(through_a_file(optimizer_to_names(optimizer, names_of(model)))))
    else:
        optimizer_from_names(again, names_of(other), through_a_file(unnamed(optimizer.state_dict())))
    for trained, its_own in ((model, optimizer), (other, again)):
        train(trained, its_own, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_imported_state_that_does_not_fit_is_refused_and_changes_nothing():
    model = model_of(0)
    names, params = names_of(model), list(model.parameters())
    optimizer = OPTIMIZERS["adamw"](params)
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    refuses(r"groups of \[4\] parameters, this one of \[3\]", OPTIMIZERS["adamw"](params[:3]), names, unnamed(state))
    refuses(r"exp_avg.* of parameter \d is", OPTIMIZERS["adamw"](params[::-1]), names, unnamed(state))
    refuses("no torch optimizer's state_dict", optimizer, names, unnamed({"x": 1}))
    refuses("state for 'lost'", optimizer, names, unnamed({**state, "state": {"lost": {}}}))
    assert number_optimizer(unnamed(state)) == state

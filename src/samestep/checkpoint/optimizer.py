"""Optimizer state by parameter name instead of by number, so that it survives another order of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from samestep.errors import CheckpointError

__all__ = ["number_optimizer", "optimizer_from_names", "optimizer_to_names", "unnamed"]

# How a step is computed, and what the parameters are called, belong to the live optimizer; the rest is what is computed.
_LIVE = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
_NUMBERED = "numbered"
# State of torch's optimizers that has the parameter's shape; other state may have any (Adafactor's row_var).
_LIKE_PARAM = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "prev"}
_SHOWN = 10


def optimizer_to_names(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The state of `optimizer`, its tensors not copied.

    Args:
        optimizer: any torch optimizer.
        names: {id of a parameter: its name}.

    Returns:
        {"groups": [{"names": [...], hyperparameters}], "state": {name: {...}}}.

    Raises:
        CheckpointError: for a parameter without a name, or state that belongs to no parameter.
    """
    state = optimizer.state_dict()
    known: dict[Any, str] = {}
    groups = []
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        own = _names(group["params"], names, index)
        known.update(zip(saved["params"], own, strict=True))
        hyperparameters = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        groups.append({"names": own, **hyperparameters})
    if foreign := [key for key in state["state"] if key not in known]:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps state under {foreign[:_SHOWN]}, which is no parameter",
            "optimizer state is saved by parameter name",
            "register an object with state_dict and load_state_dict for it",
        )
    return {"groups": groups, "state": {known[number]: values for number, values in state["state"].items()}}


def optimizer_from_names(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Load what `optimizer_to_names` gave into a live optimizer, by torch's own rules of casting and placing.

    The live optimizer keeps its own foreach, fused and capturable: they say how a step is computed, not what.

    Args:
        optimizer: with the same groups of the same parameters, in any order within a group.
        names: {id of a parameter: its name}.
        saved: from `optimizer_to_names`, or from `unnamed`.

    Raises:
        CheckpointError: when the groups or their parameters are not the same.
    """
    if isinstance(saved, Mapping) and _NUMBERED in saved:
        saved = _named(optimizer, names, saved[_NUMBERED])
    current = optimizer.state_dict()
    try:
        groups, values = list(saved["groups"]), dict(saved["state"])
        theirs = [list(group["names"]) for group in groups]
    except (KeyError, TypeError) as e:
        raise CheckpointError(
            f"this is not optimizer state by name ({type(e).__name__}: {e})",
            "it has groups with names, and state",
            "pass what optimizer_to_names gave",
        ) from None
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} parameter groups, this one has {len(optimizer.param_groups)}",
            "a restart makes the same groups, those added later included",
            "call add_param_group for them before loading",
        )
    numbers: dict[str, int] = {}
    rebuilt = []
    for index, (live, own, old) in enumerate(zip(optimizer.param_groups, current["param_groups"], groups, strict=True)):
        mine = _names(live["params"], names, index)
        _check_same(index, mine, theirs[index])
        numbers.update(zip(mine, own["params"], strict=True))
        rebuilt.append(_rebuilt(own, old))
    if lost := sorted(map(str, values.keys() - numbers.keys())):
        raise CheckpointError(
            f"the checkpoint has optimizer state for {', '.join(lost[:_SHOWN])}, which no group of it holds",
            "state belongs to a parameter",
            "use an earlier checkpoint",
        )
    state = {numbers[name]: value for name, value in values.items()}
    optimizer.load_state_dict({"state": state, "param_groups": rebuilt})


def _names(params: list[torch.Tensor], names: Mapping[int, str], index: int) -> list[str]:
    own = [names.get(id(param)) for param in params]
    found = [name for name in own if name is not None]
    if len(found) != len(own):
        first = own.index(None)
        raise CheckpointError(
            f"parameter {first} of group {index}, of shape {tuple(params[first].shape)}, has no name",
            "each parameter of an optimizer belongs to a model that is saved",
            "prepare the model it belongs to, or leave it out of the optimizer",
        )
    return found


def _check_same(index: int, mine: list[str], theirs: list[str]) -> None:
    missing, unexpected = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    if not missing and not unexpected and len(mine) == len(theirs):
        return
    raise CheckpointError(
        f"parameter group {index}: {len(missing)} missing in the checkpoint: {', '.join(missing[:_SHOWN]) or 'none'}; "
        f"{len(unexpected)} unexpected: {', '.join(unexpected[:_SHOWN]) or 'none'}",
        "a restart gives each group the parameters it had",
        "build the optimizer as the run that saved it did",
    )


def _rebuilt(own: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """A group for load_state_dict: saved hyperparameters, live parameters; tensors (a tensor lr) where the live are."""
    group = dict(own)
    for key, value in old.items():
        if key == "names" or (key in _LIVE and key in own):
            continue
        live = own.get(key)
        if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
            value = value.to(live.device)
        group[key] = value
    return group


def number_optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A torch optimizer's own state_dict from state by name, for programs that load one; the tensors are not copied.

    Args:
        saved: from `optimizer_to_names` or `unnamed`.
    """
    if _NUMBERED in saved:
        return dict(saved[_NUMBERED])
    numbers: dict[str, int] = {}
    groups = []
    for group in saved["groups"]:
        own = [numbers.setdefault(name, len(numbers)) for name in group["names"]]
        groups.append({**{key: value for key, value in group.items() if key != "names"}, "params": own})
    return {"state": {numbers[name]: values for name, values in saved["state"].items()}, "param_groups": groups}


def unnamed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Another program's optimizer state_dict as `optimizer_from_names` takes it: names come from the live optimizer."""
    return {_NUMBERED: dict(saved)}


def _named(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """State by name from a torch state_dict, whose parameters are numbered in the order in which the live one has them.

    Raises:
        CheckpointError: when groups, numbers or shapes do not fit.
    """
    live = [group["params"] for group in optimizer.param_groups]
    try:
        groups, state = list(saved["param_groups"]), dict(saved["state"])
        numbers = [list(group["params"]) for group in groups]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise _misfit(f"it is no torch optimizer's state_dict ({type(e).__name__}: {e})") from None
    if [len(own) for own in numbers] != [len(own) for own in live]:
        raise _misfit(f"it has groups of {[*map(len, numbers)]} parameters, this one of {[*map(len, live)]}")
    pairs = [pair for old, own in zip(numbers, live, strict=True) for pair in zip(old, own, strict=True)]
    params = dict(pairs)
    for number, values in state.items():
        if number not in params or not isinstance(values, Mapping):
            raise _misfit(f"it has state for {number!r}, which is no parameter")
        shape = params[number].shape
        for key in sorted(_LIKE_PARAM & values.keys()):
            value = values[key]
            if isinstance(value, torch.Tensor) and value.shape != shape:
                raise _misfit(f"{key} of parameter {number} is {tuple(value.shape)}, the parameter {tuple(shape)}")
    called = dict(zip(params, _names([*params.values()], names, 0), strict=True))
    return {
        "groups": [
            {**{key: value for key, value in group.items() if key not in _LIVE}, "names": [called[n] for n in own]}
            for own, group in zip(numbers, groups, strict=True)
        ],
        "state": {called[number]: values for number, values in state.items()},
    }


def _misfit(why: str) -> CheckpointError:
    return CheckpointError(
        f"the imported optimizer state does not fit: {why}",
        "its parameters have numbers only, in the order in which the optimizer was given them",
        "build the optimizer as the other program did, or import --without-optimizer",
    )

"""Optimizer state by parameter name instead of by number, so that it survives another order of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from samestep.errors import CheckpointError

__all__ = ["optimizer_from_names", "optimizer_to_names"]


def optimizer_to_names(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The state of `optimizer`.

    Args:
        optimizer: any torch optimizer.
        names: {id of a parameter: its name}.

    Returns:
        {"groups": [{"names": [...], hyperparameters}], "state": {name: {...}}}.
    """
    state = optimizer.state_dict()
    number_to_name = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for param, number in zip(group["params"], saved["params"], strict=True):
            number_to_name[number] = names[id(param)]
    groups = [
        {"names": [number_to_name[n] for n in group["params"]], **{k: v for k, v in group.items() if k != "params"}}
        for group in state["param_groups"]
    ]
    return {"groups": groups, "state": {number_to_name[number]: values for number, values in state["state"].items()}}


def optimizer_from_names(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Load what `optimizer_to_names` gave into a live optimizer, by torch's own rules of casting and placing.

    Raises:
        CheckpointError: when the groups or their parameters are not the same.
    """
    live, groups = optimizer.param_groups, saved["groups"]
    if len(live) != len(groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} parameter groups, this one has {len(live)}",
            "a restart makes the same groups, those added later included",
            "add them before prepare",
        )
    current = optimizer.state_dict()
    numbers: dict[str, int] = {}
    rebuilt = []
    for index, (group, own, old) in enumerate(zip(live, current["param_groups"], groups, strict=True)):
        mine = [names[id(param)] for param in group["params"]]
        if set(mine) != set(old["names"]):
            missing = sorted(set(mine) - set(old["names"]))
            unexpected = sorted(set(old["names"]) - set(mine))
            raise CheckpointError(
                f"parameter group {index}: the checkpoint lacks {missing[:10]} and has {unexpected[:10]} besides",
                "a restart gives the optimizer the same parameters",
                "use the script that saved it",
            )
        numbers.update(zip(mine, own["params"], strict=True))
        rebuilt.append({**{k: v for k, v in old.items() if k != "names"}, "params": own["params"]})
    state = {numbers[name]: values for name, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": rebuilt})

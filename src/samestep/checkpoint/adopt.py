"""Another program's checkpoint as a checkpoint of a run, which a script with the same model then continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.optimizer import name_optimizer
from samestep.checkpoint.peers import Foreign
from samestep.checkpoint.storage import Store
from samestep.errors import CheckpointError

__all__ = ["adopt", "strip_prefix"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def adopt(
    foreign: Foreign, directory: Path, *, seed: int = 0, epoch: int | None = None, step: int | None = None
) -> Path:
    """Write the first checkpoint of the run in `directory`; its path.

    The run that continues it begins at the start of epoch `epoch`: another program's order of samples cannot be continued
    in its middle. Its script prepares as many models, optimizers and schedules as the checkpoint holds.

    Args:
        foreign: from `read_foreign`.
        directory: the run's; without checkpoints.
        seed: what the script passes to Run.
        epoch: epochs finished; None: what the checkpoint says, and 0 if it does not.
        step: optimizer steps done; likewise.

    Raises:
        CheckpointError: when there are checkpoints, or an optimizer's state cannot be given names.
    """
    store = Store(directory / "checkpoints", keep_last=None)
    if steps := store.steps():
        raise CheckpointError(
            f"{store.directory} holds checkpoints (steps {steps[0]} to {steps[-1]})",
            "an import is the first checkpoint of a run",
            "pass a new directory",
        )
    epoch = foreign.epoch or 0 if epoch is None else epoch
    step = foreign.step or 0 if step is None else step
    counters = {"step": step, "updates": step, "skips": 0, "consecutive_skips": 0}
    state: dict[str, Any] = {"engine": {**counters, "reference": None, "reduction": "mean", "scaler": foreign.scaler}}
    for number, model in enumerate(foreign.models):
        state[f"model{number}"] = model
    for number, optimizer in enumerate(foreign.optimizers):
        state[f"optimizer{number}"] = _named(optimizer, foreign, number)
    for number, schedule in enumerate(foreign.schedules):
        state[f"schedule{number}"] = schedule
    meta = {
        "position": {"epoch": epoch},
        "loaders": {},
        "config": {"seed": seed},
        "precision": None,
        "world_size": None,
        "imported": foreign.kind,
    }
    return store.save(step, state, meta)


def _named(optimizer: Mapping[str, Any], foreign: Foreign, number: int) -> dict[str, Any]:
    """By name: of the model with the optimizer's number, or of all models."""
    several = len(foreign.models) > 1
    shapes = [_parameters(model, f"{n}:" if several else "") for n, model in enumerate(foreign.models)]
    if several and len(foreign.optimizers) == len(foreign.models):
        return name_optimizer(optimizer, shapes[number])
    return name_optimizer(optimizer, {name: shape for one in shapes for name, shape in one.items()})


def _parameters(model: Mapping[str, Any], begin: str) -> dict[str, torch.Size]:
    """A state_dict's parameters: all of its floating tensors but BatchNorm's buffers, tied ones once."""
    return {f"{begin}{name}": value.shape for name, value in _distinct(model)}


def _distinct(model: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        place = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
        if name.rpartition(".")[2] not in _BUFFERS and place not in seen:
            seen.add(place)
            yield name, value


def strip_prefix(model: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """The tensors whose names begin with `prefix`, without it, and the names of the others.

    Raises:
        CheckpointError: when none begins so.
    """
    kept = {name.removeprefix(prefix): value for name, value in model.items() if name.startswith(prefix)}
    if not kept:
        raise CheckpointError(
            f"no name begins with {prefix!r}", f"they begin with {', '.join([*model][:3])}", "pass another prefix"
        )
    return kept, [name for name in model if not name.startswith(prefix)]

"""Another program's checkpoint as a checkpoint of a run, which a script with the same model then continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.checkpoint.optimizer import unnamed
from samestep.checkpoint.peers import Foreign
from samestep.checkpoint.storage import Store
from samestep.errors import CheckpointError

__all__ = ["adopt", "strip_prefix"]

_SCALE = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def adopt(
    foreign: Foreign, directory: Path, *, seed: int = 0, epoch: int | None = None, step: int | None = None
) -> Path:
    """Write the first checkpoint of the run in `directory`; its path.

    The run that continues it begins at the start of epoch `epoch`: another program's order of samples cannot be continued
    in its middle. Its script prepares as many models, optimizers and schedules as the checkpoint holds, and gives the
    optimizers their parameters in the order they had (that of `model.parameters()`, nearly always).

    Args:
        foreign: from `read_foreign`.
        directory: the run's; without checkpoints.
        seed: what the script passes to Run.
        epoch: epochs finished; None: what the checkpoint says, and 0 if it does not.
        step: optimizer steps done; likewise.

    Raises:
        CheckpointError: when there are checkpoints, or the other one holds what JSON and tensors do not.
    """
    store = Store(directory / "checkpoints", keep_last=None)
    if steps := store.steps():
        raise CheckpointError(
            f"{store.directory} holds checkpoints (steps {steps[0]} to {steps[-1]})",
            "an import is the first checkpoint of a run",
            "pass a new directory",
        )
    if foreign.scaler is not None and (lost := _SCALE - foreign.scaler.keys()):
        raise CheckpointError(
            f"the imported loss scale has no {', '.join(sorted(lost))}", "it is torch.amp.GradScaler's", "leave it out"
        )
    epoch = foreign.epoch or 0 if epoch is None else epoch
    step = foreign.step or 0 if step is None else step
    counters = {"step": step, "updates": step, "skips": 0, "consecutive_skips": 0}
    state: dict[str, Any] = {"engine": {**counters, "reference": None, "reduction": "mean", "scaler": foreign.scaler}}
    for number, model in enumerate(foreign.models):
        state[f"model{number}"] = model
    for number, optimizer in enumerate(foreign.optimizers):
        state[f"optimizer{number}"] = unnamed(optimizer)
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

"""Weights from any file into a model, before training: by name, strictly, or all but what is to be trained anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.checkpoint.names import canonical, match
from samestep.checkpoint.peers import read_foreign
from samestep.checkpoint.storage import Checkpoint
from samestep.checkpoint.survey import find
from samestep.errors import CheckpointError

__all__ = ["Loaded", "load_weights", "load_whole", "model_of", "read_weights"]

_SHOWN = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_weights` did."""

    path: Path
    loaded: list[str]
    """The model's names that have the file's values now."""
    left: list[str]
    """The model's names that kept their own values."""
    unused: list[str]
    """The file's names that went nowhere, sorted."""

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} of {len(self.loaded) + len(self.left)} tensors loaded from {self.path}"]
        for title, names in (("left as they were", self.left), ("in the file and not used", self.unused)):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                parts.append(f"{title}: {', '.join(names[:_SHOWN])}{more}")
        return "; ".join(parts)


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    partial: bool | str | Sequence[str] = False,
    rename: Mapping[str, str] | None = None,
    ema: bool = False,
    number: int = 0,
    step: int | None = None,
) -> Loaded:
    """Load a local file's weights into `model`, on whatever device it is, before `run.prepare`. Runs no code from the file.

    All names and shapes must match, or nothing is loaded. Wrappers' beginnings (module., _orig_mod., _forward_module.) and
    tied weights that are stored once are understood. Values are cast to the model's dtypes.

    Example:
        >>> import samestep, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> torch.save({"body.0.weight": torch.zeros(8, 4), "body.0.bias": torch.zeros(8)}, "/tmp/body.pt")
        >>> print(samestep.load_weights(net, "/tmp/body.pt", partial="1.*", rename={"body.": ""}))
        2 of 4 tensors loaded from /tmp/body.pt; left as they were: 1.weight, 1.bias

    Args:
        model: not prepared yet.
        path: a run's directory or a checkpoint's; a safetensors file; a file of torch.save; a Lightning checkpoint; a
            directory of Accelerate or of shards with their index.
        partial: patterns of the model's names that keep their values whatever the file holds ("head.*"); True: whatever
            does not match does.
        rename: {name in the file: the model's}; {"model.": ""} takes a beginning away, {"": "body."} puts one before.
        ema: of a run's checkpoint, the averages instead of the weights.
        number: which model, where there are several.
        step: which of a run's checkpoints; None: the newest whole one.

    Returns:
        What was loaded, what was left, what went unused; `print` it.

    Raises:
        CheckpointError: for a file that cannot be read, or names and shapes that do not match; the model is unchanged.
    """
    state = model.state_dict()
    if meta := [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise CheckpointError(
            f"the model's {meta[0]} is on the meta device",
            "it has no memory to load into",
            "call model.to_empty(...) first",
        )
    saved = read_weights(path, ema=ema, number=number, step=step)
    found = match(saved, state, partial=partial, rename=rename)
    for name, value in found.items():
        _check_kind(name, value, state[name])
    left = {name: value for name, value in state.items() if name not in found}
    model.load_state_dict({**found, **left}, strict=True)
    used = {id(value) for value in found.values()}
    unused = sorted(name for name, value in saved.items() if id(value) not in used)
    return Loaded(Path(path), [*found], [*left], unused)


def _check_kind(name: str, value: Any, own: Any) -> None:
    """A cast between floating dtypes rounds; one between kinds is a mistake."""
    if not (isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)) or value.dtype == own.dtype:
        return
    if (value.is_floating_point(), value.is_complex()) != (own.is_floating_point(), own.is_complex()):
        raise CheckpointError(
            f"{name} is {value.dtype} in the file and {own.dtype} in the model",
            "values are cast between floating dtypes, or between whole ones",
            "convert the file, or leave the tensor out with partial=",
        )


def read_weights(
    path: str | Path, *, ema: bool = False, number: int = 0, step: int | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of one model in a file or directory, by name, on the CPU; as `load_weights` understands them.

    Raises:
        CheckpointError: when there are none.
    """
    target = Path(path)
    if not target.exists():
        raise CheckpointError(
            f"{target} does not exist", "weights are read from a file or a directory", "check the path"
        )
    if target.is_dir() and _is_ours(target):
        return model_of(find(target, step), ema=ema, number=number)
    if ema or step is not None:
        raise CheckpointError(
            f"got {'ema' if ema else 'step'}= for {target}", "only a run's checkpoints have it", "leave it out"
        )
    models = read_foreign(target).models
    if not 0 <= number < len(models):
        raise CheckpointError(f"{target} has no model {number}", f"it has {len(models)}", "pass number=0")
    return models[number]


def _is_ours(directory: Path) -> bool:
    if (directory / "manifest.json").exists() or (directory / "checkpoints").is_dir():
        return True
    return any(directory.glob("step-????????*"))


def model_of(
    checkpoint: Checkpoint, *, ema: bool = False, number: int = 0, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The state_dict of a run's prepared model `number`, verified; with `ema`, its averages in place of its weights.

    `state` is what `load_whole` gave, where it is at hand.

    Raises:
        CheckpointError: when the checkpoint is damaged, or holds no such model or average.
    """
    state = load_whole(checkpoint) if state is None else state
    part = f"{'ema' if ema else 'model'}{number}"
    if not isinstance(state, dict) or not all(isinstance(state.get(n), dict) for n in (f"model{number}", part)):
        state = state if isinstance(state, dict) else {}
        raise CheckpointError(
            f"{checkpoint.path} holds no {part}", f"it has {', '.join(map(str, state)) or 'nothing'}", "pass another"
        )
    model: dict[str, Any] = dict(state[f"model{number}"])
    if ema:
        averages = _own_names(state[part].get("averages") or {}, model, str(checkpoint.path))
        by_id = {id(model[name]): value for name, value in averages.items()}  # tied names hold one tensor
        model = {name: by_id.get(id(value), value) for name, value in model.items()}
    return model


def load_whole(checkpoint: Checkpoint) -> Any:
    """The nested state of a checkpoint, put together from its shards if it has them.

    Raises:
        CheckpointError: when it is damaged.
    """
    if checkpoint.manifest.meta.get("layout") != "sharded":
        return checkpoint.load()
    from samestep.checkpoint.dcp import assemble  # imports much of torch.distributed

    return assemble(checkpoint)


def _own_names(averages: Mapping[str, torch.Tensor], model: Mapping[str, Any], where: str) -> dict[str, torch.Tensor]:
    """The averages under the model's names.

    Raises:
        CheckpointError: for an average of no tensor of the model.
    """
    own = {canonical(name): name for name in model}
    names = {name: name if name in model else own.get(canonical(name), "") for name in averages}
    if lost := [name for name, to in names.items() if not to]:
        raise CheckpointError(f"{where} averages {lost[0]}, which its model lacks", "", "use another checkpoint")
    return {names[name]: value for name, value in averages.items()}

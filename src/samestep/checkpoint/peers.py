"""Checkpoints of other training programs: plain torch files, safetensors, Accelerate's directories, Lightning's files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.checkpoint.foreign import is_safetensors, load_plain, read_safetensors, weights_of
from samestep.errors import CheckpointError

__all__ = ["Foreign", "read_foreign"]

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAX_INDEX_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True)
class Foreign:
    """What another program's checkpoint holds that a run can use."""

    kind: str
    """Such as "an Accelerate directory"."""
    models: list[dict[str, Any]]
    """A state_dict each."""
    optimizers: list[dict[str, Any]]
    """A torch optimizer's state_dict each."""
    schedules: list[dict[str, Any]]
    scaler: dict[str, Any] | None
    """That of torch.amp.GradScaler."""
    epoch: int | None
    """Epochs finished; None if it does not say."""
    step: int | None
    """Optimizer steps; None if it does not say."""
    unread: list[str]
    """Parts that were left alone, and why."""

    def __post_init__(self) -> None:
        parts = {"optimizer": self.optimizers, "schedule": self.schedules, "scaler": [self.scaler or {}]}
        for name, states in parts.items():
            if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
                raise CheckpointError(
                    f"{self.kind} has a {name} that is no state_dict", "a state_dict is a dict", "copy it again"
                )


def read_foreign(path: str | Path) -> Foreign:
    """Read another program's checkpoint; no code in it is run.

    Args:
        path: a file of torch.save or safetensors, a Lightning checkpoint, or a directory of
            `accelerate.Accelerator.save_state` or of safetensors shards with their index.

    Raises:
        CheckpointError: when it is none of these, is damaged, or needs code to be read.
    """
    target = Path(path)
    if target.is_dir():
        return _directory(target)
    if is_safetensors(target):
        return _only_weights("a safetensors file", [read_safetensors(target)])
    content = load_plain(target)
    if isinstance(content, Mapping) and "pytorch-lightning_version" in content:
        return _lightning(content, target)
    parts = weights_of(content, target)
    optimizer = parts["optimizer"]
    return Foreign(
        "a torch file", [parts["model"]], [optimizer] if optimizer else [], [], None, parts["epoch"], None, []
    )


def _only_weights(kind: str, models: list[dict[str, Any]]) -> Foreign:
    return Foreign(kind, models, [], [], None, None, None, [])


# Lightning ------------------------------------------------------------------------------------------------------------


def _lightning(content: Mapping[str, Any], file: Path) -> Foreign:
    """`Trainer.save_checkpoint` of one file; the keys are those of Lightning 2."""
    model = weights_of({"state_dict": content.get("state_dict")}, file)["model"]
    scaler = (
        content.get("MixedPrecision") or content.get("MixedPrecisionPlugin") or content.get("native_amp_scaling_state")
    )
    known = {"state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "pytorch-lightning_version"}
    other = sorted(str(name) for name in content.keys() - known if content[name] and content[name] is not scaler)
    return Foreign(
        kind="a Lightning checkpoint",
        models=[model],
        optimizers=content.get("optimizer_states") or [],
        schedules=content.get("lr_schedulers") or [],
        scaler=scaler or None,
        epoch=_lightning_epoch(content),
        step=content["global_step"] if type(content.get("global_step")) is int else None,
        unread=[f"{name}: has no counterpart here" for name in other],
    )


def _lightning_epoch(content: Mapping[str, Any]) -> int | None:
    """Epochs finished: as the loops count them; "epoch" alone is the number of the one that ran."""
    value: Any = content.get("loops")
    for key in ("fit_loop", "epoch_progress", "current", "processed"):
        value = value.get(key) if isinstance(value, Mapping) else None
    if type(value) is int:
        return value
    return content["epoch"] if type(content.get("epoch")) is int else None


# Accelerate -----------------------------------------------------------------------------------------------------------


def _directory(directory: Path) -> Foreign:
    models = _numbered(directory, "model", ".safetensors") or _numbered(directory, "pytorch_model", ".bin")
    if not models:
        raise _no_model(directory)
    optimizers = [_dict(file) for file in _files(directory, "optimizer", ".bin")]
    schedules = [_dict(file) for file in _files(directory, "scheduler", ".bin")]
    scaler = directory / "scaler.pt"
    unread = [f"{file.name}: is a pickle of other things than tensors" for file in sorted(directory.glob("*.pkl"))]
    unread += [f"{file.name}: samestep has an order of its own" for file in sorted(directory.glob("sampler*.bin"))]
    kind = "an Accelerate directory" if optimizers or unread else "a directory of weights"
    return Foreign(kind, models, optimizers, schedules, _dict(scaler) if scaler.exists() else None, None, None, unread)


def _no_model(directory: Path) -> CheckpointError:
    names = sorted(file.name for file in directory.iterdir())
    sharded = next((name for name in names if "fsdp" in name or name == ".metadata" or name.startswith("zero_")), None)
    if sharded:
        return CheckpointError(
            f"{directory} is a sharded checkpoint ({sharded}), whose index is a pickle",
            "loading runs no code from a file",
            "merge it where it was made (accelerate merge-weights, zero_to_fp32.py), then import the result",
        )
    return CheckpointError(
        f"{directory} holds {', '.join(names[:10]) or 'nothing'}",
        "weights stand in model.safetensors, pytorch_model.bin or shards with an index",
        "name the file that holds them",
    )


def _files(directory: Path, stem: str, suffix: str) -> list[Path]:
    """stem.suffix, stem_1.suffix, stem_2.suffix, ... as far as they go."""
    found: list[Path] = []
    while (file := directory / f"{stem}{f'_{len(found)}' if found else ''}{suffix}").exists():
        found.append(_inside(file))
    return found


def _numbered(directory: Path, stem: str, suffix: str) -> list[dict[str, Any]]:
    index = directory / f"{stem}{suffix}.index.json"
    if index.exists():
        return [_shards(_inside(index))]
    return [_weights(file) for file in _files(directory, stem, suffix)]


def _weights(file: Path) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    weights: dict[str, Any] = weights_of(load_plain(file), file)["model"]
    return weights


def _shards(index: Path) -> dict[str, Any]:
    """{"weight_map": {tensor: file}}, as transformers and Accelerate write it."""
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("too large")
        names = json.loads(index.read_text())["weight_map"]
        files = sorted(set(names.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(
            f"{index} is no index of shards ({type(e).__name__}: {e})",
            'it has {"weight_map": {tensor: file}}',
            "copy it again",
        ) from None
    tensors: dict[str, Any] = {}
    for file in files:
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):  # it could point anywhere
            raise CheckpointError(
                f"{index} names the file {file!r}", "a shard lies beside its index", "do not trust it"
            )
        tensors |= _weights(_inside(index.with_name(file)))
    if missing := sorted(names.keys() - tensors.keys()):
        raise CheckpointError(f"{index} names {missing[0]}, which no shard holds", "", "copy the directory again")
    return tensors


def _inside(file: Path) -> Path:
    """`file`; refused when it is a link out of its directory, unless to the blobs of the Hugging Face cache it is in."""
    if file.is_symlink():
        here, real = file.parent.resolve(), file.resolve()
        blobs = here.parent.parent / "blobs" if here.parent.name == "snapshots" else here
        if here not in real.parents and blobs not in real.parents:
            raise CheckpointError(
                f"{file} is a link to {file.readlink()}", "a checkpoint's files lie in its directory", "copy them there"
            )
    return file


def _dict(file: Path) -> dict[str, Any]:
    content = load_plain(_inside(file))
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} holds a {type(content).__name__}", "it should hold a state_dict", "copy it again"
        )
    return content

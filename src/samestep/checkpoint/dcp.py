"""Checkpoints of sharded models (FSDP2): each rank writes and reads its own shards, on any number of ranks.

torch.distributed.checkpoint plans and moves the shards. Its own index, `.metadata`, is a pickle; so its safetensors
storage writes them instead, whose files carry their offsets, and the manifest is ours. No file is unpickled.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

import samestep
from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.names import match
from samestep.checkpoint.storage import Checkpoint, Store, sync, write_file
from samestep.checkpoint.survey import fault, find
from samestep.checkpoint.tree import STORED_DTYPES, flatten, unflatten
from samestep.errors import CheckpointError

__all__ = ["assemble", "is_sharded", "load_sharded", "save_sharded"]

_SHARDED = "sharded"
_Group = dist.ProcessGroup | None


def save_sharded(
    directory: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    meta: Mapping[str, Any] | None = None,
    group: _Group = None,
) -> Path:
    """Write a checkpoint of a sharded (or plain) model. A collective: all ranks call it, and share a file system.

    Written under a temporary name, synced, the manifest last, renamed: readers see all of it or nothing.

    Args:
        directory: of the checkpoints, such as "runs/name/checkpoints".
        step: windows finished; a checkpoint of the same step is replaced.
        model: FSDP2's or any other; parameters and buffers are saved under their own names.
        optimizer: with state for its parameters, by name.
        meta: JSON for the manifest.
        group: the ranks; None: all.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: on all ranks, when one cannot write; earlier checkpoints stay whole.
    """
    store, rank = Store(Path(directory), keep_last=None), _rank(group)
    tree, tensors = _split(_state(model, optimizer))
    final = store.path(step)
    temporary = Path(_on_main(group, lambda: str(_begin(final))))
    try:
        writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        _move(save, {**tensors}, group, storage_writer=writer)
        files = _gathered(group, _described(temporary, f"shard-{rank + 1:05d}-*.safetensors"))
        manifest = Manifest(
            step=step,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions={"samestep": samestep.__version__, "torch": str(torch.__version__)},
            meta={"world_size": _size(group), **(meta or {}), "layout": _SHARDED},
            state=tree,
            aliases={},
            files=files,
        )
        return Path(_on_main(group, lambda: _finish(temporary, final, manifest)))
    except (OSError, RuntimeError, CheckpointException) as e:
        if isinstance(e, CheckpointError):
            raise
        raise CheckpointError(
            f"the sharded checkpoint of step {step} could not be written: {_first_line(e)}",
            "the checkpoints before it are untouched",
            "free space or check permissions, then save again",
        ) from e
    finally:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # renamed away when all went well


def load_sharded(
    path: str | Path, model: nn.Module, optimizer: Optimizer | None = None, *, group: _Group = None
) -> Checkpoint:
    """Load what `save_sharded` wrote into a model sharded over any number of ranks. A collective, like it.

    Args:
        path: a checkpoint's directory, or a run's or checkpoints directory: the newest whole one then.
        model: with the same names and shapes, however it is sharded.
        optimizer: of the same parameters.
        group: the ranks; None: all.

    Returns:
        The checkpoint, for its manifest.

    Raises:
        CheckpointError: on all ranks, when it is damaged, or its names and shapes are not those of the model.
    """
    checkpoint = Checkpoint.open(Path(_on_main(group, lambda: str(_checked(find(Path(path))).path))))
    saved = dict(_recorded(checkpoint))
    state = _state(model, optimizer)
    tree, tensors = _split(state)
    expected = {name: _empty(tensor.shape) for name, tensor in tensors.items()}
    if optimizer is None:
        saved = {name: value for name, value in saved.items() if name.startswith("model0.")}
    match({name: _empty(shape) for name, (_, shape) in saved.items()}, expected)
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    _move(load, tensors, group, storage_reader=reader)
    loaded = unflatten(_as_tensors(checkpoint.manifest.state if optimizer is not None else tree), tensors)
    if optimizer is None:
        model.load_state_dict(loaded["model0"], strict=True)
    else:
        set_state_dict(model, optimizer, model_state_dict=loaded["model0"], optim_state_dict=loaded["optimizer0"])
    return checkpoint


def is_sharded(checkpoint: Checkpoint) -> bool:
    """Whether `save_sharded` wrote it."""
    return checkpoint.manifest.meta.get("layout") == _SHARDED


def assemble(checkpoint: Checkpoint) -> Any:
    """The nested state of a sharded checkpoint, whole, in this process's memory on the CPU.

    Raises:
        CheckpointError: when it is damaged.
    """
    _checked(checkpoint)
    dtypes = {name: dtype for dtype, name in STORED_DTYPES.items()}
    tensors = {name: torch.empty(shape, dtype=dtypes[dtype]) for name, (dtype, shape) in _recorded(checkpoint)}
    _move(load, tensors, None, True, storage_reader=HuggingFaceStorageReader(str(checkpoint.path)))
    return unflatten(_as_tensors(checkpoint.manifest.state), tensors)


# The state as names ---------------------------------------------------------------------------------------------------


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {"model0": get_model_state_dict(model)}
    weights, moments = get_state_dict(model, optimizer)  # by name, wrappers' prefixes taken away
    return {"model0": weights, "optimizer0": moments}


def _split(state: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The manifest's tree, in which each tensor is named with its dtype and whole shape, and the (sharded) tensors."""
    found: list[torch.Tensor] = []

    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(value)
            return torch.empty(0, len(found) - 1)  # flatten names it; its width says which tensor it stands for
        if isinstance(value, dict):
            return {name: stand_in(item) for name, item in value.items()}
        return type(value)(stand_in(item) for item in value) if isinstance(value, list | tuple) else value

    tree, named = flatten(stand_in(dict(state)))
    tensors = {name: found[place.shape[1]] for name, place in named.items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_DTYPES:
            raise CheckpointError(f"{name} is of {tensor.dtype}", "a safetensors file holds other dtypes", "convert it")
    return _as_sharded(tree, tensors), tensors


def _as_sharded(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A kind of its own, so that a reader of whole tensors refuses it."""
    if isinstance(tree, list):
        return [_as_sharded(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$") == "tensor":
        tensor = tensors[tree["is"]]
        entry = {"dtype": STORED_DTYPES[tensor.dtype], "shape": [*tensor.shape]}
        return {"$": _SHARDED, "is": tree["is"], **entry}
    return {name: _as_sharded(item, tensors) for name, item in tree.items()}


def _as_tensors(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_as_tensors(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$") == _SHARDED:
        return {"$": "tensor", "is": tree["is"]}
    return {name: _as_tensors(item) for name, item in tree.items()}


def _recorded(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """(name, (dtype, whole shape)) of each tensor."""

    def walk(tree: Any) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        if isinstance(tree, dict) and tree.get("$") == _SHARDED:
            name, dtype, shape = tree.get("is"), tree.get("dtype"), tree.get("shape")  # anything, in a forged one
            known = isinstance(name, str) and isinstance(dtype, str) and dtype in STORED_DTYPES.values()
            if not known or not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
                raise CheckpointError(f"{checkpoint.path}: the entry {tree!r:.200} is no tensor's", "", "use another")
            yield str(name), (str(dtype), tuple(shape))
        elif isinstance(tree, dict | list):
            for item in tree.values() if isinstance(tree, dict) else tree:
                yield from walk(item)

    return walk(checkpoint.manifest.state)


def _empty(shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """Whole to the bit, and its shards make whole tensors: what no shard covers would silently stay as it was."""
    if not is_sharded(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path} holds whole tensors", "load_sharded reads what save_sharded wrote", "use load_weights"
        )
    wrong = fault(checkpoint.path)
    present = {file.name for file in checkpoint.path.glob("*.safetensors")}
    wrong += [f"{name} is not in the manifest" for name in sorted(present - checkpoint.manifest.files.keys())]
    if not wrong:
        held: dict[str, int] = {}
        for file in checkpoint.manifest.files:
            with safetensors.safe_open(checkpoint.path / file, framework="pt", device="cpu") as content:
                for name in content.keys():  # noqa: SIM118 (it is no dict, and cannot be iterated)
                    held[name] = held.get(name, 0) + math.prod(content.get_slice(name).get_shape())
        for name, (_, shape) in _recorded(checkpoint):
            if held.get(name) != math.prod(shape):
                wrong.append(f"{name} has {held.get(name)} of {math.prod(shape)} elements")
    if wrong:
        raise CheckpointError(f"{checkpoint.path} is damaged: {'; '.join(wrong[:5])}", "", "use an earlier checkpoint")
    return checkpoint


# The directory --------------------------------------------------------------------------------------------------------


def _begin(final: Path) -> Path:
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def _described(directory: Path, pattern: str) -> dict[str, Any]:
    """{file: its size and digest} of this rank's files, synced; or {"": what is wrong}, for all ranks to hear of."""
    found: dict[str, Any] = {}
    try:
        for file in directory.glob(pattern):
            with file.open("rb") as content:
                os.fsync(content.fileno())
                digest = hashlib.file_digest(content, "sha256").hexdigest()
                found[file.name] = {"bytes": os.fstat(content.fileno()).st_size, "sha256": digest}
    except OSError as e:
        return {"": f"{e.filename}: {e.strerror}"}
    return found


def _finish(temporary: Path, final: Path, manifest: Manifest) -> str:
    write_file(temporary / "manifest.json", [manifest.to_text().encode("ascii")])
    sync(temporary)
    if wrong := fault(temporary, digests=False):
        raise CheckpointError(
            f"main does not see what the ranks wrote: {'; '.join(wrong)}",
            "all ranks write into one directory of a shared file system",
            "choose a directory that all nodes share",
        )
    old = final.with_name(f"{final.name}.old")  # readers know this name
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return str(final)


# The ranks ------------------------------------------------------------------------------------------------------------


def _rank(group: _Group) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _size(group: _Group) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _move(
    how: Callable[..., Any], tensors: dict[str, torch.Tensor], group: _Group, alone: bool = False, **storage: Any
) -> None:
    """torch's save or load; it warns of being alone even where it is told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        how(tensors, process_group=group, no_dist=alone or not dist.is_initialized(), **storage)


def _gathered(group: _Group, own: dict[str, Any]) -> dict[str, Any]:
    """All ranks' entries."""
    parts: list[Any] = [own] * _size(group)
    if dist.is_initialized():
        dist.all_gather_object(parts, own, group=group)
    entries = {name: entry for part in parts for name, entry in part.items()}
    if "" in entries:
        raise OSError(entries[""])
    return dict(sorted(entries.items()))


def _on_main(group: _Group, work: Callable[[], str]) -> str:
    """What `work` gives on the group's first rank, on all; its error too."""
    result: list[Any] = [None, None]
    if _rank(group) == 0:
        try:
            result[0] = work()
        except CheckpointError as e:
            result[1] = (e.got, e.rule, e.fix)
        except OSError as e:
            result[1] = (f"{e.filename}: {e.strerror}", "", "free space or check permissions")
    if dist.is_initialized():
        dist.broadcast_object_list(result, group=group, group_src=0)
    if result[1] is not None:
        raise CheckpointError(*result[1])
    return str(result[0])


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of torch's exception: {rank: (its exception, its traceback)}
    if isinstance(failures, dict) and failures:
        rank, failure = next(iter(failures.items()))
        return f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}"[:300]
    return (str(error).splitlines() or [type(error).__name__])[0][:300]

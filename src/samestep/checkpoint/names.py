"""Parameter names of checkpoints and models: wrappers' prefixes are understood, anything else is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from samestep.errors import CheckpointError

__all__ = ["canonical", "match"]

# DDP and DataParallel, torch.compile, DeepSpeed and Lightning
_WRAPPERS = frozenset({"module", "_orig_mod", "_forward_module"})
_SHOWN = 10


def canonical(name: str) -> str:
    """`name` without the parts that DDP ("module"), torch.compile ("_orig_mod") and Lightning ("_forward_module") add.

    A model may have an attribute `module` of its own, so this alone must not choose names for loading: `match` does.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def match(
    saved: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    partial: bool = False,
    rename: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """The saved tensors under the model's names; same objects, dtypes and devices as in `saved`.

    Names are read as they are, then without the wrappers around the whole model, then without wrappers anywhere. The
    reading that matches most counts, the earlier one if two match as many; one that makes two names equal is not used.

    Args:
        saved: what the file holds.
        expected: the model's state_dict.
        partial: take what matches and leave the rest of the model as it is (fine-tuning).
        rename: {saved name, as in the file: model's name}.

    Raises:
        CheckpointError: with the counts and the first missing, unexpected and mis-shaped names.
    """
    renamed = _apply(rename or {}, saved)
    reading = max(
        _readings(list(renamed), list(expected)), key=lambda to: sum(name in expected for name in to.values())
    )
    sources = {own: renamed[name] for name, own in reading.items()}  # {model's name, if it has it: name in the file}
    found = {own: saved[sources[own]] for own in expected if own in sources}
    shapes = {own: both for own, t in found.items() if (both := (_shape(t), _shape(expected[own])))[0] != both[1]}
    missing = [own for own in expected if own not in sources]
    unexpected = [name for own, name in sources.items() if own not in expected]
    if shapes or (not found and expected) or (not partial and (missing or unexpected)):
        raise _refusal(saved, expected, missing, unexpected, shapes)
    return found


def _apply(rename: Mapping[str, str], saved: Mapping[str, Any]) -> dict[str, str]:
    """{name after renaming: name in the file}."""
    renamed = {rename.get(name, name): name for name in saved}
    if absent := sorted(rename.keys() - saved.keys()):
        raise CheckpointError(
            f"rename has {', '.join(absent[:_SHOWN])}, which the file does not hold",
            "its keys are names as they are in the file",
            f"the file's names begin with {', '.join([*saved][:3])}",
        )
    if len(renamed) != len(saved):
        twice = [name for name, n in Counter(rename.get(name, name) for name in saved).items() if n > 1]
        raise CheckpointError(f"rename gives two tensors the name {twice[0]}", "each name is given once", "rename both")
    return renamed


def _readings(saved: list[str], expected: list[str]) -> Iterable[dict[str, str]]:
    """{saved name: the model's name it may mean, or another}, the most literal reading first."""
    pairs = [(ours, theirs) for ours in _peeled(saved) for theirs in _peeled(expected)]
    pairs.append(([canonical(name) for name in saved], [canonical(name) for name in expected]))
    for ours, theirs in pairs:
        if len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs):
            own = dict(zip(theirs, expected, strict=True))
            taken = {name: own.get(plain, plain) for name, plain in zip(saved, ours, strict=True)}
            if len(set(taken.values())) == len(taken):
                yield taken


def _peeled(names: list[str]) -> Iterable[list[str]]:
    """The names; then without the wrapper around them all, while there is one."""
    yield names
    while names and (wrapper := names[0].partition(".")[0]) in _WRAPPERS:
        if not all(name.startswith(f"{wrapper}.") for name in names):
            return
        names = [name.partition(".")[2] for name in names]
        yield names


def _shape(value: Any) -> Any:
    """A tensor's shape; None for what is not a tensor (a module's extra state)."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _refusal(
    saved: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    missing: list[str],
    unexpected: list[str],
    shapes: Mapping[str, tuple[Any, Any]],
) -> CheckpointError:
    parts = [f"{len(expected) - len(missing) - len(shapes)} of {len(expected)} matched"]
    wrong = [f"{own} ({theirs} in the file, {ours} in the model)" for own, (theirs, ours) in shapes.items()]
    for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            parts.append(f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{more}")
    hint = "load into the model that was saved, or pass partial=True to take what matches"
    if pairs := _obvious(saved, expected, missing, unexpected):
        hint = f"if the shapes do not deceive: rename={pairs}"
    return CheckpointError("; ".join(parts), "each name and shape must match", hint)


def _obvious(
    saved: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], missing: list[str], unexpected: list[str]
) -> dict[str, str]:
    """{unexpected name: missing name} where exactly one of each has the shape."""
    theirs = Counter(_shape(saved[name]) for name in unexpected)
    ours = Counter(_shape(expected[own]) for own in missing)
    single = {shape for shape in theirs if shape is not None and theirs[shape] == ours[shape] == 1}
    by_shape = {_shape(expected[own]): own for own in missing}
    return {name: by_shape[shape] for name in unexpected if (shape := _shape(saved[name])) in single}

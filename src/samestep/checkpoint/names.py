"""Parameter names of checkpoints and models: wrappers' prefixes are understood, anything else is refused by name."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    partial: bool | str | Sequence[str] = False,
    rename: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """The saved tensors under the model's names; same objects, dtypes and devices as in `saved`.

    Names are read as they are, then without the wrappers around the whole model, then without wrappers anywhere. The
    reading that matches most counts, the earlier one if two match as many; one that makes two names equal is not used.

    Args:
        saved: what the file holds.
        expected: the model's state_dict.
        partial: names of the model that keep their values whatever the file holds, as patterns ("head.*"): all others must
            match (fine-tuning). True: take what matches, leave the rest.
        rename: {saved name, as in the file: model's name}; an old name that ends with a dot, or is empty, is the beginning
            of names: {"model.": ""} takes it away, {"": "body."} puts it before all.

    Raises:
        CheckpointError: with the counts and the first missing, unexpected and mis-shaped names.
    """
    renamed = _apply(rename or {}, saved)
    reading = max(
        _readings(list(renamed), list(expected)), key=lambda to: sum(name in expected for name in to.values())
    )
    sources = {own: renamed[name] for name, own in reading.items()}  # {model's name, if it has it: name in the file}
    left = _left(
        [] if isinstance(partial, bool) else [partial] if isinstance(partial, str) else partial, expected, sources
    )
    asked = {own: value for own, value in expected.items() if own not in left}
    found = {own: saved[sources[own]] for own in asked if own in sources}
    found |= _tied(asked, found)
    shapes = {own: both for own, t in found.items() if (both := (_shape(t), _shape(expected[own])))[0] != both[1]}
    missing = [own for own in asked if own not in found]
    unexpected = [name for own, name in sources.items() if own not in expected and own not in left]
    if shapes or (not found and expected) or (partial is not True and (missing or unexpected)):
        raise _refusal(saved, asked, missing, unexpected, shapes)
    return {own: found[own] for own in asked if own in found}


def _left(patterns: Sequence[str], expected: Iterable[str], sources: Iterable[str]) -> set[str]:
    """The names, of the model and of the file, that one of the patterns means."""
    left: set[str] = set()
    names = [*expected, *sources]
    for pattern in patterns:
        meant = {name for name in names if any(fnmatch.fnmatchcase(n, pattern) for n in (name, canonical(name)))}
        if not meant:
            raise CheckpointError(
                f"partial has {pattern!r}, which no name of the model or the file matches",
                "it names what is left as it is, with * for any text",
                f"the model's names begin with {', '.join(names[:3])}",
            )
        left |= meant
    return left


def _tied(asked: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tied weight that the file holds once stands for all its names in the model."""
    place = {_place(asked[own]): value for own, value in found.items() if isinstance(asked[own], torch.Tensor)}
    own = {own: place.get(_place(value)) for own, value in asked.items() if own not in found}
    return {name: value for name, value in own.items() if value is not None}


def _place(tensor: Any) -> Any:
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.is_meta
        or not tensor.numel()
        or type(tensor).__name__ == "DTensor"
    ):
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _apply(rename: Mapping[str, str], saved: Mapping[str, Any]) -> dict[str, str]:
    """{name after renaming: name in the file}."""
    beginnings = sorted((old for old in rename if not old or old.endswith(".")), key=len, reverse=True)
    used: set[str] = set()

    def new(name: str) -> str:
        old = name if name in rename else next((old for old in beginnings if name.startswith(old)), None)
        if old is None:
            return name
        used.add(old)
        return rename[old] + name[len(old) :]

    names = {name: new(name) for name in saved}
    renamed = {to: name for name, to in names.items()}
    if absent := sorted(rename.keys() - used):
        raise CheckpointError(
            f"rename has {', '.join(absent[:_SHOWN])}, which the file does not hold",
            "its keys are names as they are in the file, or beginnings of names that end with a dot",
            f"the file's names begin with {', '.join([*saved][:3])}",
        )
    if len(renamed) != len(saved):
        twice = [name for name, n in Counter(names.values()).items() if n > 1]
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
    hint = (
        'load into the model that was saved, or name what may stay as it is: partial="head.*" (True: all that differs)'
    )
    if beginning := _beginning([*saved], [*expected]):
        hint = f"the names differ in their beginning: pass rename={beginning}"
    elif pairs := _obvious(saved, expected, missing, unexpected):
        hint = f"if the shapes do not deceive: rename={pairs}"
    return CheckpointError("; ".join(parts), "each name and shape must match", hint)


def _beginning(saved: list[str], expected: list[str]) -> dict[str, str] | None:
    """{beginning: ""} or {"": beginning} that gives the model all its names."""
    theirs, ours = sorted(saved), sorted(map(canonical, expected))
    if not theirs or not ours:
        return None
    for old in dict.fromkeys(name[: place + 1] for name in theirs for place, c in enumerate(name) if c == "."):
        if {name[len(old) :] for name in theirs if name.startswith(old)} >= {*ours}:
            return {old: ""}
    for place, c in enumerate(ours[0]):
        if c == "." and {ours[0][: place + 1] + name for name in theirs} >= {*ours}:
            return {"": ours[0][: place + 1]}
    return None


def _obvious(
    saved: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], missing: list[str], unexpected: list[str]
) -> dict[str, str]:
    """{unexpected name: missing name} where exactly one of each has the shape."""
    theirs = Counter(_shape(saved[name]) for name in unexpected)
    ours = Counter(_shape(expected[own]) for own in missing)
    single = {shape for shape in theirs if shape is not None and theirs[shape] == ours[shape] == 1}
    by_shape = {_shape(expected[own]): own for own in missing}
    return {name: by_shape[shape] for name in unexpected if (shape := _shape(saved[name])) in single}

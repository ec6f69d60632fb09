"""Parameter names of checkpoints and models: wrappers' prefixes are understood, anything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from samestep.errors import CheckpointError

__all__ = ["match", "stripped"]

_WRAPPERS = frozenset({"module", "_orig_mod", "_forward_module"})


def stripped(name: str) -> str:
    """`name` without the parts that DDP ("module"), torch.compile ("_orig_mod") and Lightning ("_forward_module") add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def match(
    saved: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    partial: bool = False,
    rename: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """The saved tensors under the model's names.

    Names are tried as they are, then without wrappers' parts (so a model with an attribute `module` of its own is safe).

    Args:
        saved: what the file holds.
        expected: the model's state_dict.
        partial: take what matches and leave the rest of the model as it is (fine-tuning).
        rename: {saved name: model's name}.

    Raises:
        CheckpointError: with the counts and the first missing, unexpected and mis-shaped names.
    """
    renamed = {(rename or {}).get(name, name): tensor for name, tensor in saved.items()}
    if not renamed.keys() & expected.keys():
        plain = {stripped(name): name for name in expected}
        renamed = {plain.get(stripped(name), name): tensor for name, tensor in renamed.items()}
    found = {name: renamed[name] for name in expected if name in renamed}
    shapes = {n: (tuple(t.shape), tuple(expected[n].shape)) for n, t in found.items() if t.shape != expected[n].shape}
    missing = [name for name in expected if name not in renamed]
    unexpected = [name for name in renamed if name not in expected]
    if shapes or (not found and expected) or (not partial and (missing or unexpected)):
        _refuse(len(found) - len(shapes), expected, missing, unexpected, shapes, renamed)
    return found


def _refuse(
    matched: int,
    expected: Mapping[str, torch.Tensor],
    missing: list[str],
    unexpected: list[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    renamed: Mapping[str, torch.Tensor],
) -> None:
    parts = [f"{matched} of {len(expected)} tensors match"]
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            parts.append(f"{kind}: {', '.join(names[:10])}" + (f" and {len(names) - 10} more" if names[10:] else ""))
    parts += [
        f"{name} has shape {saved} in the file, {own} in the model" for name, (saved, own) in [*shapes.items()][:10]
    ]
    pairs = {
        name: fits[0]
        for name in unexpected
        if len(fits := [own for own in missing if expected[own].shape == renamed[name].shape]) == 1
    }
    hint = f"rename={pairs}" if pairs else "use the model that was saved, or partial=True to take what matches"
    raise CheckpointError("; ".join(parts), "by default each name and shape must match", hint)

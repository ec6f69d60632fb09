"""The manifest: what a checkpoint is, in one JSON file that is written last and carries its own digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any

from samestep.errors import CheckpointError

__all__ = ["SCHEMA", "Manifest", "plain_json"]

SCHEMA = 1
_DIGEST = "manifest_sha256"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TYPES = {"schema": int, "step": int, "created": str, "versions": dict, "meta": dict, "aliases": dict, "files": dict}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    """Windows finished."""
    created: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    """Of samestep and torch."""
    meta: dict[str, Any]
    """Position, loaders, settings, as the run gave them; JSON only."""
    state: Any
    """The state's JSON part; tensors stand in it by name."""
    aliases: dict[str, str]
    """Tensors that share their memory with another (tied weights): {name: the name it is stored under}."""
    files: dict[str, dict[str, Any]]
    """{file name: {"bytes": size, "sha256": digest}}."""
    schema: int = SCHEMA

    def to_text(self) -> str:
        """As JSON, in ASCII.

        Raises:
            CheckpointError: when `meta` holds what JSON does not.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            return json.dumps({**fields, _DIGEST: _digest(fields)}, allow_nan=False, indent=1)
        except (TypeError, ValueError) as e:
            raise _no_json(e) from None

    @classmethod
    def from_text(cls, text: str, where: str) -> Manifest:
        """From JSON.

        Raises:
            CheckpointError: naming `where`, when it is damaged or of a version that this code does not read.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise CheckpointError(f"{where} is not JSON ({e})", "a manifest is", "use an earlier checkpoint") from None
        schema = fields.get("schema") if isinstance(fields, dict) else None
        if type(schema) is not int:
            raise CheckpointError(f"{where} has no schema number", "a manifest has one", "use an earlier checkpoint")
        if schema != SCHEMA:
            raise CheckpointError(
                f"{where} has schema {schema}",
                f"this version of samestep reads schema {SCHEMA}",
                "update samestep" if schema > SCHEMA else "read it with the version of samestep that wrote it",
            )
        digest = fields.pop(_DIGEST, None)
        if digest != _digest(fields):
            raise CheckpointError(
                f"{where} has other content than was written (sha256 differs)", "", "use an earlier checkpoint"
            )
        if fault := _fault(fields):
            raise CheckpointError(f"{where}: {fault}", "see samestep.checkpoint.manifest", "use an earlier checkpoint")
        return cls(**fields)


def plain_json(value: Any) -> Any:
    """A copy that later changes to `value` do not reach.

    Raises:
        CheckpointError: when it is not JSON.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as e:
        raise _no_json(e) from None


def _no_json(e: Exception) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's meta is not JSON ({e})", "meta holds finite numbers, text, lists and dicts"
    )


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, allow_nan=False).encode()).hexdigest()


def _fault(fields: dict[str, Any]) -> str | None:
    """The first field that is not as it should be."""
    expected = {field.name for field in dataclasses.fields(Manifest)}
    if fields.keys() != expected:
        return f"has other fields than a manifest: {', '.join(sorted(fields.keys() ^ expected))}"
    for name, kind in _TYPES.items():
        if type(fields[name]) is not kind:
            return f"{name} is {fields[name]!r}, not of type {kind.__name__}"
    if fields["step"] < 0:
        return f"step is {fields['step']}"
    for name, entry in fields["files"].items():
        if not _PLAIN_NAME.fullmatch(name):  # a path here could point out of the checkpoint
            return f"{name!r} is not a plain file name"
        if (
            not isinstance(entry, dict)
            or entry.keys() != {"bytes", "sha256"}
            or type(entry["bytes"]) is not int
            or not _SHA256.fullmatch(str(entry["sha256"]))
        ):
            return f"the entry of {name} is {entry!r}"
    for field in ("versions", "aliases"):
        if not all(isinstance(value, str) for value in fields[field].values()):
            return f"{field} is not {{text: text}}"
    return None

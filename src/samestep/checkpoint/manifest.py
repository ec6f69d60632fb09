"""The manifest: what a checkpoint is, in one JSON file that is written last."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from samestep.errors import CheckpointError

__all__ = ["SCHEMA", "Manifest"]

SCHEMA = 1


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
    """Position, loaders, settings, as the run gave them."""
    state: Any
    """The state's JSON part; tensors stand in it by name."""
    aliases: dict[str, str]
    """Tensors that share their memory with another (tied weights) and are stored under its name."""
    files: dict[str, dict[str, Any]]
    """{file name: {"bytes": size, "sha256": digest}}."""
    schema: int = SCHEMA

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, indent=1)

    @classmethod
    def from_text(cls, text: str, where: str) -> Manifest:
        """From JSON.

        Raises:
            CheckpointError: naming `where`, when it is not a manifest of a version that this code reads.
        """
        try:
            fields = json.loads(text)
            schema = fields["schema"]
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise CheckpointError(f"{where} is not a manifest ({e})", "it is JSON with a schema number") from None
        if schema != SCHEMA:
            raise CheckpointError(
                f"{where} has schema {schema}", f"this version of samestep reads schema {SCHEMA}", "update samestep"
            )
        try:
            return cls(**fields)
        except TypeError as e:
            raise CheckpointError(f"{where} has other fields than a manifest ({e})") from None

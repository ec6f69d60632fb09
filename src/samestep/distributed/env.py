"""This rank's place among the ranks, as the launcher's environment tells it. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from samestep.errors import ConfigError

__all__ = ["Ranks", "read_environment"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """A rank's place. "Main" is global rank 0, never local rank 0."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int

    @property
    def is_main(self) -> bool:
        """True on global rank 0."""
        return self.rank == 0


def read_environment(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The place from torchrun's variables, else SLURM's, else alone."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0)
    try:
        return Ranks(
            rank=int(environ["RANK"]),
            local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
            world_size=int(environ["WORLD_SIZE"]),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])),
            node_rank=int(environ.get("GROUP_RANK", 0)),
        )
    except (KeyError, ValueError) as e:
        raise ConfigError(f"environment: {e}", "RANK and WORLD_SIZE are set together", "use a launcher") from None

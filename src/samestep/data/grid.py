"""The grid of a run: how an epoch's positions are cut into windows, and windows into micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Grid"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """It belongs to the run, not to the ranks, and is kept in the checkpoint."""

    num_samples: int
    batch_size: int
    micro_batch_size: int
    drop_last: bool = False

    @classmethod
    def make(
        cls,
        *,
        num_samples: int,
        batch_size: int,
        micro_batch_size: int | None = None,
        drop_last: bool = False,
        world_size: int = 1,
    ) -> Grid:
        """A grid for a first start on `world_size` ranks."""
        if micro_batch_size is None and batch_size > 0:
            micro_batch_size = -(-batch_size // world_size)
        return cls(
            num_samples=num_samples, batch_size=batch_size, micro_batch_size=micro_batch_size or 1, drop_last=drop_last
        )

    @property
    def num_windows(self) -> int:
        """Windows an epoch."""
        if self.drop_last:
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    @property
    def micro_batches(self) -> int:
        """M of a full window."""
        return -(-self.batch_size // self.micro_batch_size)

    def window(self, window: int) -> range:
        """Positions of a window."""
        return range(window * self.batch_size, min(self.num_samples, (window + 1) * self.batch_size))

    def num_micro_batches(self, window: int) -> int:
        """M of one window."""
        return -(-len(self.window(window)) // self.micro_batch_size)

    def micro_batch(self, window: int, micro_batch: int) -> range:
        """Positions of a micro-batch."""
        span = self.window(window)
        start = span.start + micro_batch * self.micro_batch_size
        return range(start, min(span.stop, start + self.micro_batch_size))

    def share(self, window: int, rank: int, world_size: int) -> range:
        """The contiguous micro-batches of a rank."""
        m = self.num_micro_batches(window)
        return range(-(-m * rank // world_size), -(-m * (rank + 1) // world_size))

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Grid:
        """From `to_json`."""
        return cls(**value)

"""One window's numbers, as the ledger, the display and every sink get them."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["Record"]


@dataclasses.dataclass(slots=True, kw_only=True)
class Record:
    """What went into one window and what came out, in host numbers. Times are of this rank's host clock, in seconds."""

    time: float = math.nan
    """When the window ended, in seconds since 1970 (UTC)."""
    epoch: int
    window: int
    step: int
    """Windows finished so far in the run, this one included."""
    updates: int = 0
    """Updates applied so far, this window's included; a skipped window does not count."""
    micro_batches: int
    loss: float = math.nan
    """The global weighted mean over the window (the global sum for reduction="sum")."""
    weight: float = 0.0
    """Sum of the micro-batches' weights over all ranks: samples, or tokens."""
    samples: int = 0
    digest: str = ""
    """13 hexadecimal digits made from which sample stood at which position, over all ranks; "" when unknown."""
    grad_norm: float = math.nan
    lr: list[float]
    """The rate of each parameter group that was stepped."""
    scale: float | None = None
    """The loss scale after this window; None for precisions without one."""
    skipped: bool = False
    seconds: float
    """From the end of the previous window (of the first: from its first wait for data) to the end of this one."""
    data_seconds: float
    """Of that, waiting for batches."""
    exchange_seconds: float = 0.0
    """Of that, the exchange that no computation hid: from the end of backward's computation until the ranks have met."""
    finish_seconds: float = 0.0
    """Of that, norm, clip, optimizer and loss scale."""
    outside_seconds: float = 0.0
    """Of that, between the windows: checkpoints, evaluation, the loop's own code."""
    memory: dict[str, int] | None = None
    """Bytes, about once a second: process, and on a GPU allocated, reserved, peak_allocated, peak_reserved."""

    @property
    def compute_seconds(self) -> float:
        """Forward and backward: what no other part of `seconds` has."""
        rest = self.data_seconds + self.exchange_seconds + self.finish_seconds + self.outside_seconds
        return max(self.seconds - rest, 0.0)

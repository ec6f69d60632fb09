"""One window's numbers, as the ledger and the display get them."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["Record"]


@dataclasses.dataclass(slots=True, kw_only=True)
class Record:
    """What went into one window and what came out, in host numbers."""

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
    """Sum of the micro-batches' weights over all ranks."""
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
    """From the end of the previous window to the end of this one, on this rank."""
    data_seconds: float
    """Of that, waiting for batches."""
    exchange_seconds: float = 0.0
    """Of that, waiting for the other ranks' gradients after the own backward."""
    finish_seconds: float = 0.0
    """Of that, norm, clipping and update."""
    outside_seconds: float = 0.0
    """Of that, before the window was opened: the loop's own work, evaluation, saving."""
    time: float = 0.0
    """When the window ended, in seconds since 1970."""

"""Rates over the last windows: samples a second over all ranks, percentiles of a window's time, shares, MFU."""

from __future__ import annotations

import math
from collections import deque

from samestep.monitor.record import Record

__all__ = ["Rates", "percentile"]


class Rates:
    """Keeps the last windows; every figure is over their whole time, checkpoints and evaluation between them included.

    Args:
        size: windows kept.
    """

    def __init__(self, size: int = 500) -> None:
        self._records: deque[Record] = deque(maxlen=size)
        self.add = self._records.append
        """Take a finished window."""

    def __len__(self) -> int:
        return len(self._records)

    @property
    def seconds(self) -> float:
        """Time of the windows kept."""
        return sum(record.seconds for record in self._records)

    @property
    def samples_per_s(self) -> float:
        """Over all ranks, accumulation counted; NaN before the first window."""
        return self._per_second(sum(record.samples for record in self._records))

    @property
    def weight_per_s(self) -> float:
        """Loss terms a second over all ranks: tokens, where a loss is a mean over tokens."""
        return self._per_second(sum(record.weight for record in self._records))

    def _per_second(self, count: float) -> float:
        seconds = self.seconds
        return count / seconds if seconds else float("nan")

    @property
    def window_s(self) -> tuple[float, float, float]:
        """Median, 95th percentile and longest time of a window, what lies between windows left out."""
        times = sorted(record.seconds - record.outside_seconds for record in self._records)
        return percentile(times, 50), percentile(times, 95), percentile(times, 100)

    def share(self, stage: str) -> float:
        """Part of the time, 0 to 1, that a stage took: data, exchange, finish, outside or compute."""
        seconds = self.seconds
        part = sum(getattr(record, f"{stage}_seconds") for record in self._records)
        return part / seconds if seconds else float("nan")


def percentile(ordered: list[float], percent: float) -> float:
    """The value at `percent` of a sorted list (nearest rank); NaN of nothing."""
    if not ordered:
        return float("nan")
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1]

"""Learning-rate schedules that advance with applied updates only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.errors import ConfigError, WindowError

__all__ = ["Every", "Schedules"]

Every = Literal["window", "epoch", "manual"]


class Schedules:
    """The schedules of a run, each with when it advances.

    "window": once for each applied update; a skipped window holds the rate. "epoch": at the end of each epoch.
    "manual": by the user's own `schedule.step()`, for ReduceLROnPlateau with a global metric.
    """

    def __init__(self) -> None:
        self._all: list[tuple[LRScheduler, Every]] = []
        self._counts: dict[int, int] = {}

    def add(self, schedule: LRScheduler, every: Every) -> None:
        """Take over `schedule`.

        Raises:
            ConfigError: for an unknown `every`, or a plateau schedule that would have to step without its metric.
        """
        if every not in get_args(Every):
            raise ConfigError(f"got schedule_every={every!r}", f"it is one of {', '.join(get_args(Every))}", "pass one")
        if isinstance(schedule, ReduceLROnPlateau) and every != "manual":
            raise ConfigError(
                "got a ReduceLROnPlateau schedule",
                "it steps on a metric that only your loop knows",
                "prepare it with schedule_every='manual' and call schedule.step(run.mean(...)), the same on all ranks",
            )
        self._all.append((schedule, every))
        self._counts[id(schedule)] = schedule.last_epoch

    def advance(self, every: Every) -> None:
        """Step the schedules that advance at this event.

        Raises:
            WindowError: when someone else stepped one in between.
        """
        for schedule, when in self._all:
            if when != every:
                continue
            if schedule.last_epoch != self._counts[id(schedule)]:
                raise WindowError(
                    f"{type(schedule).__name__}.step() was called by the loop",
                    f"Samestep advances it once for each {'applied update' if every == 'window' else every}",
                    "remove that call, or prepare with schedule_every='manual'",
                )
            schedule.step()
            self._counts[id(schedule)] = schedule.last_epoch

    def restored(self, schedule: LRScheduler) -> None:
        """Take note that `schedule` was set to another place by a checkpoint."""
        self._counts[id(schedule)] = schedule.last_epoch

    def __iter__(self) -> Iterator[LRScheduler]:
        return iter([schedule for schedule, _ in self._all])

    def __len__(self) -> int:
        return len(self._all)

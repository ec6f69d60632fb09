"""Learning-rate schedules that advance with applied updates only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.errors import ConfigError, WindowError

__all__ = ["Every", "Schedules"]

# What makes a schedule what it is, in the state_dicts of torch's own; their other entries are where it stands.
_CONSTANTS = (
    *("total_steps", "T_max", "T_0", "T_mult", "eta_min", "step_size", "gamma", "milestones", "total_iters"),
    *("start_factor", "end_factor", "factor", "patience", "power", "cycle_momentum"),
)

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

    def replace(self, schedule: LRScheduler | None) -> None:
        """Have `schedule`, advancing with applied updates, as the only one; None for none."""
        if schedule is None or [known for known, _ in self._all] != [schedule]:
            self._all, self._counts = [], {}
            if schedule is not None:
                self.add(schedule, "window")

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

    def restored(self, schedule: LRScheduler, fresh: dict[str, Any]) -> None:
        """Take note that `schedule` was set to another place by a checkpoint.

        Args:
            schedule: with the checkpoint's state.
            fresh: its state_dict() as the script made it.

        Raises:
            ConfigError: when the script made another schedule than the one that was saved.
        """
        restored = schedule.state_dict()
        differ = [name for name in _CONSTANTS if name in fresh and fresh[name] != restored.get(name)]
        if differ:
            changes = ", ".join(f"{name} was {restored.get(name)!r}, is {fresh[name]!r}" for name in differ)
            raise ConfigError(
                f"{type(schedule).__name__} differs from the checkpoint's: {changes}",
                "a restart continues the same schedule (its length often comes from the number of epochs)",
                "use the old settings, or start anew with resume='never'",
            )
        self._counts[id(schedule)] = schedule.last_epoch

    def __iter__(self) -> Iterator[LRScheduler]:
        return iter([schedule for schedule, _ in self._all])

    def __len__(self) -> int:
        return len(self._all)

"""The grid of a run: how an epoch's positions are cut into windows, and windows into micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from samestep.errors import CheckpointError, ConfigError, DataError

__all__ = ["Grid", "split"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """(number of windows, micro-batches a window M, micro_batch_size). It belongs to the run, not to the ranks, and is
    kept in the checkpoint.

    Raises:
        ConfigError: for sizes that are not positive whole numbers, or micro-batches larger than a batch.
        DataError: for an epoch without a window.
    """

    num_samples: int
    """Positions in an epoch."""
    batch_size: int
    """Samples of one window, over all ranks."""
    micro_batch_size: int
    """Samples of one forward."""
    drop_last: bool = False
    """Leave the short last window out."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"got {name}={value!r}", "it is a whole number of samples (an int), 1 or more", "pass one"
                )
        if self.micro_batch_size > self.batch_size:
            raise ConfigError(
                f"got micro_batch_size={self.micro_batch_size} with batch_size={self.batch_size}",
                "a window is made of whole micro-batches, so one is at most the batch",
                f"pass micro_batch_size={self.batch_size} or less",
            )
        if type(self.drop_last) is not bool:
            raise ConfigError(f"got drop_last={self.drop_last!r}", "it is True or False", "pass one of them")
        if type(self.num_samples) is not int or self.num_samples < 0:
            raise DataError(f"got num_samples={self.num_samples!r}", "it is an int, 1 or more", "check the dataset")
        if self.num_samples == 0:
            raise DataError("got an empty dataset", "an epoch has at least one sample", "check the dataset")
        if self.drop_last and self.num_samples < self.batch_size:
            raise _no_window(self.num_samples, self.batch_size)

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
        """The grid of a first start.

        Args:
            num_samples: positions in an epoch.
            batch_size: samples of one window, over all ranks.
            micro_batch_size: None for one micro-batch a rank, or a few more where that would leave a rank without any.
            drop_last: leave the short last window out.
            world_size: ranks that will work on it.

        Raises:
            ConfigError: as the class and `check_world_size` do.
            DataError: as the class does.
        """
        size, usable = micro_batch_size, type(batch_size) is int and batch_size > 0
        if size is None:
            size = -(-batch_size // world_size) if usable else 1
            if usable and -(-batch_size // size) < world_size:  # 9 samples on 4 ranks: 3, 3, 3 and nothing
                size = max(1, batch_size // world_size)
        if drop_last and usable and type(num_samples) is int and 0 < num_samples < batch_size:
            raise _no_window(num_samples, batch_size, world_size)
        grid = cls(num_samples=num_samples, batch_size=batch_size, micro_batch_size=size, drop_last=drop_last)
        grid.check_world_size(world_size)
        return grid

    def check_world_size(self, world_size: int) -> None:
        """Refuse ranks that would never work.

        Raises:
            ConfigError: when a full window has fewer micro-batches than there are ranks.
        """
        if world_size > self.micro_batches:
            size = self.batch_size // world_size
            raise ConfigError(
                f"got {world_size} ranks for windows of {self.micro_batches} micro-batch(es) "
                f"({self.batch_size} samples in micro-batches of {self.micro_batch_size})",
                "a rank works on whole micro-batches, so some ranks would never work",
                f"start at most {self.micro_batches} rank(s), or make a new start with "
                + (f"micro_batch_size={size} or less" if size else f"batch_size={world_size} or more"),
            )

    @property
    def num_windows(self) -> int:
        """Windows an epoch has."""
        whole, tail = divmod(self.num_samples, self.batch_size)
        return whole + (1 if tail and not self.drop_last else 0)

    @property
    def micro_batches(self) -> int:
        """M of a full window."""
        return -(-self.batch_size // self.micro_batch_size)

    @property
    def tail(self) -> int:
        """Samples of the short last window; 0 if there is none."""
        return 0 if self.drop_last else self.num_samples % self.batch_size

    @property
    def num_dropped(self) -> int:
        """Samples that an epoch leaves out."""
        return self.num_samples % self.batch_size if self.drop_last else 0

    @property
    def num_used(self) -> int:
        """Samples that an epoch uses."""
        return self.num_samples - self.num_dropped

    def window(self, window: int) -> range:
        """The positions of a window, 0 <= window < num_windows."""
        return range(window * self.batch_size, min(self.num_used, (window + 1) * self.batch_size))

    def num_micro_batches(self, window: int) -> int:
        """M of this window."""
        return -(-len(self.window(window)) // self.micro_batch_size)

    def micro_batch(self, window: int, micro_batch: int) -> range:
        """The positions of a micro-batch, 0 <= micro_batch < num_micro_batches(window)."""
        span = self.window(window)
        start = span.start + micro_batch * self.micro_batch_size
        return range(start, min(span.stop, start + self.micro_batch_size))

    def share(self, window: int, rank: int, world_size: int) -> range:
        """The micro-batches of one rank: contiguous, may be empty; the ranks' shares make the window (see `split`)."""
        return split(self.num_micro_batches(window), rank, world_size)

    def describe(self) -> str:
        """In words: "9 samples = 1 window of 8 + a tail of 1; 2 micro-batches of 4 a window"."""
        whole = self.num_samples // self.batch_size
        text = f"{self.num_samples} sample{'s' * (self.num_samples != 1)} = {whole} window{'s' * (whole != 1)}"
        text += f" of {self.batch_size}"
        if self.tail:
            text += f" + a tail of {self.tail}"
        if self.num_dropped:
            text += f" ({self.num_dropped} of {self.num_samples} samples dropped)"
        count = self.micro_batches
        return f"{text}; {count} micro-batch{'es' * (count != 1)} of {self.micro_batch_size} a window"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Grid:
        """From `to_json`.

        Raises:
            CheckpointError: for anything else.
        """
        try:
            return cls(**value)
        except (TypeError, ConfigError, DataError) as e:
            raise CheckpointError(
                f"the recorded grid {value!r} is not one: {e}", "", "use another checkpoint"
            ) from None


def split(count: int, part: int, parts: int) -> range:
    """The `part`-th of `parts` contiguous pieces of range(count); the first count % parts hold one more than the rest.

    Only the last pieces can be empty. Against spreading the larger ones, the borders between pieces cut fewer nodes of
    a binary tree over range(count) (7 % fewer partial sums over all counts up to 128 and parts up to 16).
    """
    size, more = divmod(count, parts)
    start = part * size + min(part, more)
    return range(start, start + size + (part < more))


def _no_window(num_samples: int, batch_size: int, world_size: int = 1) -> DataError:
    ranks = f" on {world_size} ranks" if world_size > 1 else ""
    return DataError(
        f"got {num_samples} sample(s) < batch_size={batch_size}{ranks} with drop_last=True",
        "an epoch would have 0 windows and train nothing",
        "pass a smaller batch_size, or drop_last=False to train on the short window",
    )

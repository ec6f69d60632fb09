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
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"got {name}={value!r}", "it is a whole number of samples, 1 or more", "pass one")
        if self.micro_batch_size > self.batch_size:
            raise ConfigError(
                f"got micro_batch_size={self.micro_batch_size} with batch_size={self.batch_size}",
                "a window is made of whole micro-batches, so one is at most the batch",
                f"pass micro_batch_size={self.batch_size} or less",
            )
        if self.num_samples < 1:
            raise DataError("got an empty dataset", "an epoch has at least one sample", "check the dataset")
        if self.drop_last and self.num_samples < self.batch_size:
            raise DataError(
                f"got {self.num_samples} sample(s) < batch_size={self.batch_size} with drop_last=True",
                "an epoch would have 0 windows and train nothing",
                "pass a smaller batch_size, or drop_last=False to train on the short window",
            )

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
        """The grid of a first start: one micro-batch a rank unless a size is given."""
        size = micro_batch_size
        if size is None:
            valid = isinstance(batch_size, int) and batch_size > 0
            size = -(-batch_size // world_size) if valid else 1
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
                f"start at most {self.micro_batches} ranks"
                + (f", or pass micro_batch_size={size} or less at a new start" if size else ""),
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

    def window(self, window: int) -> range:
        """The positions of a window."""
        return range(window * self.batch_size, min(self.num_samples, (window + 1) * self.batch_size))

    def num_micro_batches(self, window: int) -> int:
        """M of this window."""
        return -(-len(self.window(window)) // self.micro_batch_size)

    def micro_batch(self, window: int, micro_batch: int) -> range:
        """The positions of a micro-batch."""
        span = self.window(window)
        start = span.start + micro_batch * self.micro_batch_size
        return range(start, min(span.stop, start + self.micro_batch_size))

    def share(self, window: int, rank: int, world_size: int) -> range:
        """The micro-batches of one rank: contiguous, may be empty; the ranks' shares make the window."""
        return split(self.num_micro_batches(window), rank, world_size)

    def describe(self) -> str:
        """In words: "9 samples = 1 window of 8 + a tail of 1; 2 micro-batches of 4 a window"."""
        whole = self.num_samples // self.batch_size
        text = f"{self.num_samples} samples = {whole} window{'s' * (whole != 1)} of {self.batch_size}"
        if self.tail:
            text += f" + a tail of {self.tail}"
        if self.num_dropped:
            text += f" ({self.num_dropped} of {self.num_samples} samples dropped)"
        return f"{text}; {self.micro_batches} micro-batches of {self.micro_batch_size} a window"

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
    """The `part`-th of `parts` contiguous pieces of range(count), sizes differing by at most one.

    The pieces that get one more are spread, not first; when there are fewer than parts, the first is never empty.
    """
    return range(-(-count * part // parts), -(-count * (part + 1) // parts))

"""Which checkpoints stay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from samestep.errors import CheckpointError

__all__ = ["Retention"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept; all else goes, once a newer checkpoint has been verified.

    Raises:
        CheckpointError: for numbers that are no positive whole numbers.
    """

    keep_last: int | None = 3
    """The newest ones; None keeps all."""
    keep_every: int | None = None
    """Besides, those whose step is a multiple of this."""
    best_is: str = "max"
    """Besides, the one with the largest ("max") or smallest ("min") metric, if any has one; NaN is never best."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointError(f"got {name}={value!r}", "it is 1 or more, or None", "pass 3")
        if self.best_is not in ("max", "min"):
            raise CheckpointError(f"got best_is={self.best_is!r}", "it is 'max' or 'min'", "pass one of them")

    def doomed(self, steps: Sequence[int], saved: int, metric: Callable[[int], float | None]) -> list[int]:
        """The steps that go, after that of step `saved` has been verified.

        Args:
            steps: those that there are, ascending. Later ones than `saved` (of a run that went back) are left alone.
            saved: the step just saved.
            metric: of a step; None where it has none.
        """
        if self.keep_last is None:
            return []
        known = [step for step in steps if step <= saved]
        old = known[: -self.keep_last]
        if not old:
            return []
        kept = {step for step in old if self.keep_every is not None and step % self.keep_every == 0}
        measured = [(value, step) for step in known if (value := metric(step)) is not None and math.isfinite(value)]
        if measured:  # of equals the newer
            sign = 1 if self.best_is == "max" else -1
            kept.add(max(measured, key=lambda pair: (sign * pair[0], pair[1]))[1])
        return [step for step in old if step not in kept]

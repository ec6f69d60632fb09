"""The exceptions of Samestep. Every message says what was got, the rule, and what to change.

SamestepError
 +-- ConfigError      a setting that cannot be obeyed (also a ValueError)
 +-- DataError        a dataset, loader or batch that cannot be used (also a ValueError)
 +-- WindowError      calls on a window in an order that has no meaning (also a RuntimeError)
 +-- ModelError       a model used past its wrapper, moved, cast, or with forbidden dtypes (also a RuntimeError)
 +-- NonFiniteError   a loss, weight or gradient that is NaN or infinite (also an ArithmeticError)
 +-- CheckpointError  a checkpoint that is missing, damaged, or does not fit (also a RuntimeError)
 +-- RunDirError      a run directory that cannot be used (also an OSError)
 +-- RankError        another rank failed, or the ranks disagree (also a RuntimeError)
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ModelError",
    "NonFiniteError",
    "RankError",
    "RunDirError",
    "SamestepError",
    "WindowError",
]


class SamestepError(Exception):
    """Base of all of Samestep's exceptions.

    Args:
        got: what was met, with its value.
        rule: what holds instead.
        fix: what the reader should change.
    """

    def __init__(self, got: str, rule: str = "", fix: str = "") -> None:
        self.got, self.rule, self.fix = got, rule, fix
        super().__init__("; ".join(part for part in (got, rule, fix) if part))

    def __reduce__(self) -> tuple[type[SamestepError], tuple[str, str, str]]:
        return type(self), (self.got, self.rule, self.fix)


class ConfigError(SamestepError, ValueError):
    """A setting that cannot be obeyed. Settings are obeyed or refused, never changed."""


class DataError(SamestepError, ValueError):
    """A dataset, loader or batch that cannot be used."""


class WindowError(SamestepError, RuntimeError):
    """Calls on a window in an order that has no meaning."""


class ModelError(SamestepError, RuntimeError):
    """A prepared model used past its wrapper, moved, cast, or with forbidden dtypes."""


class NonFiniteError(SamestepError, ArithmeticError):
    """A loss, weight or gradient that is NaN or infinite."""


class CheckpointError(SamestepError, RuntimeError):
    """A checkpoint that is missing, damaged, or does not fit."""


class RunDirError(SamestepError, OSError):
    """A run directory that cannot be used."""

    def __init__(self, got: str, rule: str = "", fix: str = "") -> None:
        SamestepError.__init__(self, got, rule, fix)


class RankError(SamestepError, RuntimeError):
    """Another rank failed first, or the ranks disagree about something they must share."""

    follows = False
    """Another rank has said what is wrong; this error only ends this one."""

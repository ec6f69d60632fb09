"""Where a run's numbers go besides the ledger: CSV, TensorBoard, and sinks of your own. Main alone has any."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from samestep.errors import ConfigError
from samestep.monitor.record import Record

__all__ = ["SINKS", "Csv", "Guarded", "RunInfo", "Sink", "TensorBoard", "make_sink", "scalars"]

SINKS = ("csv", "tensorboard", "wandb", "mlflow", "trackio")
"""Names that `samestep.Run(sinks=[...])` takes, besides objects."""

_GIVE_UP = 10


@dataclasses.dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink is told when it opens."""

    directory: Path
    """The run's."""
    step: int
    """Windows finished: what the sink holds of later ones is to be forgotten, for they will come again."""
    config: dict[str, Any]
    """The run's settings, as JSON values."""


@runtime_checkable
class Sink(Protocol):
    """Four methods, called on main, each in the training loop: be quick, or hand the work to a thread."""

    def open(self, info: RunInfo) -> None:
        """The run begins, or goes on after `info.step`."""

    def window(self, record: Record) -> None:
        """A window is finished."""

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Something else happened: start, log (the values of run.log), checkpoint, evaluation, end."""

    def close(self) -> None:
        """The run ends; write what is not written yet."""


class Guarded:
    """A sink that cannot stop training: its first failure is said once, after ten in a row it is left alone.

    Args:
        sink: anything with a sink's methods.
        warn: shows a line to the user, once.
    """

    def __init__(self, sink: Any, warn: Callable[[str], None]) -> None:
        self.sink, self._warn = sink, warn
        self._warned = False
        self._in_a_row = 0
        self._window = sink.window

    def open(self, info: RunInfo) -> None:
        """Open it."""
        self._call(self.sink.open, info)

    def window(self, record: Record) -> None:
        """Hand a window over."""
        try:
            self._window(record)
            self._in_a_row = 0
        except Exception as e:  # whatever it is, the training is worth more
            self._failed(e)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Hand an event over."""
        self._call(self.sink.event, kind, fields)

    def close(self) -> None:
        """Close it."""
        self._call(self.sink.close)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self._in_a_row >= _GIVE_UP:
            return
        try:
            function(*arguments)
            self._in_a_row = 0
        except Exception as e:
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        self._in_a_row += 1
        if self._in_a_row >= _GIVE_UP:
            self._window = _nothing
        if not self._warned:
            self._warned = True
            name = type(self.sink).__name__
            self._warn(f"warning: sink {name} failed ({type(error).__name__}: {error}); training goes on without it")


def _nothing(record: Record) -> None:
    """What a sink that has been given up does."""


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """A window's curves as (name, value), those without a value left out."""
    yield "loss", record.loss
    yield "grad_norm", record.grad_norm
    yield "lr", record.lr[0]
    for number, rate in enumerate(record.lr[1:], 1):
        yield f"lr/{number}", rate
    if record.scale is not None:
        yield "loss_scale", record.scale
    yield "skipped", float(record.skipped)
    if record.seconds > 0:
        yield "samples_per_s", record.samples / record.seconds
        yield "data_share", record.data_seconds / record.seconds
        yield "exchange_share", record.exchange_seconds / record.seconds
    for name, value in (record.memory or {}).items():
        yield f"memory/{name}", float(value)


class Csv:
    """`windows.csv` in the run directory: one row a window, `values.csv`: one row for each value of run.log."""

    COLUMNS = [
        *("step", "epoch", "window", "loss", "grad_norm", "lr", "scale", "skipped", "samples", "weight"),
        *("seconds", "data_seconds", "exchange_seconds", "finish_seconds", "outside_seconds", "time"),
    ]

    def open(self, info: RunInfo) -> None:
        """Begin the files, or go on behind the rows up to the step."""
        self._files = [
            _continued(info.directory / name, columns, info.step)
            for name, columns in (("windows.csv", self.COLUMNS), ("values.csv", ["step", "name", "value"]))
        ]
        self._windows, self._values = (csv.writer(file) for file in self._files)

    def window(self, record: Record) -> None:
        """Write a row."""
        values = (getattr(record, name) for name in self.COLUMNS)
        self._windows.writerow([value[0] if isinstance(value, list) else value for value in values])

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Write a row for each logged value; with a checkpoint, let all rows reach the file."""
        if kind == "log":
            for name, value in fields.items():
                if name not in ("epoch", "step"):
                    self._values.writerow([fields["step"], name, value])
        for file in self._files:
            file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _continued(path: Path, columns: Sequence[str], step: int) -> Any:
    """The file, open for appending, with a heading and the rows up to `step`."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as new:
        writer = csv.writer(new)
        writer.writerow(columns)
        if path.exists() and step:
            with path.open(newline="") as old:
                for row in csv.reader(old):
                    if len(row) == len(columns) and row[0].isdigit() and int(row[0]) <= step:
                        writer.writerow(row)
    temporary.replace(path)
    return path.open("a", newline="")


class TensorBoard:
    """Event files in `tensorboard/` of the run directory. A restart purges the steps that will come again."""

    def open(self, info: RunInfo) -> None:
        """Make the writer."""
        from torch.utils.tensorboard import SummaryWriter

        purge = info.step + 1 if info.step else None
        self._writer: Any = SummaryWriter(str(info.directory / "tensorboard"), purge_step=purge)

    def window(self, record: Record) -> None:
        """Add the curves' points."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Add logged values; with a checkpoint, let the file hold all that a restart will not repeat."""
        if kind == "log":
            for name, value in fields.items():
                if name not in ("epoch", "step"):
                    self._writer.add_scalar(name, value, fields["step"])
        elif kind == "checkpoint":
            self._writer.flush()

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()


_NEEDS = {
    "csv": ("samestep.monitor.sinks", "Csv", None),
    "tensorboard": ("samestep.monitor.sinks", "TensorBoard", "tensorboard"),
    "wandb": ("samestep.monitor.trackers", "Wandb", "wandb"),
    "mlflow": ("samestep.monitor.trackers", "Mlflow", "mlflow"),
    "trackio": ("samestep.monitor.trackers", "Trackio", "trackio"),
}


def make_sink(given: Any) -> Sink:
    """A sink from its name, or the sink given.

    Raises:
        ConfigError: for an unknown name, a missing package, or an object without a sink's methods.
    """
    if isinstance(given, str):
        if given not in _NEEDS:
            raise ConfigError(f"got sink {given!r}", f"the sinks are {', '.join(SINKS)}", "or pass an object")
        module, name, package = _NEEDS[given]
        if package is not None:
            try:
                importlib.import_module(package)
            except ImportError as e:
                raise ConfigError(
                    f"got sink {given!r} and no package {package}",
                    "a sink needs its package",
                    f"pip install 'samestep[{given}]'",
                ) from e
        made: Sink = getattr(importlib.import_module(module), name)()
        return made
    if not isinstance(given, Sink):
        raise ConfigError(
            f"got a {type(given).__name__} as a sink",
            "a sink has the methods open, window, event and close",
            f"pass one of {', '.join(SINKS)}, or an object with these methods (see samestep.monitor.sinks.Sink)",
        )
    return given


def finite(value: float) -> bool:
    """Whether a tracker can draw it."""
    return math.isfinite(value)


def warn(text: str) -> None:
    """Show a line on standard error, whether or not progress is shown."""
    print(text, file=sys.stderr, flush=True)

"""What a person sees while a run goes: one live line in a terminal, plain lines elsewhere, on main only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from samestep.monitor.rates import Rates
from samestep.monitor.record import Record

__all__ = ["Display", "duration"]

_REFRESH_S = 0.1


class Display:
    """Progress of a run.

    Args:
        enabled: False shows nothing but what `print` is given.
        log_every: windows between two lines where there is no terminal; 0 for none.
    """

    def __init__(self, enabled: bool, log_every: int) -> None:
        self._enabled, self._log_every = enabled, log_every
        self._console = Console(file=sys.stderr, highlight=False)
        self._out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live = enabled and self._console.is_terminal
        self._progress: Progress | None = None
        self._task: Any = None
        self._epoch: int | None = None
        self._next_refresh = 0.0
        self.rates = Rates()
        self.num_epochs: int | None = None
        self.num_windows: int | None = None
        self.mfu: Callable[[float], str] | None = None
        """Samples a second to words; None when nobody counted."""

    def print(self, *values: object) -> None:
        """Print to standard output, above the bar if there is one."""
        text = " ".join(str(value) for value in values)
        if self._progress is not None and self._out.is_terminal:
            self._progress.console.print(text, markup=False)
        else:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """Print a line of the run itself to standard error."""
        if self._enabled:
            console = self._progress.console if self._progress is not None else self._console
            console.print(text, markup=False, soft_wrap=True)

    def window(self, record: Record) -> None:
        """Show a finished window."""
        if not self._enabled:
            return
        self.rates.add(record)
        if self._live:
            now = time.perf_counter()
            if now >= self._next_refresh or record.epoch != self._epoch or record.window + 1 == self.num_windows:
                self._next_refresh = now + _REFRESH_S
                self._refresh(record)
        elif self._log_every and record.step % self._log_every == 0:
            total = f"/{self.num_windows}" if self.num_windows else ""
            self.note(f"epoch {record.epoch} window {record.window + 1}{total}  {self._numbers(record)}")

    def _numbers(self, record: Record) -> str:
        rates = self.rates
        parts = [f"loss {record.loss:.4f}", f"lr {record.lr[0]:.3g}", f"{rates.samples_per_s:,.0f} samples/s"]
        for stage, word in (("data", "data"), ("exchange", "exchange")):
            if rates.share(stage) >= 0.01:
                parts.append(f"{word} {rates.share(stage):.0%}")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu(rates.samples_per_s)}")
        if (left := self.seconds_left(record)) is not None:
            parts.append(f"ETA {duration(left)}")
        return "  ".join(parts) + ("  (skipped)" if record.skipped else "")

    def seconds_left(self, record: Record) -> float | None:
        """Of all epochs, from the pace of this start's last windows; None when their number or the pace is not known.

        A restart in the middle of an epoch counts the windows that are left, not those that it did itself.
        """
        if not self.num_windows or not self.num_epochs or not self.rates.seconds:
            return None
        left = (self.num_epochs - record.epoch) * self.num_windows - record.window - 1
        return max(left, 0) * self.rates.seconds / len(self.rates)

    def _refresh(self, record: Record) -> None:
        if record.epoch != self._epoch:
            self._begin_epoch(record)
        assert self._progress is not None
        self._progress.update(self._task, completed=record.window + 1, text=self._numbers(record))

    def _begin_epoch(self, record: Record) -> None:
        self._epoch = record.epoch
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        if self._task is not None:
            self._progress.remove_task(self._task)
        total = f"/{self.num_epochs}" if self.num_epochs else ""
        self._task = self._progress.add_task(f"epoch {record.epoch + 1}{total}", total=self.num_windows, text="")

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Show a two-column summary on standard output."""
        self.close()
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        for name, value in rows:
            table.add_row(name, value)
        self._out.print(table)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress, self._task, self._epoch = None, None, None


def duration(seconds: float) -> str:
    """ "42 s", "3:07" or "1:02:03"; "n/a" for what is not known."""
    if not 0 <= seconds < 1e9:
        return "n/a"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"

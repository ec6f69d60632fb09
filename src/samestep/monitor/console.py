"""What a person sees while a run goes: a live bar in a terminal, plain lines elsewhere, on main only."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from samestep.monitor.record import Record

__all__ = ["Display"]


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
        self._samples, self._begin = 0, time.perf_counter()
        self.num_epochs: int | None = None
        self.num_windows: int | None = None

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
        if record.epoch != self._epoch:
            self._begin_epoch(record)
        self._samples += record.samples
        rate = self._samples / max(time.perf_counter() - self._begin, 1e-9)
        if self._live:
            assert self._progress is not None
            text = f"loss {record.loss:.4f}  {rate:,.0f} samples/s" + (" (skipped)" if record.skipped else "")
            self._progress.update(self._task, completed=record.window + 1, text=text)
        elif self._log_every and record.step % self._log_every == 0:
            total = f"/{self.num_windows}" if self.num_windows else ""
            self.note(
                f"epoch {record.epoch} window {record.window + 1}{total}  loss {record.loss:.4f}  "
                f"lr {record.lr[0]:.3g}  {rate:,.0f} samples/s"
            )

    def _begin_epoch(self, record: Record) -> None:
        self._epoch, self._samples = record.epoch, 0
        self._begin = time.perf_counter() - record.seconds
        if not self._live:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
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

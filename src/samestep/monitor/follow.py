"""Follow a ledger while it grows, and show its state as a panel."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from samestep.errors import RunDirError
from samestep.monitor.console import duration
from samestep.monitor.goodput import Goodput
from samestep.monitor.ledger import Lines, parse
from samestep.monitor.rates import Rates
from samestep.monitor.record import Record

__all__ = ["Followed"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_EVENTS = 5
_SILENT = ("digest", "environment", "epochs", "ranks", "flops")


class Followed:
    """A run as its ledger tells it. `read` takes what is new.

    Args:
        run: a run directory, or its ledger.

    Raises:
        RunDirError: when there is no ledger.
    """

    def __init__(self, run: Path) -> None:
        lines = Lines(run)
        self.path, self._older = lines.path, lines.files[:-1]
        if lines.files[-1] != lines.path:
            raise RunDirError(f"{lines.path} does not exist", "a run's newest lines are there", "check the path")
        self.status: str | None = None
        """How the job ended; None while it has not."""
        self._forget()

    def _forget(self) -> None:
        self._offset, self._rest = 0, b""
        self._identity = (0, 0)
        self.goodput, self.rates = Goodput(), Rates()
        self.losses: deque[float] = deque(maxlen=4000)
        self.last: Record | None = None
        self.skips = 0
        self.num_epochs: int | None = None
        self.num_windows: int | None = None
        self.logged: dict[str, float] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._read_older = False
        self.status = None

    def read(self) -> None:
        """Take the lines that have come. A restart may have taken some back: then all is read again."""
        with self.path.open("rb") as file:
            held = os.fstat(file.fileno())
            if (held.st_dev, held.st_ino) != self._identity or held.st_size < self._offset:
                self._forget()
                self._older = Lines(self.path).files[:-1]
                self._identity = held.st_dev, held.st_ino
            if not self._read_older:
                self._read_older = True
                for older in self._older:
                    with older.open("rb") as part:
                        for text in part:
                            self._take(text)
            file.seek(self._offset)
            text = file.read()
        self._offset += len(text)
        *whole, self._rest = (self._rest + text).split(b"\n")
        for line in whole:
            self._take(line)

    def _take(self, text: bytes) -> None:
        line = parse(text)
        if line is None:
            return
        self.goodput.add(line)
        kind = line["kind"]
        if kind == "window":
            self._window(line)
        elif kind == "log":
            self.logged |= {k: float(v) for k, v in line.items() if k not in ("kind", "time", "step", "epoch")}
        elif kind == "epochs":
            self.num_epochs, self.num_windows = line.get("num_epochs"), line.get("num_windows")
        elif kind == "end":
            self.status = str(line.get("status", "done"))
        elif kind == "start":
            self.status, self.rates = None, Rates()
        if kind not in ("window", "log", *_SILENT):
            self.events.append(line)

    def _window(self, line: dict[str, Any]) -> None:
        names = Record.__dataclass_fields__
        known = {name: value for name, value in line.items() if name in names}
        for name in ("loss", "grad_norm"):
            known[name] = float(known[name])  # the ledger has NaN as a word
        memory = known.get("memory") or (self.last.memory if self.last is not None else None)
        self.last = Record(**{**known, "memory": memory})
        self.rates.add(self.last)
        self.losses.append(self.last.loss)
        self.skips += self.last.skipped

    def panel(self, width: int) -> Panel:
        """The state, for a terminal so wide."""
        title = Text(f" {self.path.parent.name or self.path.name} ", style="bold")
        if self.last is None:
            return Panel(Text("no window yet", style="dim"), title=title)
        parts: list[Any] = [self._progress(width), Text(sparkline(self.losses, max(width - 16, 10)), style="blue")]
        return Panel(Group(*parts, self._figures(), *self._told()), title=title, subtitle=self._state())

    def _progress(self, width: int) -> Any:
        last, grid = self.last, Table.grid(padding=(0, 2))
        assert last is not None
        total = f"/{self.num_epochs}" if self.num_epochs else ""
        windows = f"/{self.num_windows}" if self.num_windows else ""
        words = f"epoch {last.epoch + 1}{total}  window {last.window + 1}{windows}  step {last.step:,}"
        if self.num_epochs and self.num_windows:
            all_windows = self.num_epochs * self.num_windows
            done = last.epoch * self.num_windows + last.window + 1
            left = max(all_windows - done, 0) * self.rates.seconds / max(len(self.rates), 1)
            bar = ProgressBar(total=all_windows, completed=done, width=max(min(width - 76, 40), 8))
            grid.add_row(words, bar, f"ETA {duration(left)}" if self.status is None else "")
        else:
            grid.add_row(words)
        return grid

    def _figures(self) -> Table:
        last, rates = self.last, self.rates
        assert last is not None
        p50, p95, longest = (f"{value * 1000:.3g}" for value in rates.window_s)
        rows = [
            ("loss", f"{last.loss:.5g}", "samples/s", f"{rates.samples_per_s:,.0f}"),
            ("gradient norm", f"{last.grad_norm:.4g}", "window", f"{p50} ms, 95 % {p95}, longest {longest}"),
            (
                "learning rate",
                f"{last.lr[0]:.4g}",
                "waits",
                f"data {rates.share('data'):.1%}, exchange {rates.share('exchange'):.1%}",
            ),
            (
                "updates",
                f"{last.updates:,}, {self.skips:,} skipped",
                "goodput",
                f"{self.goodput.goodput:.1%} of {duration(self.goodput.wall)}",
            ),
        ]
        memory = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:.2f}" for name, size in (last.memory or {}).items())
        rows.append(("loss scale", "none" if last.scale is None else f"{last.scale:g}", "GiB", memory or "n/a"))
        table = Table.grid(padding=(0, 2))
        for style in ("dim", "bold", "dim", ""):
            table.add_column(style=style)
        for row in rows:
            table.add_row(*row)
        return table

    def _told(self) -> list[Text]:
        told = []
        if self.logged:
            told.append(Text("  ".join(f"{name} {value:.5g}" for name, value in self.logged.items()), style="green"))
        for event in self.events:
            at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
            status = event.get("status") or (f"{event['seconds']:.3g} s" if "seconds" in event else "")
            words = f"{at}  {event['kind']} at step {event.get('step', '?')}  {status}"
            told.append(Text("".join(c if c.isprintable() else "?" for c in words), style="dim"))
        return told

    def _state(self) -> Text:
        if self.status is not None:
            words = "".join(c if c.isprintable() else "?" for c in self.status)
            return Text(f" {words} ", style="green" if self.status == "done" else "red")
        assert self.last is not None
        silent = time.time() - self.last.time
        return Text(f" last window {duration(silent)} ago ", style="yellow" if silent > 60 else "dim")


def sparkline(values: Any, width: int) -> str:
    """The values' course in one line of block characters, at most `width` of them; non-finite ones are "x"."""
    values = list(values)
    size = max(1, -(-len(values) // width))
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    means = [sum(finite) / len(finite) if (finite := [v for v in group if v - v == 0]) else None for group in groups]
    known = [mean for mean in means if mean is not None]
    if not known:
        return "x" * len(means)
    low, span = min(known), max(known) - min(known)
    steps = len(_BLOCKS) - 1
    return "".join("x" if m is None else _BLOCKS[round((m - low) / span * steps) if span else 0] for m in means)

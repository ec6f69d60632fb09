"""Where the host's time of a window goes: two clock readings a stage, a few microseconds a window."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from samestep.monitor.record import Record

__all__ = ["Clock", "Watcher"]


class Watcher(Protocol):
    """Is told of the stages as they come, on the host: a profiler, a counter of FLOPs."""

    def opened(self) -> None:
        """A window was opened."""

    def enter(self, stage: str) -> None:
        """A stage begins: data, backward, exchange or finish."""

    def leave(self) -> None:
        """It ends."""

    def closed(self) -> None:
        """The window ends."""


class Clock:
    """Adds up the stages of the open window. Stages do not nest.

    Args:
        device: where the run computes. On a GPU the host runs ahead of the device, so the exchange is timed there, by
            events that are read with the window's other numbers.
        alone: one rank: there is no exchange.
    """

    def __init__(self, device: torch.device, alone: bool) -> None:
        self._device, self._alone = device, alone
        self.last_end: float | None = None
        """When the last window ended; at first, when the first one began to wait for data."""
        self.exposed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """On a GPU: the ends of backward's computation and of the exchange."""
        self._opened: float | None = None
        self._computed = self._begin = 0.0
        self._stage = ""
        self._seconds = {"data": 0.0, "exchange": 0.0, "finish": 0.0}
        self.watchers: list[Watcher] = []
        self.totals = dict.fromkeys(("windows", "seconds", "data", "exchange", "finish", "outside"), 0.0)
        """Sums over this rank's windows since somebody took them."""

    def enter(self, stage: str) -> None:
        """A stage begins: "data", "exchange" or "finish"."""
        for watcher in self.watchers:
            watcher.enter(stage)
        self._stage, self._begin = stage, time.perf_counter()

    def leave(self) -> None:
        """The stage ends."""
        self._seconds[self._stage] += time.perf_counter() - self._begin
        for watcher in self.watchers:
            watcher.leave()

    def open(self) -> None:
        """A window is opened, or opened again for another phase."""
        if self._opened is None:
            self._opened = time.perf_counter()
            if self.last_end is None:
                self.last_end = self._opened
            for watcher in self.watchers:
                watcher.opened()

    def backward(self, loss: torch.Tensor, exchanges: bool) -> None:
        """`loss.backward()`; of one that exchanges, the time between its last gradient and the ranks' sum is taken."""
        for watcher in self.watchers:
            watcher.enter("backward")
        if self._alone or not exchanges:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._exchanging_backward(loss)
        for watcher in self.watchers:
            watcher.leave()

    def _exchanging_backward(self, loss: torch.Tensor) -> None:
        self._computed = 0.0
        hook = loss.register_hook(self._queue)  # type: ignore[no-untyped-call]
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            hook.remove()
        if self._computed:
            self._seconds["exchange"] += time.perf_counter() - self._computed
            if self.exposed is not None:
                self.exposed[1].record()

    def _queue(self, grad: torch.Tensor) -> None:
        # DDP queues its own wait when the last bucket is ready, so this one runs before it, when the computation is done.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_computation)

    def _end_of_computation(self) -> None:
        self._computed = time.perf_counter()
        if self._device.type == "cuda":
            events: Any = torch.cuda.Event
            self.exposed = events(enable_timing=True), events(enable_timing=True)
            self.exposed[0].record()

    def close(self, record: Record) -> None:
        """A window has ended: put its times into `record`, begin the next."""
        now, seconds = time.perf_counter(), self._seconds
        begin = now if self.last_end is None else self.last_end
        record.time = time.time()
        record.seconds = now - begin
        record.data_seconds, record.finish_seconds = seconds["data"], seconds["finish"]
        record.exchange_seconds = 0.0 if self._alone else seconds["exchange"]
        record.outside_seconds = (now if self._opened is None else self._opened) - begin
        totals = self.totals
        totals["windows"] += 1
        totals["seconds"] += record.seconds
        totals["data"] += record.data_seconds
        totals["exchange"] += record.exchange_seconds
        totals["finish"] += record.finish_seconds
        totals["outside"] += record.outside_seconds
        self.restart(now)
        for watcher in tuple(self.watchers):
            watcher.closed()

    def take_totals(self) -> dict[str, float]:
        """The sums, which begin anew. On a GPU the exchange is not in them: the device has it."""
        totals, self.totals = self.totals, dict.fromkeys(self.totals, 0.0)
        return totals

    def restart(self, now: float | None = None) -> None:
        """Forget the open window: the loop left it out, and its time is between the windows."""
        if now is not None:
            self.last_end = now
        self._opened = None
        self._seconds = dict.fromkeys(self._seconds, 0.0)

    @staticmethod
    def device_exchange(exposed: tuple[torch.cuda.Event, torch.cuda.Event] | None) -> float | None:
        """Seconds the device waited for the exchange; None on a CPU. Both events have passed."""
        return None if exposed is None else exposed[0].elapsed_time(exposed[1]) / 1000.0

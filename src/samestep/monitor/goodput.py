"""Goodput: where the wall time of a whole job went, over all its restarts. From the ledger alone."""

from __future__ import annotations

from typing import Any

__all__ = ["PARTS", "Goodput"]

PARTS = {
    "compute": "forward, backward and finish",
    "data": "waiting for data",
    "exchange": "waiting for the other ranks' gradients",
    "checkpoint": "saving",
    "evaluation": "evaluating",
    "other": "the loop's own code and the rest",
    "startup": "from a process's start to its first window",
    "lost": "windows that a restart did again",
    "down": "no process at work",
}
"""Each second of the job is in exactly one of these."""


class Goodput:
    """Takes a ledger's lines in order.

    Each line has a time; what lies between two lines is shared out by what the second one says of itself. So the parts
    add up to the wall time from the first process's start to the last line. A process that was killed leaves no last
    word: from its last line on it counts as down.

    Attributes:
        seconds: {part: seconds}.
        windows: windows that count, a repeated one once.
        samples: samples of these.
        starts: processes begun.
        lost_windows: windows that were done again.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.windows = self.samples = self.starts = self.lost_windows = 0
        self.begin: float | None = None
        self._cursor = 0.0
        self._starting = False
        """No window since the last start line."""
        self._gap = 0.0
        """Seconds before the last start line."""

    def add(self, line: dict[str, Any]) -> None:
        """Take a line."""
        kind, at = line["kind"], line.get("time")
        if not isinstance(at, int | float):
            return
        if self.begin is None:
            self.begin = self._cursor = at
        if kind == "start":
            self.starts += 1
            self._until(at, "down")
            self._starting = True
        elif kind == "environment":
            self._process_began(line.get("process_start"))
        elif kind == "lost":
            self.lost_windows += line.get("windows", 0)
            self._until(min(line.get("last_time", at), at), "lost")
        elif kind == "window":
            self._window(line, at)
        elif kind in ("checkpoint", "evaluation"):
            self._share(at, {kind: line.get("seconds", 0.0)}, "startup" if self._starting else "other")
        else:
            self._until(at, "startup" if self._starting else "other")

    def _process_began(self, at: Any) -> None:
        """What was taken for down before the start line was in part the process starting."""
        if not isinstance(at, int | float) or not self._starting:
            return
        if self.starts == 1 and self.begin is not None and at < self.begin:
            self.seconds["startup"] += self.begin - at
            self.begin = at
        elif at < self._cursor:
            moved = min(self._cursor - at, self.seconds["down"], self._gap)
            self.seconds["down"] -= moved
            self.seconds["startup"] += moved

    def _window(self, line: dict[str, Any], at: float) -> None:
        self.windows += 1
        self.samples += line.get("samples", 0)
        if self._starting:
            self._starting = False
            self._until(at - line["seconds"], "startup")
        outside = line.get("outside_seconds", 0.0)
        inside = line["seconds"] - outside
        data, exchange = line["data_seconds"], line.get("exchange_seconds", 0.0)
        self._share(at, {"data": data, "exchange": exchange, "compute": inside - data - exchange}, "other")

    def _share(self, at: float, parts: dict[str, float], rest: str) -> None:
        """Give the time up to `at` to the parts, no more than there is, and what is left to `rest`."""
        span = at - self._cursor
        if span <= 0:
            return
        self._cursor = at
        parts = {name: max(seconds, 0.0) for name, seconds in parts.items()}
        named = sum(parts.values())
        scale = min(1.0, span / named) if named else 0.0
        for name, seconds in parts.items():
            self.seconds[name] += seconds * scale
        self.seconds[rest] += span - named * scale

    def _until(self, at: float, part: str) -> None:
        self._gap = max(at - self._cursor, 0.0)
        self.seconds[part] += self._gap
        self._cursor = max(self._cursor, at)

    @property
    def wall(self) -> float:
        """Seconds from the first process's start to the last line."""
        return 0.0 if self.begin is None else self._cursor - self.begin

    @property
    def shares(self) -> dict[str, float]:
        """{part: share of the wall time}, adding up to 1 (all 0 without any line)."""
        wall = self.wall
        return {name: seconds / wall if wall else 0.0 for name, seconds in self.seconds.items()}

    @property
    def goodput(self) -> float:
        """The share that computed windows which count."""
        return self.shares["compute"]

"""Where a window's time goes, by torch.profiler: a trace file, a table, and how much of the exchange was hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, record_function, schedule

from samestep.errors import ConfigError

__all__ = ["Found", "Profile", "hidden", "start_profile", "union"]

Span = tuple[float, float]
_PREFIX = "samestep/"
_STAGES = ("data", "backward", "exchange", "finish")
_TOP = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What the profiled windows came to; times are milliseconds a window."""

    windows: int
    window_ms: float
    stages_ms: dict[str, float]
    """Host time of data, backward, exchange, finish, and "forward and the rest"."""
    exchange_ms: float
    """Time in which a collective was under way, on the device where there is one."""
    hidden_ms: float
    """Of that, while something was computed."""
    operators: list[tuple[str, float, int]]
    """(name, own time, calls) of the costliest operators, on the device where there is one."""

    @property
    def overlap(self) -> float | None:
        """Part of the exchange that computation hid, 0 to 1; None without an exchange."""
        return self.hidden_ms / self.exchange_ms if self.exchange_ms else None

    def table(self) -> str:
        """For a person."""
        lines = [f"{self.windows} windows, {self.window_ms:.3f} ms each under the profiler"]
        for name, ms in self.stages_ms.items():
            lines.append(f"  {name:<22}{ms:10.3f} ms {ms / self.window_ms if self.window_ms else 0:7.1%}")
        shown = "none" if self.overlap is None else f"{self.exchange_ms:.3f} ms, {self.overlap:.0%} of it hidden"
        lines.append(f"collectives: {shown}")
        lines.append("costliest operators (own time a window, calls a window):")
        lines += [f"  {name[:48]:<48}{ms:10.3f} ms {calls / self.windows:8.1f}" for name, ms, calls in self.operators]
        return "\n".join(lines)


class Profile:
    """Watches the run's clock; ends by itself.

    Args:
        directory: where trace.json and table.txt go; None: only NVTX ranges.
        device: where the run computes.
        windows: windows that are profiled.
        skip: windows before them.
        done: is given what was found, once.
    """

    def __init__(
        self, directory: Path | None, device: torch.device, windows: int, skip: int, done: Callable[[Found], None]
    ) -> None:
        self._directory, self._cuda, self._windows, self._done = directory, device.type == "cuda", windows, done
        self._ranges: list[Any] = []
        self.ended = False
        self._profiler: Any = None
        if directory is not None:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda
            plan = schedule(wait=max(skip - 1, 0), warmup=min(skip, 1), active=windows, repeat=1)
            self._profiler = torch.profiler.profile(activities=activities, schedule=plan, on_trace_ready=self._ready)
            self._profiler.start()

    def opened(self) -> None:
        """A window: the range that holds the stages."""
        self._push("window")

    def enter(self, stage: str) -> None:
        """A stage begins."""
        self._push(stage)

    def leave(self) -> None:
        """It ends."""
        if self._ranges:
            self._pop()

    def closed(self) -> None:
        """A window ends."""
        while self._ranges:
            self._pop()
        if self._profiler is not None:
            self._profiler.step()

    def stop(self) -> None:
        """The run ends, perhaps before the profile."""
        while self._ranges:
            self._pop()
        if self._profiler is not None and not self.ended:
            self.ended = True
            self._profiler.stop()

    def _push(self, name: str) -> None:
        entered: Any = record_function(_PREFIX + name)
        entered.__enter__()
        self._ranges.append(entered)
        if self._cuda:
            torch.cuda.nvtx.range_push(_PREFIX + name)  # type: ignore[no-untyped-call]

    def _pop(self) -> None:
        if self._cuda:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        self._ranges.pop().__exit__(None, None, None)

    def _ready(self, profiler: Any) -> None:
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._directory / "trace.json"))
        found = analyse(list(profiler.events()), self._cuda)
        (self._directory / "table.txt").write_text(found.table() + "\n")
        self._done(found)


class _Files(Protocol):
    display: Any

    def event(self, kind: str, **fields: Any) -> None: ...

    def when_closing(self, function: Callable[[], None]) -> None: ...


def start_profile(files: _Files, engine: Any, directory: Path | None, windows: int, skip: int, trace: bool) -> None:
    """Begin a profile of the next windows, on main.

    Raises:
        ConfigError: for counts that are none, or a trace without a directory.
    """
    for name, value, least in (("windows", windows, 1), ("skip", skip, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"got profile({name}={value!r})", f"it is a whole number, {least} or more", "pass 5")
    if directory is None and trace:
        raise ConfigError("got profile() in a run without a directory", "the trace is a file", "Run('runs/mine')")
    if not engine.world.is_main:
        return

    def done(found: Found) -> None:
        engine.clock.watchers.remove(profile)
        path = None if directory is None else str(directory / "profile" / "trace.json")
        files.event("profile", step=engine.step, trace=path, **dataclasses.asdict(found))
        files.display.note(f"{found.table()}\ntrace: {path}")

    profile = Profile(directory / "profile" if directory and trace else None, engine.device, windows, skip, done)
    engine.clock.watchers.append(profile)
    files.when_closing(profile.stop)


def analyse(events: Iterable[Any], cuda: bool) -> Found:
    """Stages, overlap and costliest operators of torch.profiler's events."""
    events = list(events)
    host = [event for event in events if not _on_device(event)]
    spans = {stage: _spans(host, _PREFIX + stage) for stage in (*_STAGES, "window")}
    number = max(len(spans["window"]), 1)
    window_ms = _length(spans["window"]) / 1000 / number
    stages = {stage: _length(spans[stage]) / 1000 / number for stage in _STAGES}
    stages["forward and the rest"] = max(window_ms - sum(stages.values()), 0.0)
    work = [event for event in events if _on_device(event)] if cuda else host
    meetings = union([_span(event) for event in work if _is_exchange(event.name)])
    computing = union([_span(event) for event in work if _is_computation(event.name, cuda)])
    costs: dict[str, list[float]] = {}
    for event in work:
        if _is_computation(event.name, cuda):
            cost = costs.setdefault(event.name, [0.0, 0])
            own = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
            cost[0], cost[1] = cost[0] + own / 1000 / number, cost[1] + 1
    ordered = sorted(((name, ms, int(calls)) for name, (ms, calls) in costs.items()), key=lambda cost: -cost[1])
    return Found(
        windows=number,
        window_ms=window_ms,
        stages_ms=stages,
        exchange_ms=_length(meetings) / 1000 / number,
        hidden_ms=hidden(meetings, computing) / 1000 / number,
        operators=ordered[:_TOP],
    )


def _on_device(event: Any) -> bool:
    return not str(event.device_type).endswith("CPU")


def _is_exchange(name: str) -> bool:
    return name.startswith(("gloo:", "nccl:")) or "ncclDevKernel" in name or "ncclKernel" in name


def _is_computation(name: str, cuda: bool) -> bool:
    if _is_exchange(name) or name.startswith((_PREFIX, "ProfilerStep")):
        return False
    return cuda or name.startswith("aten::")


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def _spans(events: list[Any], name: str) -> list[Span]:
    return [_span(event) for event in events if event.name == name]


def _length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def union(spans: list[Span]) -> list[Span]:
    """The spans' union as disjoint spans, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def hidden(some: list[Span], others: list[Span]) -> float:
    """Length of the intersection of two lists of disjoint spans in order."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        total += max(0.0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total

"""Read a ledger once, line by line, into columns: what the report draws."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

from samestep.errors import RunDirError
from samestep.monitor.goodput import Goodput
from samestep.monitor.ledger import Lines

__all__ = ["COLUMNS", "RunData", "read_run"]

COLUMNS = (
    *("step", "time", "loss", "grad_norm", "samples", "weight"),
    *("seconds", "data_seconds", "exchange_seconds", "finish_seconds", "outside_seconds"),
)
_DEFAULT = dict.fromkeys(("exchange_seconds", "finish_seconds", "outside_seconds"), 0.0)
_MAX_EVENTS = 2000


def _columns() -> dict[str, array[float]]:
    return {name: array("d") for name in (*COLUMNS, "lr", "scale")}


@dataclasses.dataclass(slots=True)
class RunData:
    """One run."""

    name: str
    columns: dict[str, array[float]] = dataclasses.field(default_factory=_columns)
    """One number a window; NaN where there is none."""
    skipped: list[int] = dataclasses.field(default_factory=list)
    """Steps of the windows that were skipped."""
    memory: list[tuple[int, float, dict[str, float]]] = dataclasses.field(default_factory=list)
    """(step, time, bytes by name)."""
    logs: dict[str, list[tuple[int, float, float]]] = dataclasses.field(default_factory=dict)
    """Name of run.log to (step, time, value)."""
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Everything but windows, logs and digests, the first 2,000."""
    events_left_out: int = 0
    start: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The last start line."""
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """The last line of each of: epochs, flops, ranks, profile, end."""
    goodput: Goodput = dataclasses.field(default_factory=Goodput)
    updates: int = 0
    epoch: int = 0
    damaged: int = 0
    """Lines in the middle that could not be read."""

    @property
    def status(self) -> str:
        """How it ended: "done", an error, or that no end is recorded."""
        end = self.facts.get("end")
        return "no end recorded: running, or killed" if end is None else str(end.get("status", "done"))


def read_run(path: Path, name: str) -> RunData:
    """Read a run directory or ledger file, of any length, once.

    Raises:
        RunDirError: when there is no ledger, one of another schema, or one without any window.
    """
    run, lines = RunData(name), Lines(path)
    take_window = _window_taker(run)
    take_time = run.goodput.add
    for line in lines:
        take_time(line)
        if line["kind"] == "window":
            take_window(line)
        else:
            _event(run, line)
    run.damaged = lines.damaged
    if not run.columns["step"]:
        raise RunDirError(f"{lines.path} holds no window", "a report shows one at least", "let the run begin")
    return run


def _window_taker(run: RunData) -> Any:
    appends = [(name, run.columns[name].append) for name in COLUMNS]
    lr, scale = run.columns["lr"].append, run.columns["scale"].append
    nan = float("nan")

    def take(line: dict[str, Any]) -> None:
        for name, append in appends:
            value = line.get(name, _DEFAULT.get(name, nan))
            append(value if type(value) is float else float(value))
        rates = line.get("lr")
        lr(float(rates[0]) if rates else nan)
        value = line.get("scale")
        scale(nan if value is None else float(value))
        run.updates, run.epoch = line.get("updates", 0), line.get("epoch", 0)
        if line.get("skipped"):
            run.skipped.append(line["step"])
        memory = line.get("memory")
        if memory:
            run.memory.append((line["step"], line["time"], memory))

    return take


def _event(run: RunData, line: dict[str, Any]) -> None:
    kind = line["kind"]
    if kind == "digest":
        return
    if kind == "log":
        for name, value in line.items():
            if name not in ("kind", "time", "step", "epoch"):
                run.logs.setdefault(name, []).append((line["step"], line["time"], float(value)))
        return
    if kind == "start":
        run.start = line
        run.facts.pop("end", None)  # it went on
    elif kind == "environment":
        run.environment = line
        return
    elif kind in ("epochs", "flops", "ranks", "profile", "end"):
        run.facts[kind] = line
    if kind in ("epochs", "ranks"):
        return
    if len(run.events) < _MAX_EVENTS:
        run.events.append(line)
    else:
        run.events_left_out += 1

"""The report's page: data, script and style in one HTML file that opens without a network."""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samestep import __version__
from samestep.errors import ConfigError, RunDirError
from samestep.monitor.flops import mfu, mfu_text
from samestep.monitor.goodput import PARTS
from samestep.monitor.ledger import plain
from samestep.monitor.report.curves import curves
from samestep.monitor.report.read import RunData, read_run

__all__ = ["page", "report"]

_MAX_RUNS = 8
_SHOWN_WINDOWS = 500


def report(runs: Sequence[Path]) -> str:
    """The page of these runs.

    Args:
        runs: run directories or ledger files, up to 8.

    Raises:
        ConfigError: for none, or more than 8.
        RunDirError: for a run without a ledger.
    """
    if not 1 <= len(runs) <= _MAX_RUNS:
        raise ConfigError(f"got {len(runs)} runs", f"a page shows 1 to {_MAX_RUNS}", "leave some out")
    return page([read_run(path, name) for path, name in zip(runs, _names(runs), strict=True)])


def _names(runs: Sequence[Path]) -> list[str]:
    """The directories' names, with as much of the path in front as makes them differ."""
    paths = [(path.parent if path.is_file() else path).resolve() for path in runs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise RunDirError("got the same run twice", "each run is shown once", "leave one out")


def page(runs: Sequence[RunData]) -> str:
    """The page of what was read."""
    data = {"version": __version__, "parts": PARTS, "runs": [_run(run) for run in runs]}
    # In a script element only "</" could end the data; every "<" is escaped, so nothing in it is ever markup.
    text = json.dumps(plain(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    title = ", ".join(run.name for run in runs)
    replacements = {
        "TITLE": html.escape(f"{title} - Samestep report"),
        "STYLE": _asset("uPlot.min.css") + _asset("report.css"),
        "PLOT": f"/*{_asset('uPlot.LICENSE')}*/\n{_asset('uPlot.iife.min.js')}",
        "SCRIPT": _asset("report.js"),
        "DATA": text,
    }
    parts = _asset("report.html").split("@@")
    return "".join(replacements[part] if number % 2 else part for number, part in enumerate(parts))


def _asset(name: str) -> str:
    return importlib.resources.files("samestep.monitor.report").joinpath("assets", name).read_text("utf-8")


def _run(run: RunData) -> dict[str, Any]:
    return {
        "name": run.name,
        "status": run.status,
        "summary": _summary(run),
        "curves": curves(run),
        "goodput": {"seconds": run.goodput.seconds, "wall": run.goodput.wall},
        "events": [_event(event, run) for event in run.events],
        "events_left_out": run.events_left_out,
        "ranks": run.facts.get("ranks", {}).get("ranks", []),
        "profile": run.facts.get("profile"),
        "config": {**run.start.get("config", {}), **_started(run)},
        "environment": {k: v for k, v in run.environment.items() if k not in ("kind", "time", "step")},
    }


def _started(run: RunData) -> dict[str, Any]:
    names = ("world_size", "precision", "exchange", "device", "threads", "torch")
    return {name: run.start[name] for name in names if name in run.start}


def _event(event: dict[str, Any], run: RunData) -> dict[str, Any]:
    text = ", ".join(f"{name} {_short(value)}" for name, value in event.items() if name in _TOLD)
    hours = (event["time"] - (run.goodput.begin or event["time"])) / 3600
    return {"kind": event["kind"], "step": event.get("step"), "time": event["time"], "hours": hours, "text": text}


_TOLD = (
    *("world_size", "precision", "exchange", "device", "seconds", "path", "windows", "samples", "last_step"),
    *("status", "per_sample", "device_name", "trace", "message", "reason", "error", "rank", "sink"),
)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _summary(run: RunData) -> list[tuple[str, str, str]]:
    """(name, value, what it means)."""
    columns = {name: np.frombuffer(values, dtype=np.float64) for name, values in run.columns.items()}
    recent = columns["loss"][-100:]
    finite = recent[np.isfinite(recent)].tolist()
    rate = _rate(columns)
    inside = np.sort(columns["seconds"] - columns["outside_seconds"])
    p50, p95 = (float(np.percentile(inside, percent)) for percent in (50, 95))
    rows = [
        ("loss", f"{statistics.fmean(finite):.4g}" if finite else "n/a", f"mean of the last {len(finite)} windows"),
        ("updates", f"{run.updates:,}", f"{len(run.columns['step']):,} windows, {len(run.skipped):,} skipped"),
    ]
    rows += [(name, f"{points[-1][2]:.4g}", "last logged") for name, points in list(run.logs.items())[:4]]
    rows += [
        ("samples/s", _number(rate), f"over all ranks, last {min(_SHOWN_WINDOWS, len(inside))} windows"),
        ("window", _milliseconds(p50), f"median; 95 % under {_milliseconds(p95)}, longest {_milliseconds(inside[-1])}"),
        ("goodput", f"{run.goodput.goodput:.1%}", "of the wall time computed windows that count"),
        ("wall time", _duration(run.goodput.wall), f"{run.goodput.starts} start(s)"),
    ]
    flops = run.facts.get("flops", {})
    share = mfu(flops.get("per_sample"), rate, flops.get("peak"), int(run.start.get("world_size", 1)))
    note = "of the dense peak" if share is not None else "needs count_flops=True and a GPU of the table"
    rows.append(("MFU", mfu_text(share), note))
    peaks = [held.get("peak_allocated", held.get("process_peak", 0)) for _, _, held in run.memory]
    if peaks:
        gpu = any("peak_allocated" in held for _, _, held in run.memory)
        rows.append(("peak memory", f"{max(peaks) / 2**30:.2f} GiB", "of main's GPU" if gpu else "of main's process"))
    if run.damaged:
        rows.append(("damaged lines", f"{run.damaged:,}", "of the ledger, left out"))
    return rows


def _rate(columns: dict[str, Any]) -> float:
    seconds = float(columns["seconds"][-_SHOWN_WINDOWS:].sum())
    return float(columns["samples"][-_SHOWN_WINDOWS:].sum()) / seconds if seconds else math.nan


def _number(value: float) -> str:
    return "n/a" if not math.isfinite(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"

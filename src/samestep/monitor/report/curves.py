"""From a column a window to a curve of so many points that a browser draws it at once, extremes kept."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samestep.monitor.report.read import RunData

__all__ = ["Buckets", "curves", "plain_numbers"]

Floats = NDArray[np.float64]
RAW, POINTS = 3000, 1500
"""Up to so many windows each is a point; more are put into so many buckets."""


class Buckets:
    """Equal runs of windows, each at its last window's place.

    Args:
        length: windows.
        number: buckets at most.
    """

    def __init__(self, length: int, number: int) -> None:
        number = max(1, min(length, number))
        edges = np.linspace(0, length, number + 1).astype(np.int64)
        self.starts, self.ends = edges[:-1], edges[1:]
        self.single = number == length

    def lowest(self, values: Floats) -> Floats:
        """Smallest of each bucket, NaN ignored."""
        return np.asarray(np.fmin.reduceat(values, self.starts))

    def highest(self, values: Floats) -> Floats:
        """Largest of each bucket, NaN ignored."""
        return np.asarray(np.fmax.reduceat(values, self.starts))

    def total(self, values: Floats) -> Floats:
        """Sum of each bucket, NaN ignored."""
        return np.asarray(np.add.reduceat(np.where(np.isfinite(values), values, 0.0), self.starts))

    def mean(self, values: Floats) -> Floats:
        """Mean of each bucket's finite values."""
        count = np.add.reduceat(np.isfinite(values).astype(np.float64), self.starts)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.total(values) / count)

    def last(self, values: Floats) -> Floats:
        """Last of each bucket."""
        return values[self.ends - 1]

    def percentile(self, values: Floats, percent: float) -> Floats:
        """Of each bucket."""
        pairs = zip(self.starts, self.ends, strict=True)
        return np.array([np.percentile(values[begin:end], percent) for begin, end in pairs])


def curves(run: RunData) -> dict[str, Any]:
    """All curves of a run: {group: {"step": [...], "hours": [...], name: [...]}} in JSON numbers (None for NaN)."""
    columns = {name: np.frombuffer(values, dtype=np.float64) for name, values in run.columns.items()}
    length = len(columns["step"])
    begin = run.goodput.begin or float(columns["time"][0])
    hours = (columns["time"] - begin) / 3600
    fine = Buckets(length, length if length <= RAW else POINTS)
    coarse = Buckets(length, length if length < 100 else min(400, max(100, length // 20)))
    found: dict[str, Any] = {"training": _training(columns, hours, fine), "speed": _speed(columns, hours, coarse)}
    found["memory"] = _memory(run, begin)
    found["logs"] = {
        name: {
            "step": [step for step, _, _ in points],
            "hours": plain_numbers(np.array([(at - begin) / 3600 for _, at, _ in points])),
            "value": plain_numbers(np.array([value for _, _, value in points])),
        }
        for name, points in run.logs.items()
    }
    marks = np.array(run.skipped[:: max(1, math.ceil(len(run.skipped) / 4000))], dtype=np.float64)
    found["skipped"] = {"step": plain_numbers(marks), "hours": _hours_at(columns["step"], hours, marks)}
    return found


def _training(columns: dict[str, Floats], hours: Floats, buckets: Buckets) -> dict[str, Any]:
    found = {"step": buckets.last(columns["step"]), "hours": buckets.last(hours)}
    for name in ("loss", "grad_norm"):
        found[name] = buckets.mean(columns[name])
        if not buckets.single:
            found[f"{name}_low"], found[f"{name}_high"] = buckets.lowest(columns[name]), buckets.highest(columns[name])
    found["lr"] = buckets.last(columns["lr"])
    if np.isfinite(columns["scale"]).any():
        found["scale"] = buckets.last(columns["scale"])
    return {name: plain_numbers(values) for name, values in found.items()}


def _speed(columns: dict[str, Floats], hours: Floats, buckets: Buckets) -> dict[str, Any]:
    seconds = buckets.total(columns["seconds"])
    inside = columns["seconds"] - columns["outside_seconds"]
    windows = (buckets.ends - buckets.starts) / 1000  # milliseconds a window
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {
            "step": buckets.last(columns["step"]),
            "hours": buckets.last(hours),
            "samples_per_s": buckets.total(columns["samples"]) / seconds,
            "p50": buckets.percentile(inside, 50) * 1000,
        }
        if not buckets.single:
            found["p95"], found["max"] = buckets.percentile(inside, 95) * 1000, buckets.highest(inside) * 1000
        if (columns["weight"] != columns["samples"]).any():
            found["weight_per_s"] = buckets.total(columns["weight"]) / seconds
    parts = {name: buckets.total(columns[f"{name}_seconds"]) for name in ("data", "exchange", "finish", "outside")}
    parts["compute"] = np.maximum(seconds - sum(parts.values()), 0.0)
    found |= {name: part / windows for name, part in parts.items()}
    return {name: plain_numbers(values) for name, values in found.items()}


def _memory(run: RunData, begin: float) -> dict[str, Any]:
    points = run.memory[:: max(1, math.ceil(len(run.memory) / POINTS))]
    if not points:
        return {}
    found = {
        "step": [step for step, _, _ in points],
        "hours": plain_numbers(np.array([(at - begin) / 3600 for _, at, _ in points])),
    }
    for name in ("process", "allocated", "reserved", "peak_allocated"):
        values = np.array([float(held.get(name, math.nan)) for _, _, held in points]) / 2**30
        if np.isfinite(values).any():
            found[name] = plain_numbers(values)
    return found


def _hours_at(steps: Floats, hours: Floats, marks: Floats) -> list[float | int | None]:
    return plain_numbers(hours[np.minimum(np.searchsorted(steps, marks), len(steps) - 1)])


def plain_numbers(values: Floats) -> list[float | int | None]:
    """JSON numbers with 6 digits; whole ones whole; None for NaN and infinity."""
    return [
        None if not math.isfinite(value) else int(value) if value.is_integer() else float(f"{value:.6g}")
        for value in np.asarray(values, dtype=np.float64).tolist()
    ]

"""Compare two ledgers window by window: the first window that differs, in what, and how far.

Both files are read side by side, a line at a time, so that long runs need no memory. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.errors import ConfigError, RunDirError
from samestep.monitor.ledger import SCHEMA

__all__ = ["Comparison", "Difference", "compare", "relative"]

# What of a window is compared, in the order of cause and effect, and what people call it.
_FIELDS = {
    "place": "place (epoch, window)",
    "data": "data (which samples)",
    "samples": "samples in the window",
    "weight": "loss terms (weight)",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "skipped": "skipped",
    "scale": "loss scale",
    "lr": "learning rate",
    "weights": "weights after the window",
}
_HELD = 3  # windows that wait for their digest line: on a GPU it is written a window late


@dataclasses.dataclass(slots=True, kw_only=True)
class Difference:
    """One thing in which the first differing window differs."""

    field: str
    label: str
    a: Any
    b: Any
    relative: float | None = None
    """|a - b| / max(|a|, |b|); inf against NaN or infinity; None for what is no number."""


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """What `compare` found."""

    files: tuple[str, str]
    windows: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    """Windows of each ledger."""
    num_same: int = 0
    """Windows of both before the first difference."""
    last_same: int | None = None
    """The step of the last window before the first difference."""
    step: int | None = None
    """Where the first difference is, in windows finished; None: there is none."""
    place: str = ""
    differences: list[Difference] = dataclasses.field(default_factory=list)
    """In what that window differs, in the order of cause and effect."""
    tensors: list[str] = dataclasses.field(default_factory=list)
    """The tensors that differ at the first digest line that differs."""
    tensors_step: int | None = None
    digest_same: int | None = None
    """The step of the last digest line that is the same in both, before the first difference."""
    num_digests: int = 0
    """Digest lines that could be compared."""
    starts: list[dict[str, Any]] = dataclasses.field(default_factory=lambda: [{}, {}])
    """Each run's latest start line at the first difference."""
    restarts: list[list[dict[str, Any]]] = dataclasses.field(default_factory=lambda: [[], []])
    """For each run whose restart lies just before the first difference, the start lines before and after."""
    previous: tuple[dict[str, Any], dict[str, Any]] | None = None
    current: tuple[dict[str, Any], dict[str, Any]] | None = None
    """The window's lines, and those of the last window that is the same."""
    next_gap: float | None = None
    """The relative difference of the loss in the window after the first difference."""
    largest_gap: tuple[float, int] | None = None
    """The largest later one, and its step."""

    @property
    def same(self) -> bool:
        """Whether the runs are the same in all that was compared."""
        return self.step is None

    def differs(self, *fields: str) -> bool:
        """Whether the first differing window differs in one of these."""
        return any(difference.field in fields for difference in self.differences)

    def relative(self, field: str) -> float:
        """How far the first differing window differs in this; 0 if it does not."""
        return next((d.relative or 0.0 for d in self.differences if d.field == field), 0.0)


def compare(a: Path, b: Path, tolerance: float = 0.0) -> Comparison:
    """Compare two runs by their ledgers.

    Args:
        a: a run directory or a ledger file.
        b: another.
        tolerance: relative difference up to which numbers count as equal. Above 0, digests of weights say nothing,
            because they differ for the smallest change; they only name tensors.

    Raises:
        ConfigError: for a tolerance that is not a number from 0 to 1.
        RunDirError: for a file that is missing, is no ledger, holds no window, or has another schema.
    """
    if not 0.0 <= tolerance < 1.0:
        raise ConfigError(f"got tolerance={tolerance!r}", "it is a relative difference, from 0 to 1", "pass 1e-6")
    readers = _Reader(a), _Reader(b)
    found = Comparison(files=(str(readers[0].path), str(readers[1].path)))
    comparing = _Comparing(found, tolerance)
    for left, right in _side_by_side(readers[0].entries(), readers[1].entries()):
        comparing.entry(left, right)
    comparing.end()
    for number, reader in enumerate(readers):
        if not found.windows[number]:
            raise RunDirError(f"{reader.path} holds no window", "a comparison needs one at least", "let the run go on")
    return found


# Reading --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Entry:
    """All that a ledger says of one step."""

    step: int
    window: dict[str, Any] | None = None
    digest: dict[str, Any] | None = None
    start: dict[str, Any] | None = None
    """The start line since the entry before."""


class _Reader:
    def __init__(self, given: Path) -> None:
        self.path = given / "ledger.jsonl" if given.is_dir() else given
        if not self.path.is_file():
            raise RunDirError(
                f"{self.path} does not exist", "a run with a directory writes its ledger.jsonl there", "check the path"
            )
        self._starts = [self._step(number, line) for number, line in self._lines(b'"start"') if line["kind"] == "start"]

    def entries(self) -> Iterator[_Entry]:
        """One entry a step, in order; a window that a restart did again is the last one done."""
        # What a restart took back is of no effect: after i starts, steps above the lowest later start's.
        limits = [min(self._starts[i:], default=math.inf) for i in range(len(self._starts) + 1)]
        held: list[_Entry] = []
        start, num_starts, last = None, 0, -1
        for number, line in self._lines():
            kind = line["kind"]
            if kind == "start":
                num_starts += 1
                start = line
                continue
            if kind not in ("window", "digest") or (step := self._step(number, line)) > limits[num_starts]:
                continue
            entry = next((entry for entry in held if entry.step == step), None)
            if kind == "window" and (step <= last or (entry is not None and entry.window is not None)):
                raise self._no_ledger(number, f"step {step} comes after step {max(last, step)}")
            if entry is None:
                if held and step < held[-1].step:
                    continue  # a digest of a window that the loop left out, late
                entry = _Entry(step, start=start)
                start = None
                held.append(entry)
            setattr(entry, kind, line)
            if kind == "window":
                last = step
            if len(held) > _HELD:
                yield held.pop(0)
        yield from held

    def _lines(self, containing: bytes = b"") -> Iterator[tuple[int, dict[str, Any]]]:
        """(its number, the object) of each whole line that contains some bytes."""
        try:
            with self.path.open("rb") as file:
                number, text = 0, file.readline()
                while text:
                    number, following = number + 1, file.readline()
                    if containing in text and (line := self._parsed(number, text, last=not following)) is not None:
                        yield number, line
                    text = following
        except RunDirError:  # an OSError too
            raise
        except OSError as e:
            raise RunDirError(f"cannot read {self.path}: {e.strerror}", "", "check the path and its rights") from e
        if not number:
            raise RunDirError(f"{self.path} is empty", "a ledger has a line for each window", "let the run begin")

    def _parsed(self, number: int, text: bytes, last: bool) -> dict[str, Any] | None:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as e:
            if last and number > 1:
                return None  # a kill cut it short
            raise self._no_ledger(number, "no JSON") from e
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            raise self._no_ledger(number, "no object with a kind")
        if line["kind"] == "start" and line.get("schema", SCHEMA) != SCHEMA:
            raise RunDirError(
                f"{self.path} has schema {line['schema']!r}",
                f"this version of samestep reads schema {SCHEMA}",
                "use the version that wrote it",
            )
        return line

    def _step(self, number: int, line: dict[str, Any]) -> int:
        step = line.get("step")
        if isinstance(step, bool) or not isinstance(step, int):
            raise self._no_ledger(number, f"a {line['kind']} without a step")
        return step

    def _no_ledger(self, number: int, what: str) -> RunDirError:
        return RunDirError(
            f"{self.path} is no ledger: {what} in line {number}",
            "a ledger has one JSON object a line, its windows in order",
            "pass a run directory or its ledger.jsonl",
        )


def _side_by_side(a: Iterator[_Entry], b: Iterator[_Entry]) -> Iterator[tuple[_Entry | None, _Entry | None]]:
    """The two runs' entries of each step; None where one has none."""
    left, right = next(a, None), next(b, None)
    while left is not None or right is not None:
        step = min(entry.step for entry in (left, right) if entry is not None)
        here = left is not None and left.step == step
        there = right is not None and right.step == step
        yield left if here else None, right if there else None
        if here:
            left = next(a, None)
        if there:
            right = next(b, None)


# Comparing ------------------------------------------------------------------------------------------------------------


class _Comparing:
    """Takes the entries in order and fills a Comparison."""

    def __init__(self, found: Comparison, tolerance: float) -> None:
        self._found, self._tolerance = found, tolerance
        self._latest: list[dict[str, Any]] = [{}, {}]
        self._fresh: list[list[dict[str, Any]]] = [[], []]
        self._same: tuple[dict[str, Any], dict[str, Any]] | None = None

    def entry(self, left: _Entry | None, right: _Entry | None) -> None:
        """Take what the two ledgers say of one step."""
        found = self._found
        for number, entry in enumerate((left, right)):
            if entry is None:
                continue
            found.windows[number] += entry.window is not None
            if entry.start is not None:
                self._fresh[number] = [self._latest[number], entry.start] if self._latest[number] else []
                self._latest[number] = entry.start
        windows = [None if entry is None else entry.window for entry in (left, right)]
        if windows[0] is not None and windows[1] is not None:
            self._windows(windows[0], windows[1])
        elif windows[0] is not None or windows[1] is not None:
            self._missing(windows)
        if left is not None and right is not None and left.digest is not None and right.digest is not None:
            self._digests(left.step, left.digest, right.digest)

    def end(self) -> None:
        """Take the end of both."""
        if self._found.same:
            self._found.starts = list(self._latest)

    def _windows(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        found, step = self._found, a["step"]
        if found.step is not None:
            if step > found.step:
                gap = relative(a.get("loss"), b.get("loss"))
                found.next_gap = gap if found.next_gap is None else found.next_gap
                if found.largest_gap is None or gap > found.largest_gap[0]:
                    found.largest_gap = gap, step
            return
        differences = list(_differences(a, b, self._tolerance))
        if differences:
            self._first(step, differences, (a, b))
            return
        found.num_same, found.last_same, self._same = found.num_same + 1, step, (a, b)
        self._fresh = [[], []]

    def _missing(self, windows: list[dict[str, Any] | None]) -> None:
        if self._found.step is None:
            there = next(window for window in windows if window is not None)
            states = ["there" if window is not None else "missing" for window in windows]
            missing = Difference(field="missing", label="window", a=states[0], b=states[1])
            self._first(there["step"], [missing], None, there)

    def _digests(self, step: int, a: dict[str, Any], b: dict[str, Any]) -> None:
        found = self._found
        found.num_digests += 1
        tensors = [line.get("tensors") or {} for line in (a, b)]
        if a.get("all") == b.get("all") and tensors[0] == tensors[1]:
            if found.step is None:
                found.digest_same = step
            return
        if found.tensors_step is not None:
            return
        names = [*tensors[0], *(name for name in tensors[1] if name not in tensors[0])]
        found.tensors = [name for name in names if tensors[0].get(name) != tensors[1].get(name)]
        found.tensors_step = step
        if self._tolerance == 0.0 and found.step in (None, step) and not found.differs("missing"):
            label = _FIELDS["weights"] if step else "initial weights"
            weights = Difference(field="weights", label=label, a=a.get("all"), b=b.get("all"))
            if found.step is None:
                self._first(step, [weights], self._same if self._same and self._same[0]["step"] == step else None)
            else:
                found.differences.append(weights)

    def _first(
        self,
        step: int,
        differences: list[Difference],
        windows: tuple[dict[str, Any], dict[str, Any]] | None,
        there: dict[str, Any] | None = None,
    ) -> None:
        found = self._found
        found.step, found.differences, found.current, found.previous = step, differences, windows, self._same
        found.starts, found.restarts = list(self._latest), list(self._fresh)
        line = there or (windows[0] if windows else None)
        found.place = "before the first window" if step == 0 else f"step {step}"
        if line is not None and "window" in line and "epoch" in line:
            found.place = f"window {line['window']} of epoch {line['epoch']} (step {step})"


def _differences(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> Iterator[Difference]:
    for field, label in _FIELDS.items():
        left, right = _value(a, field), _value(b, field)
        if left == right or (field != "scale" and (left is None or right is None)):
            continue  # a figure that one of them does not know is no difference
        gap = None if field in ("place", "data", "skipped") else relative(left, right)
        if gap is None or gap > tolerance:
            yield Difference(field=field, label=label, a=left, b=right, relative=gap)


def _value(line: dict[str, Any], field: str) -> Any:
    if field == "place":
        return [line["epoch"], line["window"]] if "epoch" in line and "window" in line else None
    if field == "data":
        return line.get("digest") or None  # "" where it is unknown
    return line.get(field)


def relative(a: Any, b: Any) -> float:
    """How far two numbers (or two lists of them) are from each other; inf where one is NaN, infinite or missing."""
    if isinstance(a, list) and isinstance(b, list):
        return max(map(relative, a, b), default=0.0) if len(a) == len(b) else math.inf
    try:
        x, y = float(a), float(b)  # the ledger has NaN and infinity as words
    except (TypeError, ValueError):
        return 0.0 if a == b else math.inf
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    return abs(x - y) / max(abs(x), abs(y)) if math.isfinite(x) and math.isfinite(y) else math.inf

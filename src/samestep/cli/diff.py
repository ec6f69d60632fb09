"""Compare two runs by their ledgers: the first window that differs, in what, how far, and why that is likely.

Exit codes: 0 the same, 1 different, 2 a ledger that cannot be read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.errors import RunDirError, SamestepError

if TYPE_CHECKING:
    from samestep.monitor.diff import Comparison, Difference

EXAMPLES = """\
examples:
  samestep diff runs/one runs/other
  samestep diff runs/one-rank runs/four-ranks --tolerance 1e-6
  samestep diff runs/one runs/other --json difference.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("run_a", type=Path, metavar="RUN_A", help="a run directory, or a ledger.jsonl")
    parser.add_argument("run_b", type=Path, metavar="RUN_B", help="the other")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result there too; - for standard output alone"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="REL",
        help="relative difference that counts as equal (default: 0)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare; 0 the same, 1 different, 2 unreadable."""
    from samestep.monitor.diff import compare

    try:
        found = compare(arguments.run_a, arguments.run_b, arguments.tolerance)
        if arguments.json is not None:
            _write(arguments.json, found)
    except SamestepError as e:
        if os.environ.get("SAMESTEP_TRACEBACK") == "1":
            raise
        print("samestep diff: error:", str(e).replace("\n", " "), file=sys.stderr)  # 1 would say "different"
        return 2
    if arguments.json != Path("-"):
        _show(found)
    return 0 if found.same else 1


def _write(path: Path, found: Comparison) -> None:
    text = json.dumps(_plain(_result(found)), indent=2, allow_nan=False) + "\n"
    if path == Path("-"):
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as e:
        raise RunDirError(f"cannot write {path}: {e.strerror}", "--json names a file", "pass another path") from e


def _result(found: Comparison) -> dict[str, Any]:
    from samestep.monitor import causes

    return {
        "same": found.same,
        "files": list(found.files),
        "windows": found.windows,
        "windows_same": found.num_same,
        "step": found.step,
        "place": found.place,
        "differences": [dataclasses.asdict(difference) for difference in found.differences],
        "tensors": found.tensors,
        "tensors_step": found.tensors_step,
        "rounding": causes.looks_like_rounding(found),
        "cause": causes.likely_cause(found),
        "evidence": causes.evidence(found),
    }


def _plain(value: Any) -> Any:
    """As in the ledger: NaN and infinity as words."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show(found: Comparison) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from samestep.monitor import causes

    console = Console(highlight=False, soft_wrap=True)
    for name, file, windows in zip("AB", found.files, found.windows, strict=True):
        console.print(f"{name}  {file}  ({windows} windows)", markup=False)
    if found.same:
        console.print(f"the same in {found.num_same} windows and {found.num_digests} digests of weights", style="green")
    else:
        table = Table(title=f"first difference: {escape(found.place)}", title_justify="left")
        for heading in ("", "A", "B", "relative"):
            table.add_column(heading, overflow="fold")
        for label, *values in _rows(found):
            table.add_row(label, *(escape(value) for value in values))
        console.print(table)
        kind = "looks like rounding" if causes.looks_like_rounding(found) else "does not look like rounding"
        console.print(f"{kind}\nlikely cause: {causes.likely_cause(found)}", markup=False)
    for line in causes.evidence(found):
        console.print(f"- {line}", markup=False)


def _rows(found: Comparison) -> list[tuple[str, str, str, str]]:
    return [(d.label, _text(d.a), _text(d.b), _relative(d)) for d in found.differences]


def _relative(difference: Difference) -> str:
    return "" if difference.relative is None else f"{difference.relative:.1e}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    return repr(value) if isinstance(value, float) else str(value)  # all digits: the difference may be in the last

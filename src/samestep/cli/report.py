"""Write one HTML file that shows one or several runs: curves, speed, where the time went, events, settings.

The file opens in any browser without a network, in light and dark, on a phone too."""

from __future__ import annotations

import argparse
from pathlib import Path

from samestep.errors import RunDirError

EXAMPLES = """\
examples:
  samestep report runs/digits
  samestep report runs/a runs/b --output compare.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories, or ledger files; up to 8")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first run's directory")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and say where it is."""
    from samestep.monitor.report.page import report

    first = arguments.runs[0]
    output = arguments.output or (first if first.is_dir() else first.parent) / "report.html"
    text = report(arguments.runs)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as e:
        raise RunDirError(f"cannot write {output}: {e.strerror}", "the report is a file", "pass --output FILE") from e
    print(f"{output} ({len(text.encode()) / 2**20:.1f} MiB)")
    return 0

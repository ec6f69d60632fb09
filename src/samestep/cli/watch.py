"""Follow a running job in the terminal, from its ledger: progress, loss, speed, where the time goes, events.

Reads only the ledger, so it works from another shell or machine that sees the directory, and ends with the job."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.errors import ConfigError

if TYPE_CHECKING:
    from samestep.monitor.follow import Followed

EXAMPLES = """\
examples:
  samestep watch runs/digits
  samestep watch runs/digits --once
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, or a ledger.jsonl")
    parser.add_argument("--once", action="store_true", help="show the state now, and end")
    parser.add_argument("--every", type=float, default=0.5, metavar="SECONDS", help="between two looks (default: 0.5)")


def run(arguments: argparse.Namespace) -> int:
    """Show the job until it ends; 0 when it ended well or was left running, 1 when it ended with an error."""
    if not 0 < arguments.every < 3600:
        raise ConfigError(f"got --every {arguments.every}", "it is a positive number of seconds", "pass 0.5")
    from rich.console import Console

    from samestep.monitor.follow import Followed

    followed = Followed(arguments.run)
    followed.read()
    console = Console()
    if arguments.once or not sys.stdout.isatty():
        console.print(followed.panel(console.width))
    else:
        _live(followed, console, arguments.every)
    return 0 if followed.status in (None, "done") else 1


def _live(followed: Followed, console: object, every: float) -> None:
    from rich.console import Console
    from rich.live import Live

    assert isinstance(console, Console)
    with Live(followed.panel(console.width), console=console, refresh_per_second=8) as live:
        while followed.status is None:
            time.sleep(every)
            followed.read()
            live.update(followed.panel(console.width))

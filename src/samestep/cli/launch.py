"""Run a Python script on N ranks, over torch.distributed.run's own engine.

On one machine a free port is chosen by itself. Ctrl-C, a failing rank or the end of the launcher ends every rank; the
exit code is that of the first rank that failed."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from samestep.errors import ConfigError

EXAMPLES = """\
examples:
  samestep launch -n 2 train.py --lr 0.1
  samestep launch -n 4 -m mypackage.train
  samestep launch -n 8 --nnodes 2 --rdzv-endpoint host0:29500 train.py     (the same line on both machines)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("-n", "--nproc", type=int, required=True, help="ranks on this machine")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("--nnodes", default="1", help="machines, or min:max (default: 1)")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where several machines meet")
    parser.add_argument("--rdzv-id", help="the job's name where several machines meet")
    parser.add_argument("--max-restarts", type=int, default=0, help="restarts after a failure (default: 0)")
    parser.add_argument("script", metavar="SCRIPT", help="file, or module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Launch; the exit code."""
    from samestep.distributed.launcher import launch

    if arguments.module:
        if importlib.util.find_spec(arguments.script.split(".")[0]) is None:
            raise ConfigError(f"there is no module {arguments.script}", "-m takes a module's name", "check the name")
    elif not Path(arguments.script).is_file():
        raise ConfigError(f"there is no file {arguments.script}", "launch runs a Python script", "check the path")
    return launch(
        [arguments.script, *arguments.args],
        nproc=arguments.nproc,
        module=arguments.module,
        nnodes=arguments.nnodes,
        rdzv_endpoint=arguments.rdzv_endpoint,
        rdzv_id=arguments.rdzv_id or ("samestep" if arguments.nnodes != "1" else None),
        max_restarts=arguments.max_restarts,
    )

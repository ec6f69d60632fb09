"""Run a Python script on several ranks, over torch.distributed.run's own engine.

On one machine a free port is chosen by itself. Ctrl-C, a failing rank or the end of the launcher ends every rank and
its loader workers; the exit code is that of the first rank that failed.
"""

from __future__ import annotations

import argparse

EXAMPLES = """\
examples:
  samestep launch -n 2 train.py --lr 0.1
  samestep launch -n gpu -m mypackage.train
  samestep launch -n 8 --nnodes 2 --rdzv-endpoint host0:29500 --rdzv-id job1 train.py   (the same on both machines)

Everything after SCRIPT goes to the script untouched. OMP_NUM_THREADS is 1 for several ranks unless it is set.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument(
        "-n", "--nproc", required=True, metavar="N", help="ranks on this machine: a number, auto, gpu, cpu"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("--nnodes", default="1", metavar="N", help="machines, or min:max (default: 1)")
    parser.add_argument("--node-rank", type=int, metavar="K", help="this machine's number (default: order of arrival)")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where several machines meet")
    parser.add_argument("--rdzv-id", metavar="ID", help="the run's name where several machines meet")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="K", help="restarts after a failure (default: 0)"
    )
    parser.add_argument(
        "--grace",
        type=int,
        default=6,
        metavar="S",
        help="seconds between asking a rank to end and killing it (default: 6)",
    )
    # One remainder, not script and arguments apart: argparse would take a "--" between the two for itself.
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Launch; the exit code."""
    from samestep.distributed.launcher import launch

    script = arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script
    return launch(
        script,
        nproc=arguments.nproc,
        module=arguments.module,
        nnodes=arguments.nnodes,
        node_rank=arguments.node_rank,
        rdzv_endpoint=arguments.rdzv_endpoint,
        rdzv_id=arguments.rdzv_id,
        max_restarts=arguments.max_restarts,
        grace_s=arguments.grace,
    )

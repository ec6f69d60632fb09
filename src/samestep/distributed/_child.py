"""How a launched rank starts: bound to the launcher's life, then the script as under plain Python."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Ask Linux to end this process when the launcher is gone, also after kill -9, which it cannot pass on."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the request was made
        sys.exit(1)


def main() -> None:
    """`_child.py [-m] script-or-module args...`"""
    _die_with_parent()
    arguments = sys.argv[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))  # noqa: PTH100, PTH120
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

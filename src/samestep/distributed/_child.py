"""How a launched rank starts: tie its life to the launcher's, then become plain Python by exec. Imports no samestep.

Run as a file: `_child.py LAUNCHER_PID PROGRAM ARGUMENT...`. The request survives exec, so that the script's `__main__`,
`sys.argv`, `sys.path` and tracebacks are those of `python script.py`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, command: list[str]) -> None:
    """Ask Linux to kill this process when the launcher is gone, also after a kill -9 that it could not pass on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it ended before the request was made
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

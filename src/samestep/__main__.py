"""`python -m samestep` is `samestep`."""

import sys

from samestep.cli.main import main

if __name__ == "__main__":  # a process that is started by "spawn" imports this module
    sys.exit(main())

"""`python -m samestep` is `samestep`."""

import sys

from samestep.cli.main import main

sys.exit(main())

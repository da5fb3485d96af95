"""`python -m pipejax`: the command line."""

import sys

from pipejax.cli import main

sys.exit(main())

"""`python -m trifocal` is the command `trifocal`."""

import sys

from trifocal.cli import main

sys.exit(main())

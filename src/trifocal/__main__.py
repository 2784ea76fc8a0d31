"""`python -m trifocal` is the command `trifocal`."""

import sys

if not sys.flags.safe_path:
    # The working directory: a folder named wandb or datasets in it would count as the package.
    del sys.path[0]

from trifocal.cli import main

sys.exit(main())

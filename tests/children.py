"""Python processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**variables: object) -> dict[str, str]:
    """This process's variables and some more; the package and the tests are found first, then what was found before."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in variables.items()}}

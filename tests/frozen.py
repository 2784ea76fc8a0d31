"""Freezes what is imported so far: `tests.warm` imports this last, so that no process looks at it for garbage."""

import gc

gc.collect()
gc.freeze()

"""The self-check: named checks, each with a figure and a bound, that test an installation on its machine."""

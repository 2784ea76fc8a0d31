"""Traces of some steps; see `tracer.py`."""

"""Shared by tests, checks and benchmarks: the float64 oracle, random inputs, tolerances, small models."""

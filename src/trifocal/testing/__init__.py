"""What tests, checks and benchmarks share: the float64 oracle, random inputs, tolerances, small models."""

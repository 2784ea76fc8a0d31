"""What the benchmarks share: timing, shapes, baselines, the comparison with float64, rows and result files."""

"""Benchmarks: ratios measured in one run, never asserted in tests. `python -m benchmarks NAME`."""

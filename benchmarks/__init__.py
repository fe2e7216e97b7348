"""Benchmarks of twostep's parts, most of them against what this machine can do; `python -m benchmarks` runs them."""

"""Measurements of this machine and of what twostep makes of it; `python -m benchmarks` runs them."""

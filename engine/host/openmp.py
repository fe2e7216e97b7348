"""Settings of OpenMP, with whose threads torch computes; they are read once, as torch is imported."""

import os

__all__ = ["shorten_spinning"]


def shorten_spinning() -> None:
    """Has torch's threads spin for about 1 ms after each job, not for 13 ms as by default, in which they would take the
    cores from the kernels' own threads. Call before torch is imported; what a user has set stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

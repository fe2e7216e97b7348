"""What every test runs with: hypothesis without deadlines, and Triton's interpreter where there is no GPU."""

import os

from hypothesis import HealthCheck, settings

# Durations mean nothing on a machine that others use, too.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

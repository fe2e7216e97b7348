"""Hypothesis's settings: no deadline per example, since durations mean nothing on a machine that others use, too."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

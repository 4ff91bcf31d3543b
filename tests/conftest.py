"""Settings of every test: hypothesis draws the same examples each time, and a busy machine is no failure."""

from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")

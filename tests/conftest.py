"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Those need ranks: tests/run_parallel.py starts them.
collect_ignore = [] if "ZEROHVD_TEST_RANKS" in os.environ else ["parallel"]

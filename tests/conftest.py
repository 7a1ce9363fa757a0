"""Hypothesis profiles: with CI=true the same examples each time, else new ones; never a deadline
(the machines that run these tests are shared, so a time says nothing)."""

import os

from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")

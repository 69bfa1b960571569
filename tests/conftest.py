"""For every test: a law is never a timing, so hypothesis sets no deadline, and it prints how to repeat a failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("sglcore", deadline=None, print_blob=True)
settings.load_profile("sglcore")

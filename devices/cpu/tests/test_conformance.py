"""The conformance kit on the processor."""

from sglcore.conformance.suite import *  # noqa: F403

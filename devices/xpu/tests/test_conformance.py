"""The conformance kit on this package's device."""

from sglcore.conformance.suite import *  # noqa: F403

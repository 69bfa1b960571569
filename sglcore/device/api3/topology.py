"""`sglcore.worker.topology`, by its name in API 3."""

from sglcore.worker.topology import *  # noqa: F403

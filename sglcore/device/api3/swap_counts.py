"""`sglcore.worker.swap_counts`, by its name in API 3."""

from sglcore.worker.swap_counts import *  # noqa: F403

"""`sglcore.worker.page_transfer`, by its name in API 3."""

from sglcore.worker.page_transfer import *  # noqa: F403

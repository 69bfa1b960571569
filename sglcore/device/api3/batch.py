"""`sglcore.worker.schedule_batch`, by its name in API 3."""

from sglcore.worker.schedule_batch import *  # noqa: F403

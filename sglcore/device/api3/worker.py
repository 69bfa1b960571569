"""`sglcore.worker.model_worker`, by its name in API 3."""

from sglcore.worker.model_worker import *  # noqa: F403

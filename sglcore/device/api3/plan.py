"""`sglcore.worker.step_plan`, by its name in API 3."""

from sglcore.worker.step_plan import *  # noqa: F403

"""`sglcore.core.errors`, by its name in API 3."""

from sglcore.core.errors import *  # noqa: F403

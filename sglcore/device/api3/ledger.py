"""`sglcore.core.ledger`, by its name in API 3."""

from sglcore.core.ledger import *  # noqa: F403

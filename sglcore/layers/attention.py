"""The attention layer, as models import it; it lives beside the contract that it calls."""

from sglcore.runtime.attention.layer import Attention

__all__ = ["Attention"]

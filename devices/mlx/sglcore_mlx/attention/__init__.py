"""Attention over the paged KV cache: the backend contract, and the backends."""

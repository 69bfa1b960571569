"""Attention over the paged cells: what a backend is, and the backends."""

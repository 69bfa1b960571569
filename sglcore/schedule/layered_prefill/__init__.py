"""Prefill in slices of layers between decode steps."""

"""Gemma 1 to 3."""

"""Prefill by another engine, as the scheduler sees it."""

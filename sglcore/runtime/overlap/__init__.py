"""Two batches at once: a batch as two halves that take turns, and prompts by slices of layers beside decode steps."""

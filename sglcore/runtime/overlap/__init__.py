"""Two batches at once: prompts by slices of layers between decode steps."""

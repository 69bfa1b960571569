"""Two batches at once: two-batch overlap (micro-batches), and layered prefill next to decode."""

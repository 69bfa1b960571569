"""The engine: text in, text out, over the scheduler and a worker."""

"""The engine: text in, text out, on top of the scheduler and a worker."""

"""What the server counts, as Prometheus reads it."""

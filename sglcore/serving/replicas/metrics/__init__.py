"""The server's counters, and their form for Prometheus."""

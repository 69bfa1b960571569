"""The server: an HTTP frontend in one process, engines in others."""

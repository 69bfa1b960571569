"""The server: an HTTP front in one process, engines in others."""

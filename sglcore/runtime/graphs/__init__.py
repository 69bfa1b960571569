"""Captured graphs: which sizes are captured and what is padded, and capture and replay on a
stream."""

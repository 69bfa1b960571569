"""Rows of which attention reads few lie in host memory: what the device keeps of them, and how it gets the others."""

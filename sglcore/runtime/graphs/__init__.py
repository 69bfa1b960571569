"""Graphs of every stream device: the policies (which sizes, what is padded) and the mechanisms over one stream capture."""

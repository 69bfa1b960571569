"""Architectures, one file each, with the parameter names of the published checkpoints."""

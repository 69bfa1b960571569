"""Quantised checkpoint formats, one file each."""

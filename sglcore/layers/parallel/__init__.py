"""Layers of which each rank has a part."""

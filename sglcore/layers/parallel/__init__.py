"""Tensor-parallel layers: each rank holds a part."""

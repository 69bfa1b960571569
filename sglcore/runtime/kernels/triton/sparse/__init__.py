"""Triton kernels of sparse attention: latent rows, indexers, compressed blocks and rows in host
memory."""

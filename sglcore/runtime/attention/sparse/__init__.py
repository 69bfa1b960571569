"""Sparse attention over latent, selected and compressed entries: layers, plans, backends."""

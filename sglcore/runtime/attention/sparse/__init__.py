"""Attention over latent, chosen and compressed rows: the layers' side, the plans and the backends."""

"""Granite 3 and 4: dense, sparse and hybrid."""

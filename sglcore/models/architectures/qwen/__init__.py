"""Qwen 1.5 to 4: dense, sparse and hybrid."""

"""Qwen 1.5 to 3.5: dense, sparse and hybrid."""

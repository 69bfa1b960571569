"""Prompts on one engine, decoding on another: the pages of a prompt's KV cache go from the first to the second."""

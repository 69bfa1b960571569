"""Endpoints in the form of llama-server and of SGLang."""

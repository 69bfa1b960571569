"""Endpoints of llama-server and of SGLang."""

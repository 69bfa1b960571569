"""Endpoints that other servers have of their own, over the same runs: llama-server's and SGLang's."""

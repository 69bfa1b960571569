"""Ollama's API, at paths below /api."""
